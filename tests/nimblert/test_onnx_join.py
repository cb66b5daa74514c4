"""Launches as one model: equal results, and none joined whose memory no value orders."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cpu_plans import assert_same, backend_of, floats, plan_file, write_model
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import nimblert
from nimblert.check.onnx_model import read_model
from nimblert.check.onnx_model import write_model as written
from nimblert.check.protobuf import Budget
from nimblert.cpu.host_memory import HostWeights
from nimblert.cpu.onnx_session import SessionCache, Stretch
from nimblert.errors import InputError
from nimblert.plan import Access, Launch, Plan, Pointer, Region, Relocation, Weight

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


def stretches(plan: Plan) -> list[Stretch]:
    """What the sessions of a plan's program run."""
    with SessionCache(plan, HostWeights(plan)) as sessions:
        found = list(sessions.stretches(plan.programs[0]).values())
    for stretch in found:
        if stretch.model is not None:
            code = stretch.model.code
            assert written(read_model(code, Budget(1 << 16))) == code
    return found


def members(plan: Plan) -> list[list[int]]:
    """Which launches of a plan are one model."""
    return [list(stretch.launches) for stretch in stretches(plan)]


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


def test_what_only_the_model_reads_is_in_no_memory_of_the_plan(tmp_path: Path) -> None:
    """The second branch writes where the first one's middle lay: nothing lies there now."""
    plan = planned(tmp_path, BRANCHES, ["y", "c"])
    (stretch,) = stretches(plan)
    assert stretch.model is not None
    assert [bound.pointer.region for bound in stretch.model.outputs] == [Region.OUTPUT] * 2
    assert [bound.pointer.region for bound in stretch.model.inputs] == [Region.INPUT]


@pytest.mark.parametrize(("read_by_last", "expected"), [("a", [[0, 1]]), ("x", [[0], [1]])])
def test_what_is_written_over_must_have_been_read(
    tmp_path: Path, read_by_last: str, expected: list[list[int]]
) -> None:
    """The first launch reads state that the second writes; what orders them is that it reads what the first made."""
    nodes = [node("Tanh", ["x"], ["a"]), node("Neg", [read_by_last], ["b"])]
    plan = planned(tmp_path, nodes, ["a", "b"])
    program = plan.programs[0]
    first, last = (command for command in program.commands if isinstance(command, Launch))
    state = Access(pointer=Pointer(region=Region.STATE), nbytes=ROWS * WIDTH * 4)
    (source, made), (read, _) = first.relocations, last.relocations
    first = replace(first, relocations=(replace(source, pointer=state.pointer), made), reads=(state,))
    written = Relocation(param_offset=last.relocations[1].param_offset, pointer=state.pointer)
    last = replace(last, relocations=(read, written), writes=(state,))
    shared = replace(plan, state_nbytes=state.nbytes, programs=(replace(program, commands=(first, last)),))
    assert members(shared) == expected


def test_what_is_written_over_must_have_been_read_by_all(tmp_path: Path) -> None:
    """The last launch comes after what made the value that it writes over, and not after each that reads it."""
    nodes = [node(op, [x], [y]) for op, x, y in (("Tanh", "x", "a"), ("Neg", "a", "b"), ("Exp", "a", "c"))]
    plan = planned(tmp_path, [*nodes, node("Sigmoid", ["c"], ["d"])], ["a", "b", "c", "d"])
    program = plan.programs[0]
    by_symbol = {plan.kernels[c.kernel].symbol: c for c in program.commands if isinstance(c, Launch)}
    tanh, sigmoid = by_symbol["Tanh"], by_symbol["Sigmoid"]
    over = replace(sigmoid.relocations[1], pointer=tanh.relocations[1].pointer)
    by_symbol["Sigmoid"] = replace(sigmoid, relocations=(sigmoid.relocations[0], over), writes=tanh.writes)
    commands = tuple(by_symbol[symbol] for symbol in ("Tanh", "Neg", "Exp", "Sigmoid"))
    assert members(replace(plan, programs=(replace(program, commands=commands),))) == [[0, 1, 2], [3]]


