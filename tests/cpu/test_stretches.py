"""Stretches: results of ONNX Runtime, the fewest kernels, and no memory that a stretch reads and writes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cpu_plans import assert_same, floats, plan_file, write_model
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import nimblert
from nimblec.base.ir import Buffer, BufferKind, Graph, Schedule
from nimblec.cpu.capture import capture
from nimblec.cpu.stretches import Joiner
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.streams import maximal, serial
from nimblert.check import onnx_model, verify
from nimblert.check.onnx_model import read_model
from nimblert.check.onnx_model import write_model as written
from nimblert.check.protobuf import Budget
from nimblert.errors import InputError
from nimblert.plan import Launch, Plan, Region

node = helper.make_node
ROWS, WIDTH = 4, 16
BRANCHES = (
    node("MatMul", ["x", "w"], ["a"]),
    node("Tanh", ["a"], ["b"]),
    node("MatMul", ["b", "w"], ["c"]),
    node("Sigmoid", ["x"], ["d"]),
    node("MatMul", ["d", "w"], ["e"]),
    node("Mul", ["c", "e"], ["y"]),
)


def saved(folder: Path, nodes: Sequence[NodeProto], outputs: Sequence[str]) -> Path:
    weight = np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    return write_model(
        folder / "model.onnx",
        list(nodes),
        [floats("x", ROWS, WIDTH)],
        [floats(name, ROWS, WIDTH) for name in outputs],
        constants={"w": weight, "one": np.full(1, 3, np.float32)},
    )


def planned(folder: Path, nodes: Sequence[NodeProto], outputs: Sequence[str], *, streams: int | None = 1) -> Plan:
    """Return the plan of nodes, which computes what ONNX Runtime does."""
    path = saved(folder, nodes, outputs)
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    plan = assert_same(path, {"x": x}, plan=plan_file(path, streams=streams))
    assert list(verify.problems(plan)) == []
    for module in plan.modules:
        code = bytes(module.code)
        assert written(read_model(code, Budget(1 << 16))) == code
    return plan


def symbols(plan: Plan) -> list[str]:
    """Return the kernels that a plan launches."""
    return [plan.kernels[command.kernel].symbol for command in plan.programs[0].commands if isinstance(command, Launch)]


def joined(graph: Graph, schedule: Schedule | None = None) -> list[str]:
    """Return the kernels of a graph's stretches, in the captured order unless a schedule is given."""
    made, _ = Joiner().join(graph, schedule or serial(dependencies(graph)))
    return [made.ops[task.op].name for task in made.tasks]


def test_chain_is_one_kernel(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Div", ["a", "one"], ["b"]),
        node("Tanh", ["b"], ["c"]),
        node("MatMul", ["c", "w"], ["d"]),
        node("Div", ["d", "a"], ["y"]),
    ]
    plan = planned(tmp_path, nodes, ["y"])
    assert symbols(plan) == ["MatMul to Div (5 ops)"]
    assert [op.name for op in plan.programs[0].ops[1:]] == ["MatMul", "Div", "Tanh", "MatMul", "Div"]


def test_values_of_one_stretch_take_no_memory_of_the_plan(tmp_path: Path) -> None:
    plan = planned(tmp_path, BRANCHES, ["y", "c"])
    (launch,) = plan.programs[0].commands
    assert isinstance(launch, Launch)
    assert plan.arena_nbytes == 0
    assert [access.pointer.region for access in launch.writes] == [Region.OUTPUT] * 2
    assert {access.pointer.region for access in launch.reads} == {Region.INPUT, Region.WEIGHTS}


