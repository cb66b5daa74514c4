"""Nodes that ONNX Runtime's optimiser leaves come from where those did that they do the work of."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from nimblec.base.places import SOURCE_KEY
from nimblec.cpu.optimizer import optimize
from nimblec.cpu.sources import sources_of


def noted(op: str, reads: str, made: str, source: str, **attributes: object) -> NodeProto:
    node = helper.make_node(op, reads.split(), [made], name=f"node_{made}", **attributes)
    if source:
        node.metadata_props.add(key=SOURCE_KEY, value=source)
    return node


def sources(
    nodes: list[NodeProto],
    shape: tuple[int, ...],
    outputs: tuple[str, ...],
    inputs: tuple[str, ...] = ("x",),
    **weights: np.ndarray,
) -> dict[str, str]:
    """Return the source of each operator of the optimised model, by the operator."""
    model: ModelProto = helper.make_model(
        helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in inputs],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=9,
    )
    with TemporaryDirectory() as scratch:
        left = optimize(model, Path(), Path(scratch)).proto.graph.node
    found = sources_of(model, left)
    return {node.op_type: found[node.output[0]] for node in left} if found else {}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_fused_node_is_of_all_that_it_computes() -> None:
    nodes = [
        noted("MatMul", "x w", "product", "backward of fc"),
        noted("Add", "product b", "gradient", "update of fc"),
        noted("Exp", "gradient", "y", "update of other"),
    ]
    found = sources(nodes, (4, 8), ("y",), w=random(8, 8), b=random(8))
    assert found == {"Gemm": "backward of fc + update of fc", "Exp": "update of other"}


def test_nodes_in_blocks_and_those_between_them_have_places_too() -> None:
    nodes = [
        noted("Conv", "x w", "conv", "stem.conv", pads=[1, 1, 1, 1]),
        noted("Relu", "conv", "relu", "stem.relu"),
        noted("MaxPool", "relu", "pool", "stem.pool", kernel_shape=[2, 2], strides=[2, 2]),
        noted("Flatten", "pool", "y", "head"),
    ]
    found = sources(nodes, (1, 16, 8, 8), ("y",), w=random(16, 16, 3, 3))
    assert {"Conv", "MaxPool"} <= found.keys()
    assert {place for source in found.values() for place in source.split(" + ")} == {
        "stem.conv", "stem.relu", "stem.pool", "head",
    }  # fmt: skip
    assert found["MaxPool"].startswith("stem.")
    assert all(found.values())


def test_what_two_nodes_do_is_of_neither_that_does_more() -> None:
    nodes = [
        noted("Transpose", "w", "t", "fc", perm=[1, 0]),
        noted("Gemm", "x t b", "y", "fc"),
        noted("Transpose", "t", "again", "backward of fc", perm=[1, 0]),
        noted("MatMul", "y again", "z", "backward of fc"),
    ]
    found = sources(nodes, (8, 8), ("y", "z"), ("x", "w"), b=random(8))
    assert found == {"Gemm": "fc", "MatMul": "backward of fc"}


def test_omitted_inputs_and_outputs_lead_to_no_node() -> None:
    """An LSTM of which only the last state is used has no first output, a Clip without lower bound no second input."""
    nodes = [
        noted("LSTM", "x w r", "", "first", hidden_size=4),
        noted("LSTM", "x w r", "", "second", hidden_size=4),
        noted("Clip", "a", "y", "head"),
    ]
    for node, state in zip(nodes, ("a", "b"), strict=False):
        node.output[:] = ["", state]
    nodes[2].input.extend(["", "b"])
    model = helper.make_model(helper.make_graph(nodes, "graph", [], []))
    assert sources_of(model, [nodes[0], nodes[2]]) == {"a": "first", "y": "second + head"}


@pytest.mark.parametrize("source", ["", "fc"])
def test_a_model_that_says_nothing_has_none(source: str) -> None:
    found = sources([noted("Exp", "x", "y", source)], (4,), ("y",))
    assert found == ({"Exp": "fc"} if source else {})