@pytest.mark.parametrize("views", [1, 2])
def test_what_is_written_over_must_have_been_read_through_views(tmp_path: Path, views: int) -> None:
    """The second launch writes where the state lies that the first one reshapes, and the last reads the old state."""
    shape, last = [((1, ROWS, WIDTH), "u"), ((ROWS, WIDTH), "f")][views - 1]
    calls = [node("Unsqueeze", ["x", "axis"], ["u"]), node("Flatten", ["u"], ["f"], axis=2)][:views]
    path = write_model(
        tmp_path / "model.onnx",
        [*calls, node("Exp", [last], ["b"]), node("Neg", [last], ["y"])],
        [floats("x", ROWS, WIDTH)],
        [floats(name, *shape) for name in "by"],
        constants={"axis": np.array([0])},
    )
    plan = plan_file(path, streams=1)
    program = plan.programs[0]
    by_symbol = {plan.kernels[c.kernel].symbol: c for c in program.commands if isinstance(c, Launch)}
    state = Access(pointer=Pointer(region=Region.STATE), nbytes=ROWS * WIDTH * 4)
    first, writer = by_symbol["Unsqueeze"], by_symbol["Exp"]
    given, *kept = first.relocations
    first = replace(first, relocations=(replace(given, pointer=state.pointer), *kept), reads=(state, *first.reads[1:]))
    read, written = writer.relocations
    writer = replace(writer, relocations=(read, replace(written, pointer=state.pointer)), writes=(state,))
    by_symbol |= {"Unsqueeze": first, "Exp": writer}
    commands = tuple(by_symbol[symbol] for symbol in ("Unsqueeze", "Flatten", "Exp", "Neg") if symbol in by_symbol)
    zeros = memoryview(bytes(state.nbytes))
    tensor = Weight(name="s", dtype="float32", shape=(ROWS, WIDTH), offset=0, data=zeros)
    programs = (replace(program, commands=commands, outputs=program.outputs[1:]),)
    shared = replace(plan, state_nbytes=state.nbytes, state=(tensor,), programs=programs)
    assert members(shared) == [list(range(views)), [views, views + 1]]
    with nimblert.load(shared) as exe:
        for expected in (0, -1):
            assert np.all(exe.run({"x": np.zeros((ROWS, WIDTH), np.float32)})["y"] == expected)


def test_a_value_that_has_another_shape_than_the_plan_says_ends_the_run(tmp_path: Path) -> None:
    """Rules of a plan are about declared shapes: nothing may read a value of another one."""
    path = write_model(
        tmp_path / "model.onnx",
        [
            node("Tanh", ["x"], ["a"]),
            node("Reshape", ["a", "s"], ["b"]),
            node("Neg", ["b"], ["c"]),
            node("ReduceMax", ["c"], ["y"], keepdims=0),
        ],
        [floats("x", ROWS, WIDTH)],
        [floats("y")],
        constants={"s": np.array([WIDTH, ROWS])},
    )
    plan = plan_file(path)
    assert members(plan) == [[0, 1, 2, 3]]
    (reshape,) = (kernel for kernel in plan.kernels if kernel.symbol == "Reshape")
    model = ModelProto.FromString(bytes(plan.modules[reshape.module].code))
    model.graph.initializer[0].raw_data = np.array([8, 8]).tobytes()
    modules = list(plan.modules)
    modules[reshape.module] = replace(modules[reshape.module], code=memoryview(model.SerializeToString()))
    x = np.zeros((ROWS, WIDTH), np.float32)
    with nimblert.load(plan) as good, nimblert.load(replace(plan, modules=tuple(modules))) as bad:
        assert good(x) == 0
        with pytest.raises(InputError, match=r"^op Reshape .*: failed on these inputs: .*shape"):
            bad(x)


def test_streams_are_joined_each_by_itself(tmp_path: Path) -> None:
    plan = planned(tmp_path, BRANCHES, ["y"], streams=None)
    assert plan.programs[0].stream_count == 2
    backend = backend_of(plan)
    assert len(backend._sessions) < 5
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


def test_several_launches_of_a_large_model_stay_by_themselves(tmp_path: Path) -> None:
    """A model of several launches repeats the constants of each."""
    plan = planned(tmp_path, BRANCHES, ["y"])
    whole = [list(range(len(BRANCHES)))]
    assert members(plan) == whole
    symbols = [plan.kernels[command.kernel].symbol for command in plan.programs[0].commands]

    def enlarged(symbol: str) -> Plan:
        (large,) = {kernel.module for kernel in plan.kernels if kernel.symbol == symbol}
        model = ModelProto.FromString(bytes(plan.modules[large].code))
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(1 << 13, np.float32), "unused"))
        modules = list(plan.modules)
        modules[large] = replace(modules[large], code=memoryview(model.SerializeToString(deterministic=True)))
        return replace(plan, modules=tuple(modules))

    assert members(enlarged("Mul")) == whole
    groups = members(enlarged("MatMul"))
    assert all([index] in groups for index, symbol in enumerate(symbols) if symbol == "MatMul")
    x = np.ones((ROWS, WIDTH), np.float32)
    with nimblert.load(plan) as one, nimblert.load(enlarged("MatMul")) as other:
        np.testing.assert_array_equal(one(x), other(x))


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