def in_state(graph: Graph, names: dict[str, str]) -> Graph:
    """Return the graph with these buffers as one state each, by the name of the state."""
    numbers = {buffer.name: index for index, buffer in enumerate(graph.buffers)}
    kept = {state: len(graph.buffers) + n for n, state in enumerate(dict.fromkeys(names.values()))}
    moved = {numbers[name]: kept[state] for name, state in names.items()}
    state = tuple(
        Buffer(kind=BufferKind.STATE, nbytes=ROWS * WIDTH * 4, data=memoryview(bytes(ROWS * WIDTH * 4))) for _ in kept
    )
    tasks = []
    for task in graph.tasks:
        reads, writes = (
            tuple(replace(a, buffer=moved.get(a.buffer, a.buffer)) for a in accesses)
            for accesses in (task.reads, task.writes)
        )
        references = tuple(replace(r, buffer=moved.get(r.buffer, r.buffer)) for r in task.work.references)
        tasks.append(replace(task, work=replace(task.work, references=references), reads=reads, writes=writes))
    inputs = tuple(view for view in graph.inputs if view.buffer not in moved)
    outputs = tuple(view for view in graph.outputs if view.buffer not in moved)
    return replace(graph, buffers=(*graph.buffers, *state), tasks=tuple(tasks), inputs=inputs, outputs=outputs)


def captured(folder: Path, nodes: Sequence[NodeProto], inputs: str, outputs: str) -> Graph:
    """Return the graph of nodes whose inputs and outputs have names of one letter each."""
    given, made = ([floats(name, ROWS, WIDTH) for name in names] for names in (inputs, outputs))
    return capture(write_model(folder / "model.onnx", nodes, given, made))


def test_stretch_ends_before_a_write_over_what_it_reads(tmp_path: Path) -> None:
    """ONNX Runtime orders nodes by their values alone: the last node may run before the first two."""
    nodes = [node("Tanh", ["v"], ["a"]), node("Neg", ["a"], ["b"]), node("Exp", ["v"], ["y"])]
    graph = captured(tmp_path, nodes, "v", "aby")
    assert joined(graph) == ["Tanh to Exp (3 ops)"]
    ordered = {graph.ops[task.op].name: task for task in graph.tasks}
    graph = replace(graph, tasks=tuple(ordered[name] for name in ("Exp", "Tanh", "Neg")))
    assert joined(in_state(graph, {"v": "s", "b": "s"})) == ["Exp to Tanh (2 ops)", "Neg"]


def test_node_that_updates_state_in_place_is_alone(tmp_path: Path) -> None:
    nodes = [node("Tanh", ["x"], ["a"]), node("Add", ["v", "a"], ["b"]), node("Exp", ["b"], ["y"])]
    graph = captured(tmp_path, nodes, "xv", "by")
    assert joined(graph) == ["Tanh to Exp (3 ops)"]
    assert joined(in_state(graph, {"v": "s", "b": "s"})) == ["Tanh", "Add", "Exp"]


def test_second_write_to_a_state_begins_a_stretch(tmp_path: Path) -> None:
    nodes = [node("Tanh", ["x"], ["a"]), node("Neg", ["a"], ["b"]), node("Exp", ["b"], ["y"])]
    graph = captured(tmp_path, nodes, "x", "aby")
    assert joined(in_state(graph, {"b": "s", "y": "s"})) == ["Tanh to Neg (2 ops)", "Exp"]


def test_scalar_between_nodes_is_in_memory_of_the_plan(tmp_path: Path) -> None:
    """ONNX Runtime does not tell a scalar from a value of unknown rank."""
    nodes = [
        node("Tanh", ["x"], ["a"]),
        node("ReduceMax", ["a"], ["r"], keepdims=0),
        node("Exp", ["r"], ["e"]),
        node("Mul", ["a", "e"], ["y"]),
    ]
    plan = planned(tmp_path, nodes, ["y"])
    (launch,) = plan.programs[0].commands
    assert isinstance(launch, Launch)
    assert [(access.pointer.region, access.nbytes) for access in launch.writes] == [
        (Region.ARENA, 4),
        (Region.ARENA, 4),
        (Region.OUTPUT, ROWS * WIDTH * 4),
    ]


def test_streams_are_joined_each_by_itself(tmp_path: Path) -> None:
    plan = planned(tmp_path, BRANCHES, ["y"], streams=None)
    assert plan.programs[0].stream_count == 2
    assert sorted(symbols(plan)) == ["MatMul to MatMul (3 ops)", "Mul", "Sigmoid to MatMul (2 ops)"]


