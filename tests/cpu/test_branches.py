"""Branches of ONNX models whose conditions are known before they run, on the CPU target, against ONNX Runtime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from cpu_plans import assert_same, floats, plan_file, run_onnxruntime, run_plan, write_model
from onnx import NodeProto, TensorProto, helper

import nimblec
import nimblert
from nimblec.base.errors import UnsupportedModelError
from nimblec.cpu import branches
from nimblec.onnx_import import model_nodes
from nimblert.errors import InputError
from nimblert.plan import Plan, Switch

node = helper.make_node
X = np.arange(6, dtype=np.float32).reshape(2, 3)
CONSTANTS = {"zero": np.array(0), "two": np.array(2), "yes": np.array(True), "no": np.array([False])}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def body(nodes: Sequence[NodeProto], *outputs: str, **constants: np.ndarray) -> onnx.GraphProto:
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    return helper.make_graph(nodes, "body", [], declared, initializers)


def branch(condition: str, output: str, then: onnx.GraphProto, other: onnx.GraphProto) -> NodeProto:
    return node("If", [condition], [output], then_branch=then, else_branch=other)


def symbols(plan: Plan) -> set[str]:
    switches = {p.ops[c.op].name for p in plan.programs for c in p.commands if isinstance(c, Switch)}
    return {kernel.symbol for kernel in plan.kernels} | switches


def shape_is_two(value: str) -> list[NodeProto]:
    """Nodes that compute whether the value has two rows, as c."""
    return [node("Shape", [value], ["s"]), node("Gather", ["s", "zero"], ["n"]), node("Equal", ["n", "two"], ["c"])]


TRUE = helper.make_tensor("", TensorProto.BOOL, [], [True])
CONDITIONS = {
    "initializer": ("yes", [], True),
    "one element": ("no", [], False),
    "Constant": ("c", [node("Constant", [], ["c"], value=TRUE)], True),
    "computed": ("c", [node("Add", ["two", "zero"], ["n"]), node("Cast", ["n"], ["c"], to=TensorProto.BOOL)], True),
    "shape of an input": ("c", shape_is_two("x"), True),
    "shape of a value": ("c", [node("Transpose", ["x"], ["t"]), *shape_is_two("t")], False),
}


@pytest.mark.parametrize("kind", CONDITIONS)
def test_a_known_condition_leaves_its_branch_alone(path: Path, kind: str) -> None:
    """The other one does not fit the input: ONNX Runtime refuses the whole model."""
    condition, before, truth = CONDITIONS[kind]
    fits = body([node("Neg", ["x"], ["r"])], "r")
    misfit = body([node("Squeeze", ["x", "axes"], ["m"])], "m", axes=np.array([0]))
    nodes = [*before, branch(condition, "y", *((fits, misfit) if truth else (misfit, fits)))]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3)], constants=CONSTANTS)
    with pytest.raises(Exception, match=r"axes\[0\]|must be 1"):
        run_onnxruntime(path, {"x": X})
    plan = plan_file(path)
    assert symbols(plan) == {"Neg"}
    np.testing.assert_array_equal(run_plan(plan, {"x": X})[0], -X)


def test_branches_in_branches_keep_all_names_apart(path: Path) -> None:
    """Both have values and constants called r, k and m; the shape that the first leaves determines the second."""

    def inner(factor: float) -> onnx.GraphProto:
        return body([node("Mul", ["r", "k"], ["m"])], "m", k=np.array(factor, np.float32))

    def outer(value: str, factor: float) -> onnx.GraphProto:
        nodes = [node("Add", [value, "own"], ["r"]), *shape_is_two("r"), branch("c", "z", inner(factor), inner(0))]
        return body(nodes, "z", own=np.array(factor / 8, np.float32))

    nodes = [
        node("Neg", ["x"], ["first"]),
        branch("yes", "y1", outer("first", 2), outer("x", 0)),
        branch("no", "y2", outer("y1", 0), outer("y1", 3)),
        node("Sub", ["y2", "first"], ["y"]),
    ]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3), floats("y1", 2, 3)], constants=CONSTANTS)
    plan = assert_same(path, {"x": X})
    assert "If" not in symbols(plan)


@pytest.mark.parametrize("made", ["twice", "outside", "constant"])
def test_what_a_branch_returns(path: Path, made: str) -> None:
    """One value as two outputs, a value from outside, or a constant."""
    own = {"k": X + 1} if made == "constant" else {}
    first, second = {"twice": ("r", "r"), "outside": ("r", "t"), "constant": ("k", "r")}[made]
    then = body([node("Neg", ["t"], ["r"])], first, second, **own)
    nodes = [node("Tanh", ["x"], ["t"]), branch("yes", "y", then, then)]
    nodes[1].output.append("z")
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3), floats("z", 2, 3)], constants=CONSTANTS)
    plan = plan_file(path)
    values = {"t": np.tanh(X), "r": -np.tanh(X), "k": X + 1}
    for found, name in zip(run_plan(plan, {"x": X}), (first, second), strict=True):
        np.testing.assert_allclose(found, values[name], rtol=1e-6)
    assert "If" not in symbols(plan)


def test_a_loop_in_a_branch_reads_its_values_under_their_new_names(path: Path) -> None:
    step = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Add", ["v", "r"], ["w"])],
        "step",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, None),
        ],
    )
    then = body([node("Neg", ["x"], ["r"]), node("Loop", ["two", "", "x"], ["out"], body=step)], "out")
    other = body([node("Tanh", ["x"], ["r"])], "r")
    nodes = [branch("no", "a", then, other), branch("yes", "b", then, other), node("Add", ["a", "b"], ["y"])]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3)], constants=CONSTANTS)
    assert "If" not in symbols(assert_same(path, {"x": X}))


def test_a_condition_that_a_run_decides_stays(path: Path) -> None:
    cases = body([node("Neg", ["x"], ["r"])], "r"), body([node("Tanh", ["x"], ["r"])], "r")
    before = [node("ReduceSum", ["x"], ["sum"], keepdims=0), node("Cast", ["sum"], ["c"], to=TensorProto.BOOL)]
    write_model(path, [*before, branch("c", "y", *cases)], [floats("x", 2, 3)], [floats("y", 2, 3)])
    plan = assert_same(path, {"x": X})
    assert "If" in symbols(plan)
    assert_same(path, {"x": 0 * X}, plan=plan)


@pytest.mark.parametrize("fitting", ["then_branch", "else_branch"])
def test_branch_that_does_not_fit_fails_where_it_is_taken(path: Path, fitting: str) -> None:
    """As in a voice detector that takes another number of samples at each rate."""
    rates = {"high": np.array(16000)}
    fits = body([node("Neg", ["x"], ["r"])], "r")
    misfit = body([node("Squeeze", ["x", "axes"], ["m"])], "m", axes=np.array([0]))
    chosen = branch("c", "y", fits, misfit) if fitting == "then_branch" else branch("c", "y", misfit, fits)
    nodes = [node("Equal", ["rate", "high"], ["c"]), chosen]
    inputs = [floats("x", 2, 3), ("rate", TensorProto.INT64, ())]
    write_model(path, nodes, inputs, [floats("y", 2, 3)], constants=rates)
    right, wrong = (np.array(16000), np.array(8000))[:: 1 if fitting == "then_branch" else -1]
    with nimblert.load(nimblec.compile(path, target="cpu", plan_cache=None)) as executable:
        np.testing.assert_array_equal(executable(X, right), -X)
        with pytest.raises(InputError, match=r"_branch of y, which does not fit the inputs' shapes\): failed on"):
            executable(X, wrong)


def test_branches_of_which_none_fits_are_refused(path: Path) -> None:
    misfit = body([node("Squeeze", ["x", "axes"], ["m"])], "m", axes=np.array([0]))
    inputs = [floats("x", 2, 3), ("c", TensorProto.BOOL, ())]
    write_model(path, [branch("c", "y", misfit, misfit)], inputs, [floats("y", 2, 3)])
    with pytest.raises(UnsupportedModelError, match=r"\(If\).*: if an input chooses the branch, make it a constant"):
        plan_file(path)


@pytest.mark.parametrize("lacks", ["then_branch", "input", "output"])
def test_a_damaged_branch_is_refused(path: Path, lacks: str) -> None:
    case = body([node("Neg", ["x"], ["r"])], "r")
    damaged = branch("yes", "y", case, case)
    if lacks == "then_branch":
        del damaged.attribute[0]
    elif lacks == "input":
        del damaged.input[:]
    else:
        damaged.output.append("z")
    write_model(path, [damaged], [floats("x", 2, 3)], [floats("y", 2, 3)], constants=CONSTANTS)
    with pytest.raises(UnsupportedModelError, match="refuses the model"):
        plan_file(path)


def test_nodes_with_one_name_do_not_hide_a_condition(path: Path) -> None:
    case = body([node("Neg", ["x"], ["r"])], "r")
    before = shape_is_two("x")
    for each in before:
        each.name = "same"
    nodes = [*before, branch("c", "y", case, case)]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3)], constants=CONSTANTS)
    model = onnx.load(path)
    branches.take_branches(model, path.parent)
    assert [each.op_type for each in model_nodes.nodes(model.graph)] == ["Shape", "Gather", "Equal", "Neg"]
