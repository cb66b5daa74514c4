"""What ONNX Runtime saves in any order, with any numbers in names, is one model."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper
from subprocesses import python

from nimblec.cpu.canonical import canonicalize

FLOATS = (TensorProto.FLOAT, [2])
COUNT = 4


def value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, *FLOATS)


def original() -> GraphProto:
    """Branches of two nodes each, whose results one node reads, and one branch of its own."""
    nodes = [helper.make_node("Neg", ["x"], [f"neg_{n}"]) for n in range(COUNT)]
    nodes += [helper.make_node("Relu", [f"neg_{n}"], [f"relu_{n}"]) for n in range(COUNT)]
    nodes.append(helper.make_node("Sum", [f"relu_{n}" for n in range(COUNT)], ["y"]))
    nodes.append(helper.make_node("Abs", ["x"], ["z"]))
    return helper.make_graph(nodes, "g", [value("x")], [value("y"), value("z")])


def counted(name: str, number: int) -> str:
    return f"{name}_token_{number}" if number else name


def optimized(order: Sequence[int]) -> GraphProto:
    """Return the branches fused and laid out otherwise, which ONNX Runtime came to in this order."""
    nodes: list[NodeProto] = []
    for number, branch in enumerate(order):
        weight, made = counted("reorder", 2 * number), counted("reorder", 2 * number + 1)
        nodes.append(helper.make_node("Mul", ["x", weight], [made], name=f"relu_{branch}_nchwc"))
        nodes.append(helper.make_node("Out", [made], [f"relu_{branch}"], name=counted("Out", number)))
    inner = helper.make_graph(
        [helper.make_node("Add", [counted("reorder", 1), "x"], ["inner"])], "then", [], [value("inner")]
    )
    total = helper.make_node("Sum", [f"relu_{n}" for n in range(COUNT)], ["y"])
    either = helper.make_node("If", ["flag"], ["z"], then_branch=inner, else_branch=inner)
    weights = [
        helper.make_tensor(counted("reorder", 2 * number), TensorProto.FLOAT, [1], [float(branch)])
        for number, branch in enumerate(order)
    ]
    weights.sort(key=lambda tensor: tensor.float_data[0])
    return helper.make_graph([*nodes, total, either], "g", [value("x")], [value("y"), value("z")], weights)


def shuffled(graph: GraphProto, seed: int) -> None:
    """Reorder the nodes, each after its sources."""
    left = list(graph.node)
    random.Random(seed).shuffle(left)  # noqa: S311
    known = {"x", "flag", *(weight.name for weight in graph.initializer)}
    ordered = []
    while left:
        node = next(n for n in left if {*n.input} <= known and (n.op_type != "If" or counted("reorder", 1) in known))
        left.remove(node)
        ordered.append(node)
        known.update(node.output)
    del graph.node[:]
    graph.node.extend(ordered)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_and_any_numbers_give_one_model(seed: int) -> None:
    first = optimized(range(COUNT))
    canonicalize(first, original())
    order = list(range(1, COUNT))
    random.Random(seed).shuffle(order)  # noqa: S311
    second = optimized([0, *order])  # the one that the inner graph reads comes first
    shuffled(second, seed)
    canonicalize(second, original())
    assert second.SerializeToString() == first.SerializeToString()


def test_nodes_stand_as_the_model_has_them_and_read_what_they_did() -> None:
    graph = optimized([3, 1, 2, 0])
    shuffled(graph, 0)
    canonicalize(graph, original())
    assert [node.name or node.op_type for node in graph.node if node.op_type not in {"Out", "If"}] == [
        *(f"relu_{n}_nchwc" for n in range(COUNT)),
        "Sum",
    ]
    weights = {weight.name: weight.float_data[0] for weight in graph.initializer}
    makers = {node.output[0]: node for node in graph.node}
    for n in range(COUNT):
        out = makers[f"relu_{n}"]
        product = makers[out.input[0]]
        assert (product.name, weights[product.input[1]]) == (f"relu_{n}_nchwc", float(n))
    either = next(node for node in graph.node if node.op_type == "If")
    for attribute in either.attribute:
        assert makers[attribute.g.node[0].input[0]].name == "relu_3_nchwc"


def test_every_process_sees_the_same_branches(tmp_path: Path) -> None:
    """ONNX Runtime keeps what it laid out in blocks in a table by address."""
    sizes = (1, 3, 5, 7)
    nodes = [helper.make_node("Conv", ["x", f"w{n}"], [f"c{n}"], pads=[n // 2] * 4) for n in sizes]
    nodes.append(helper.make_node("Concat", [f"c{n}" for n in sizes], ["y"], axis=1))
    weights = [numpy_helper.from_array(np.full((4, 3, n, n), n, np.float32), f"w{n}") for n in sizes]
    image, out = ((name, TensorProto.FLOAT, [1, width, 8, 8]) for name, width in (("x", 3), ("y", 16)))
    ends = [helper.make_tensor_value_info(*image)], [helper.make_tensor_value_info(*out)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ends, weights), ir_version=10, opset_imports=[helper.make_opsetid("", 20)]
    )
    onnx.save(model, tmp_path / "m.onnx")
    code = (
        "import sys, onnx; from pathlib import Path; from nimblec.cpu.optimizer import optimize\n"
        "found = optimize(onnx.load(sys.argv[1]), Path('.'), Path(sys.argv[1]).parent).proto\n"
        "for tensor in found.graph.initializer: del tensor.external_data[:]\n"
        "found = found.SerializeToString(deterministic=True)\n"
        "print(len(onnx.ModelProto.FromString(found).graph.node), found.hex())"
    )
    seen = {python(code, tmp_path / "m.onnx") for _ in range(5)}
    assert len(seen) == 1
    assert int(next(iter(seen)).split()[0]) > len(nodes)  # laid out in blocks


def test_names_of_the_models_own_are_no_numbers() -> None:
    """Even if they look as such."""
    nodes = [
        helper.make_node("Neg", ["x_token_7"], ["a_token_3"], name="n"),
        helper.make_node("Neg", ["a_token_3"], ["a"], name="m"),
    ]
    graph = helper.make_graph(nodes, "g", [value("x_token_7")], [value("a")])
    canonicalize(graph, graph)
    first, second = graph.node
    assert [*first.input] == ["x_token_7"]
    assert [*second.output] == ["a"]
    assert first.output[0] == second.input[0] != "a"