def test_equal_stretches_are_one_kernel(tmp_path: Path) -> None:
    nodes = [
        *(node("Tanh", [x], [y]) for x, y in ("va", "xb")),
        node("Exp", ["a"], ["c"]),
        node("Exp", ["b"], ["d"]),
        node("Sub", ["c", "d"], ["y"]),
    ]
    graph = captured(tmp_path, nodes, "vx", "y")
    made, schedule = Joiner().join(graph, maximal(dependencies(graph)))
    assert sorted(made.ops[task.op].name for task in made.tasks) == [
        "Sub",
        "Tanh to Exp (2 ops)",
        "Tanh to Exp (2 ops)",
    ]
    assert len(made.kernels) == len(made.modules) == 2
    assert len(schedule.waits) == 1


def test_joiner_writes_each_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules have most stretches in common, and writing a model takes longer than all else."""
    graph, joiner = capture(saved(tmp_path, BRANCHES, ["y"])), Joiner()
    first = joiner.join(graph, serial(dependencies(graph)))
    monkeypatch.delattr(onnx_model, "write_model")
    assert joiner.join(graph, serial(dependencies(graph))) == first


def test_constants_of_several_nodes_are_stored_once(tmp_path: Path) -> None:
    nodes = [node("Add", [f"v{i}", "one"], [f"v{i + 1}"]) for i in range(50)]
    nodes[0].input[0], nodes[-1].output[0] = "x", "y"
    plan = planned(tmp_path, nodes, ["y"])
    (module,) = plan.modules
    assert len(ModelProto.FromString(bytes(module.code)).graph.initializer) == 1


def test_duration_of_a_stretch_is_that_of_its_nodes(tmp_path: Path) -> None:
    graph = capture(saved(tmp_path, BRANCHES, ["y"]))
    graph = replace(graph, tasks=tuple(replace(task, duration_ns=10 + n) for n, task in enumerate(graph.tasks)))
    made, _ = Joiner().join(graph, serial(dependencies(graph)))
    assert [task.duration_ns for task in made.tasks] == [sum(range(10, 16))]


def test_nodes_with_bodies_stay_alone(tmp_path: Path) -> None:
    """Branches are no kernels, and end a stretch."""
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
    assert symbols(planned(tmp_path, nodes, ["y"])) == ["Tanh to Squeeze (4 ops)", "Exp"]


def test_large_model_of_several_nodes_stays_alone(tmp_path: Path) -> None:
    """The model of a stretch repeats that of each node."""
    graph = capture(saved(tmp_path, BRANCHES, ["y"]))

    def enlarged(symbol: str) -> Graph:
        (large,) = {kernel.module for kernel in graph.kernels if kernel.symbol == symbol}
        model = ModelProto.FromString(bytes(graph.modules[large].code))
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(1 << 13, np.float32), "unused"))
        modules = list(graph.modules)
        modules[large] = replace(modules[large], code=memoryview(model.SerializeToString(deterministic=True)))
        return replace(graph, modules=tuple(modules))

    assert len(joined(graph)) == len(joined(enlarged("Mul"))) == 1
    assert joined(enlarged("MatMul")).count("MatMul") == 3


@pytest.mark.parametrize(
    ("dtype", "dividend", "divisor", "kernels"),
    [
        (TensorProto.INT64, "x", "two", 1),
        (TensorProto.INT64, "two", "x", 1),
        (TensorProto.INT64, "x", "minus", 3),
        (TensorProto.INT64, "least", "x", 3),
        (TensorProto.INT64, "x", "x", 3),
        (TensorProto.INT16, "x", "x", 1),
        (TensorProto.FLOAT, "x", "x", 1),
    ],
)
def test_only_safe_divisions_join(tmp_path: Path, dtype: int, dividend: str, divisor: str, kernels: int) -> None:
    """The operands of other divisions must be looked at before they run."""
    nodes = [node("Add", ["x", "x"], ["a"]), node("Div", [dividend, divisor], ["b"]), node("Add", ["a", "b"], ["y"])]
    path = write_model(
        tmp_path / "m.onnx",
        nodes,
        [("x", dtype, (4,))],
        [("y", dtype, (4,))],
        constants={"two": np.array(2), "minus": np.array([-1]), "least": np.array(-(2**63))},
    )
    plan = plan_file(path)
    assert len(plan.programs[0].commands) == kernels
    assert list(verify.problems(plan)) == []


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
