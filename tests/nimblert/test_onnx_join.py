"""Launches as one model: equal results, and none joined whose memory no value orders."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from cpu_plans import assert_same, floats, plan_file, write_model
from onnx import NodeProto, TensorProto, helper

import nimblert
from nimblert.cpu import CpuBackend
from nimblert.errors import InputError
from nimblert.onnx_join import chains
from nimblert.onnx_model import read_model
from nimblert.onnx_model import write_model as written
from nimblert.plan import Launch, Plan
from nimblert.protobuf import Budget

node = helper.make_node
ROWS, WIDTH = 4, 16


def planned(folder: Path, nodes: Sequence[NodeProto], outputs: Sequence[str], *, streams: int | None = 1) -> Plan:
    weight = np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    path = write_model(
        folder / "model.onnx",
        list(nodes),
        [floats("x", ROWS, WIDTH)],
        [floats(name, ROWS, WIDTH) for name in outputs],
        constants={"w": weight, "one": np.ones(1, np.float32)},
    )
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    return assert_same(path, {"x": x}, plan=plan_file(path, streams=streams))


def members(plan: Plan) -> list[list[int]]:
    """Which launches of a plan of one stream are one model."""
    launches = [command for command in plan.programs[0].commands if isinstance(command, Launch)]
    kernels = [plan.kernels[launch.kernel] for launch in launches]
    models = [read_model(bytes(plan.modules[kernel.module].code), Budget(1 << 16)) for kernel in kernels]
    labels = [f"c{number}" for number in range(len(launches))]
    found = chains(list(zip(launches, kernels, models, labels, strict=True)))
    for _, joined in found:
        code = joined.joined().code
        assert written(read_model(code, Budget(1 << 16))) == code
    return [group for group, _ in found]


def test_a_chain_is_one_model(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Add", ["a", "one"], ["b"]),
        node("Tanh", ["b"], ["c"]),
        node("MatMul", ["c", "w"], ["d"]),
        node("Add", ["d", "a"], ["y"]),
    ]
    plan = planned(tmp_path, nodes, ["y"])
    assert members(plan) == [list(range(len(plan.programs[0].commands)))]


def test_launches_that_no_value_orders_are_apart_where_they_share_memory(tmp_path: Path) -> None:
    """The second branch writes where the first one's middle lay, which no value tells ONNX Runtime."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Tanh", ["a"], ["b"]),
        node("MatMul", ["b", "w"], ["c"]),
        node("Sigmoid", ["x"], ["d"]),
        node("MatMul", ["d", "w"], ["e"]),
        node("Mul", ["c", "e"], ["y"]),
    ]
    plan = planned(tmp_path, nodes, ["y"])
    groups = members(plan)
    assert list(chain.from_iterable(groups)) == list(range(len(plan.programs[0].commands)))
    assert len(groups) > 1
    roomy = planned(tmp_path, nodes, ["c", "e", "y", "a", "b", "d"])  # outputs have memory of their own
    assert members(roomy) == [[0, 1, 2, 3, 4, 5]]


def test_streams_are_joined_each_by_itself(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Tanh", ["a"], ["b"]),
        node("MatMul", ["b", "w"], ["c"]),
        node("Sigmoid", ["x"], ["d"]),
        node("MatMul", ["d", "w"], ["e"]),
        node("Mul", ["c", "e"], ["y"]),
    ]
    plan = planned(tmp_path, nodes, ["y"], streams=None)
    assert plan.programs[0].stream_count == 2
    backend = CpuBackend(plan, plan.programs[0])
    assert len(backend._sessions._sessions) < 5
    backend.close()


def test_branches_stay_by_themselves(tmp_path: Path) -> None:
    """A graph within a node names values of the plan's: such a node joins no other."""
    body, other = (
        helper.make_graph([node(op, ["a"], [op])], op, [], [helper.make_tensor_value_info(op, 1, [ROWS, WIDTH])])
        for op in ("Neg", "Abs")
    )
    nodes = [
        node("Tanh", ["x"], ["a"]),
        node("ReduceMax", ["a"], ["r"], keepdims=0),
        node("Greater", ["r", "one"], ["big"]),
        node("Squeeze", ["big"], ["c"]),
        node("If", ["c"], ["b"], then_branch=body, else_branch=other),
        node("Exp", ["b"], ["y"]),
    ]
    plan = planned(tmp_path, nodes, ["y"])
    groups = members(plan)
    lonely = next(i for i, c in enumerate(plan.programs[0].commands) if plan.kernels[c.kernel].symbol == "If")
    assert [lonely] in groups


def test_a_failure_names_the_op_of_several(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "gather.onnx",
        [
            node("Tanh", ["x"], ["a"]),
            node("Cast", ["i"], ["j"], to=7),
            node("Gather", ["a", "j"], ["b"], name="pick"),
            node("Exp", ["b"], ["y"]),
        ],
        [floats("x", 4, 2), ("i", TensorProto.INT32, (3,))],
        [floats("y", 3, 2)],
    )
    with nimblert.load(plan_file(path)) as model:
        x, good = np.zeros((4, 2), np.float32), np.array([0, 1, 3], np.int32)
        expected = model(x, good)
        with pytest.raises(InputError, match=r"^op Gather \(pick\): failed on these inputs: .*indices element out of"):
            model(x, np.array([0, 1, 4], np.int32))
        assert np.array_equal(model(x, good), expected)
