"""Models at the edges of what ONNX allows, on the CPU target, against ONNX Runtime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from cpu_plans import Value, assert_same, floats, plan_file, run_plan, write_model
from onnx import GraphProto, NodeProto, TensorProto, helper

import nimblec
from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.base.options import InputSpec
from nimblec.onnx_import import model_file
from nimblert import loading
from nimblert.check import verify
from nimblert.errors import DeviceMismatchError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3)).astype(np.float32)
INT64 = TensorProto.INT64
node = helper.make_node


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def test_an_output_that_is_an_input(path: Path) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", 2, 3)], [floats("y", 2, 3), floats("x", 2, 3)])
    plan = assert_same(path, {"x": X})
    assert list(verify.problems(plan)) == []


def test_an_output_that_is_a_constant(path: Path) -> None:
    write_model(
        path,
        [node("Relu", ["x"], ["y"])],
        [floats("x", 2, 3)],
        [floats("c", 2, 3), floats("y", 2, 3)],
        constants={"c": X},
    )
    plan = assert_same(path, {"x": X})
    assert list(verify.problems(plan)) == []


def test_a_model_that_computes_nothing_from_its_input(path: Path) -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["y"], to=TensorProto.FLOAT)]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2)])
    assert_same(path, {"x": X})


def test_one_value_as_two_outputs(path: Path) -> None:
    nodes = [node("Relu", ["x"], ["r"]), node("Identity", ["r"], ["y"]), node("Identity", ["r"], ["z"])]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3), floats("z", 2, 3), floats("r", 2, 3)])
    assert_same(path, {"x": X})


def test_a_value_used_twice_by_one_node(path: Path) -> None:
    write_model(path, [node("Mul", ["x", "x"], ["y"])], [floats("x", 2, 3)], [floats("y", 2, 3)])
    assert_same(path, {"x": X})


def test_an_unused_input(path: Path) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", 2, 3), floats("spare", 5)], [floats("y", 2, 3)])
    assert_same(path, {"x": X, "spare": np.zeros(5, np.float32)})


def test_empty_tensors(path: Path) -> None:
    nodes = [node("Relu", ["e"], ["r"]), node("Concat", ["x", "r"], ["y"], axis=0)]
    outputs = [floats("y", 2, 3), floats("r", 0, 3)]
    write_model(path, nodes, [floats("x", 2, 3), floats("e", 0, 3)], outputs)
    plan = assert_same(path, {"x": X, "e": np.zeros((0, 3), np.float32)})
    assert list(verify.problems(plan)) == []


def test_scalars(path: Path) -> None:
    nodes = [node("ReduceSum", ["x"], ["s"], keepdims=0), node("Mul", ["s", "k"], ["y"])]
    write_model(path, nodes, [floats("x", 2, 3), floats("k")], [floats("y"), floats("s")])
    assert_same(path, {"x": X, "k": np.array(2.5, np.float32)})


def test_missing_optional_inputs_and_outputs(path: Path) -> None:
    nodes = [
        node("Clip", ["x", "", "top"], ["c"]),
        node("MaxPool", ["image"], ["pooled", "where"], kernel_shape=[2, 2]),
        node("LSTM", ["steps", "w", "r", "", "", "h"], ["", "last"], hidden_size=4),
    ]
    write_model(
        path,
        nodes,
        [floats("x", 2, 3), floats("image", 1, 1, 4, 4), floats("steps", 5, 1, 3)],
        [floats("c", 2, 3), ("where", INT64, (1, 1, 3, 3)), floats("last", 1, 1, 4)],
        constants={
            "top": np.array(0.5, np.float32),
            "w": RNG.standard_normal((1, 16, 3)).astype(np.float32),
            "r": RNG.standard_normal((1, 16, 4)).astype(np.float32),
            "h": np.zeros((1, 1, 4), np.float32),
        },
    )
    shapes = {"image": (1, 1, 4, 4), "steps": (5, 1, 3)}
    assert_same(path, {"x": X} | {n: RNG.standard_normal(s).astype(np.float32) for n, s in shapes.items()})


def test_duplicate_and_empty_node_names(path: Path) -> None:
    nodes = [
        node("Sin", ["x"], ["a"], name="same"),
        node("Cos", ["a"], ["b"], name="same"),
        node("Tan", ["b"], ["y"], name=""),
    ]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3)])
    plan = plan_file(path)  # ONNX Runtime refuses to load names that stand twice
    assert [op.source for op in plan.programs[0].ops] == ["same + b + y", "same", "b", "y"]
    for named in nodes:
        named.name = ""
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3)])
    assert_same(path, {"x": X}, plan=plan)


@pytest.mark.parametrize(
    "element_type", ["BOOL", "UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64", "DOUBLE"]
)
def test_dtypes_in_and_out(path: Path, element_type: str) -> None:
    number = TensorProto.DataType.Value(element_type)
    dtype = helper.tensor_dtype_to_np_dtype(number)
    weight = np.arange(40).reshape(4, 10).astype(dtype)
    write_model(
        path,
        [node("Gather", ["w", "i"], ["g"], axis=0), node("Concat", ["g", "x"], ["y"], axis=0)],
        [("i", INT64, (2,)), ("x", number, (1, 10))],
        [("y", number, (3, 10))],
        constants={"w": weight},
    )
    assert_same(path, {"i": np.array([3, 1]), "x": weight[:1]})


@pytest.mark.parametrize("element_type", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision(path: Path, element_type: int) -> None:
    weight = RNG.standard_normal((64, 32)).astype(np.float32)
    nodes = [
        node("Cast", ["x"], ["h"], to=element_type),
        node("Cast", ["w"], ["v"], to=element_type),
        node("Reshape", ["h", "shape"], ["r"]),
        node("Concat", ["r", "v"], ["c"], axis=0),
        node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
    ]
    write_model(
        path,
        nodes,
        [floats("x", 64)],
        [floats("y", 66, 32), ("r", element_type, (2, 32))],
        constants={"w": weight, "shape": np.array([2, 32])},
    )
    plan = plan_file(path)
    assert {tensor.dtype for tensor in plan.programs[0].outputs} >= {"float32"}
    if element_type == TensorProto.FLOAT16:  # a session returns no bfloat16 to numpy
        assert_same(path, {"x": RNG.standard_normal(64).astype(np.float32)}, plan=plan)


def test_control_flow_is_one_kernel_that_captures_values(path: Path) -> None:
    inner = [floats("out", 2, 3)]
    then = helper.make_graph(
        [node("MatMul", ["r", "w"], ["out"])], "then", [], [helper.make_tensor_value_info(*inner[0])]
    )
    other = helper.make_graph([node("Neg", ["x"], ["out"])], "else", [], [helper.make_tensor_value_info(*inner[0])])
    nodes = [node("Sin", ["x"], ["r"]), node("If", ["c"], ["y"], then_branch=then, else_branch=other)]
    weight = RNG.standard_normal((3, 3)).astype(np.float32)
    big = RNG.standard_normal((3, 100)).astype(np.float32)
    nodes.append(node("MatMul", ["y", "big"], ["z"]))
    write_model(
        path,
        nodes,
        [floats("x", 2, 3), ("c", TensorProto.BOOL, ())],
        [floats("y", 2, 3), floats("z", 2, 100)],
        constants={"w": weight, "big": big},
    )
    for condition in (True, False):
        plan = assert_same(path, {"x": X, "c": np.array(condition)})
        assert "If" in [op.name for op in plan.programs[0].ops]


def test_loop_whose_trip_count_is_constant(path: Path) -> None:
    scalar = helper.make_tensor_value_info("go", TensorProto.BOOL, ())
    state = helper.make_tensor_value_info("next", TensorProto.FLOAT, (2, 3))
    body = helper.make_graph(
        [node("Identity", ["keep"], ["go"]), node("Add", ["s", "x"], ["next"]), node("Identity", ["next"], ["scan"])],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, ()),
            helper.make_tensor_value_info("keep", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, (2, 3)),
        ],
        [scalar, state, helper.make_tensor_value_info("scan", TensorProto.FLOAT, (2, 3))],
    )
    nodes = [node("Loop", ["n", "", "x"], ["last", "all"], body=body)]
    outputs = [floats("last", 2, 3), floats("all", "n", 2, 3)]
    write_model(path, nodes, [floats("x", 2, 3)], outputs, constants={"n": np.array(4)})
    plan = assert_same(path, {"x": X})
    assert plan.programs[0].outputs[1].shape == (4, 2, 3)


def _scan_of(path: Path, shape: tuple[int, ...], rest: tuple[int, ...], axes: dict[str, list[int]]) -> Path:
    """Return a model that adds up rows from a first one."""
    step = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("s", "t", "next", "out")]
    nodes = [node("Add", ["s", "t"], ["next"]), node("Tanh", ["next"], ["out"])]
    body = helper.make_graph(nodes, "body", step[:2], step[2:])
    call = node("Scan", ["first", "x"], ["last", "y"], body=body, num_scan_inputs=1, **axes)
    given = [floats("first", *rest), floats("x", *shape)]
    return write_model(path, [call], given, [floats("last", *rest), ("y", 1, None)])


def test_scans_of_empty_tensors_end_no_process(path: Path) -> None:
    first = RNG.standard_normal((2, 4), np.float32)
    plan = plan_file(_scan_of(path, (2, 4, 0), (2, 4), {"scan_input_axes": [-1]}))
    last, rows = run_plan(plan, {"first": first, "x": np.zeros((2, 4, 0), np.float32)})
    assert np.array_equal(last, first)
    assert rows.shape == (0, 2, 4)
    with pytest.raises(UnsupportedModelError, match="Scan: an empty tensor, and scans along the axes"):
        plan_file(_scan_of(path, (4, 0), (0,), {"scan_output_axes": [1]}))


@pytest.mark.parametrize("axis", [0, 1])
def test_scans_in_branches(path: Path, axis: int) -> None:
    step = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("s", "t", "next", "out")]
    nodes = [node("Add", ["s", "t"], ["next"]), node("Tanh", ["next"], ["out"])]
    body = helper.make_graph(nodes, "body", step[:2], step[2:])
    scan = node("Scan", ["first", "x"], ["last", "out"], body=body, num_scan_inputs=1, scan_output_axes=[axis])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    then, other = (helper.make_graph([made], "b", [], [out]) for made in (scan, node("Tanh", ["x"], ["out"])))
    branch = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    given = [floats("x", 3, 3), floats("first", 3), ("c", TensorProto.BOOL, ())]
    write_model(path, [branch], given, [floats("y", 3, 3)])
    assert_same(path, {"x": RNG.standard_normal((3, 3), np.float32), "first": X[0], "c": np.array(True)})


def _step(inputs: str, nodes: Sequence[NodeProto], outputs: str) -> GraphProto:
    """Return a body of scalars: "i" is an integer, "go" is a condition."""
    types = {"i": INT64, "go": TensorProto.BOOL}
    given, made = (
        [helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), ()) for name in names.split()]
        for names in (inputs, outputs)
    )
    return helper.make_graph(nodes, "body", given, made)


def test_branches_may_return_one_value_twice(path: Path) -> None:
    """ONNX Runtime writes one of the two."""
    then, other = (_step("", [node(operator, ["x"], ["r"])], "r r") for operator in ("Tanh", "Neg"))
    branch = node("If", ["c"], ["y", "z"], then_branch=then, else_branch=other)
    write_model(path, [branch], [floats("x"), ("c", TensorProto.BOOL, ())], [floats("y"), floats("z")])
    assert run_plan(plan_file(path), {"x": np.array(2, np.float32), "c": np.array(False)}) == [-2, -2]


def test_scans_may_return_what_they_read_and_one_value_twice(path: Path) -> None:
    """ONNX Runtime leaves such outputs as their memory was."""
    body = _step("s v", [node("Add", ["s", "v"], ["t"])], "t v t t s")
    scan = node("Scan", ["first", "x"], ["last", "a", "b", "c", "d"], body=body, num_scan_inputs=1)
    outputs = [floats("last"), *(floats(name, 3) for name in "abcd")]
    write_model(path, [scan], [floats("first"), floats("x", 3)], outputs)
    x = np.array([1, 2, 3], np.float32)
    results = run_plan(plan_file(path), {"first": np.zeros((), np.float32), "x": x})
    assert [result.tolist() for result in results] == [6, [1, 2, 3], [1, 3, 6], [1, 3, 6], [0, 1, 3]]


def test_loops_may_return_the_number_of_their_iteration(path: Path) -> None:
    """ONNX Runtime gives the last for all."""
    body = _step("i go s", [node("Add", ["s", "s"], ["t"])], "go t i")
    constants = {"n": np.array(3), "yes": np.array(True)}
    loop = node("Loop", ["n", "yes", "x"], ["y", "all"], body=body)
    write_model(path, [loop], [floats("x")], [floats("y"), ("all", INT64, (3,))], constants=constants)
    last, numbers = run_plan(plan_file(path), {"x": np.ones((), np.float32)})
    assert last == 8
    assert numbers.tolist() == [0, 1, 2]


def test_operands_left_out_by_name_at_the_end_are_dropped_for_the_reference_too(path: Path) -> None:
    """ONNX Runtime's DFT reads an axis named ""."""
    write_model(path, [node("DFT", ["x", "", ""], ["y"])], [floats("x", 1, 4, 1)], [floats("y", 1, 4, 2)], opset=20)
    with loading.load(nimblec.compile(path, target="cpu", plan_cache=None)) as model:
        assert model.run({"x": np.ones((1, 4, 1), np.float32)})["y"][0, 0].tolist() == [4, 0]


def test_values_of_a_size_that_only_a_run_shows_may_be_bfloat16(path: Path) -> None:
    body = helper.make_graph(
        [node("Identity", ["keep"], ["go"]), node("Add", ["s", "x"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, ()),
            helper.make_tensor_value_info("keep", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        node("Loop", ["n", "", "x"], ["last"], body=body),
        node("Cast", ["last"], ["rounded"], to=TensorProto.BFLOAT16),
        node("Cast", ["rounded"], ["y"], to=TensorProto.FLOAT),
    ]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3)], constants={"n": np.array(4)})
    assert_same(path, {"x": X})


CALLS = {
    "Conv": (node("Conv", ["x", "w"], ["out"], kernel_shape=[1, 1]), (2, 2, 1, 1)),
    "LSTM": (node("LSTM", ["x", "w", "w"], ["", "out"], hidden_size=2), (1, 8, 2)),
}


@pytest.mark.parametrize("operator", CALLS)
def test_bodies_hold_any_operator(path: Path, operator: str) -> None:
    call, shape = CALLS[operator]
    constants = {"w": np.ones(shape, np.float32)}
    given = floats("x", 1, 2, 4, 4) if operator == "Conv" else floats("x", 1, 1, 2)
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    then, other = (helper.make_graph([made], "b", [], [out]) for made in (call, node("Identity", ["x"], ["out"])))
    output = ("y", TensorProto.FLOAT, None)
    branch = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    write_model(path, [branch], [given, ("c", TensorProto.BOOL, ())], [output], constants=constants)
    x = RNG.standard_normal(given[2], np.float32)
    for chosen in (True, False):
        assert_same(path, {"x": x, "c": np.array(chosen)})
    info = helper.make_tensor_value_info
    step, go, on = info("i", INT64, ()), info("go", TensorProto.BOOL, ()), info("on", TensorProto.BOOL, ())
    carried = info("x", TensorProto.FLOAT, given[2])
    body = helper.make_graph([call, node("Identity", ["go"], ["on"])], "b", [step, go, carried], [on, out])
    loop = node("Loop", ["n", "", "first"], ["y"], body=body)
    write_model(path, [loop], [("first", *given[1:])], [output], constants={**constants, "n": np.array(2)})
    assert_same(path, {"first": x})
    write_model(path, [branch], [given], [output], constants={**constants, "c": np.array(True)})
    assert "If" not in [kernel.symbol for kernel in plan_file(path).kernels]


def test_model_local_function(path: Path) -> None:
    function = helper.make_function(
        "local", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    nodes = [node("Twice", ["x"], ["t"], domain="local"), node("Relu", ["t"], ["y"])]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 3)], functions=[function])
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("local", 1))
    onnx.save(model, path)
    assert_same(path, {"x": X})


def test_sparse_initializer(path: Path) -> None:
    write_model(path, [node("MatMul", ["x", "w"], ["y"])], [floats("x", 2, 3)], [floats("y", 2, 40)])
    model = onnx.load(path)
    values = onnx.numpy_helper.from_array(np.array([1.5, -2], np.float32), "w")
    indices = onnx.numpy_helper.from_array(np.array([[0, 7], [2, 39]]), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 40]))
    onnx.save(model, path)
    assert_same(path, {"x": X})


def test_dynamic_batch_fixed_by_a_spec(path: Path) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", "batch", 3)], [floats("y", "batch", 3)])
    plan = plan_file(path, [InputSpec(name="x", shape=(2, 3))])
    assert plan.programs[0].outputs[0].shape == (2, 3)
    assert_same(path, {"x": X}, plan=plan)


def test_external_data(path: Path) -> None:
    weight = RNG.standard_normal((3, 500)).astype(np.float32)
    write_model(
        path, [node("MatMul", ["x", "w"], ["y"])], [floats("x", 2, 3)], [floats("y", 2, 500)], constants={"w": weight}
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="model.data", size_threshold=0)
    assert path.stat().st_size < weight.nbytes
    assert_same(path, {"x": X})
    (path.parent / "model.data").write_bytes(b"short")
    with pytest.raises(CompileError, match=r"model\.data: has 5 bytes, initializer 'w' .* needs 6000"):
        plan_file(path)
    (path.parent / "model.data").unlink()
    with pytest.raises(CompileError, match=r"model\.data: missing; initializer 'w'"):
        plan_file(path)


def test_external_data_of_a_body_are_beside_the_model(path: Path) -> None:
    k = onnx.numpy_helper.from_array(np.array([1.5], np.float32), "k")
    out = [helper.make_tensor_value_info(*floats("out", 2))]
    then = helper.make_graph([node("Mul", ["x", "k"], ["out"])], "then", [], out, [k])
    other = helper.make_graph([node("Neg", ["x"], ["out"])], "other", [], out)
    branch = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    write_model(path, [branch], [floats("x", 2), ("c", TensorProto.BOOL, ())], [floats("y", 2)])
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="data", size_threshold=0)
    (stored,) = onnx.load(path, load_external_data=False).graph.node
    (tensor,) = (tensor for body in stored.attribute for tensor in body.g.initializer)
    assert tensor.data_location == TensorProto.EXTERNAL
    (y,) = run_plan(plan_file(path), {"x": np.array([2, 4], np.float32), "c": np.array(True)})
    assert list(y) == [3, 6]


def test_external_data_that_are_linked(path: Path) -> None:
    weight = RNG.standard_normal((3, 500)).astype(np.float32)
    write_model(
        path, [node("MatMul", ["x", "w"], ["y"])], [floats("x", 2, 3)], [floats("y", 2, 500)], constants={"w": weight}
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="data", size_threshold=0)
    data = path.parent / "data"
    data.rename(path.parent / "stored")
    data.hardlink_to(path.parent / "stored")
    (name,) = assert_same(path, {"x": X}).weights
    assert name.name == "w"
    data.unlink()
    data.symlink_to("stored")
    assert_same(path, {"x": X})
    assert model_file.load(path).graph.initializer[0].raw_data == weight.tobytes()


def test_external_data_whose_length_is_zero(path: Path) -> None:
    """ONNX Runtime takes as many bytes as the tensor has."""
    constants = {"w": RNG.standard_normal((3, 500)).astype(np.float32), "b": np.ones(500, np.float32)}
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "b"], ["y"])]
    write_model(path, nodes, [floats("x", 2, 3)], [floats("y", 2, 500)], constants=constants)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="data", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "length").value = "0"
    path.write_bytes(model.SerializeToString())
    plan = assert_same(path, {"x": X})
    assert {weight.name for weight in plan.weights} == {"w", "b"}


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        (
            [node("SplitToSequence", ["x"], ["s"], name="split"), node("SequenceLength", ["s"], ["y"])],
            [("y", INT64, ())],
            r"node 'split' \(SplitToSequence\): .* its kernel is not safe for any size",
        ),
        (
            [
                node("ReduceMax", ["x"], ["m"], keepdims=0),
                node("Cast", ["m"], ["k"], to=INT64),
                node("Range", ["a", "k", "b"], ["y"], name="r"),
            ],
            [("y", INT64, ("n",))],
            r"node 'r' \(Range\)",
        ),
        (
            [node("RandomNormalLike", ["x"], ["r"], name="noise"), node("Add", ["x", "r"], ["y"])],
            [floats("y", 2, 3)],
            r"node 'noise' \(RandomNormalLike\): draws random numbers",
        ),
        (
            [node("Dropout", ["x", "", "training"], ["y"], name="drop", seed=1)],
            [floats("y", 2, 3)],
            r"node 'drop' \(Dropout\): draws random numbers",
        ),
    ],
)
def test_what_a_plan_cannot_hold_is_refused_by_name(
    path: Path, nodes: list, outputs: list[Value], message: str
) -> None:
    constants = {"a": np.array(0), "b": np.array(1), "training": np.array(True)}
    write_model(path, nodes, [floats("x", 2, 3)], outputs, constants=constants)
    with pytest.raises(UnsupportedModelError, match=message):
        plan_file(path)


@pytest.mark.parametrize(
    "mode",
    [
        [],
        [node("Not", ["training"], ["mode"])],
        [node("ReduceMax", ["x"], ["m"], keepdims=0), node("Cast", ["m"], ["mode"], to=TensorProto.BOOL)],
    ],
    ids=["an input", "the opposite of one", "of the data"],
)
def test_dropout_that_a_caller_could_turn_on_is_refused(path: Path, mode: list) -> None:
    drop = node("Dropout", ["x", "", "mode" if mode else "training"], ["y"], name="drop")
    write_model(path, [*mode, drop], [floats("x", 2, 3), ("training", TensorProto.BOOL, ())], [floats("y", 2, 3)])
    with pytest.raises(UnsupportedModelError, match=r"node 'drop' \(Dropout\): draws random numbers"):
        plan_file(path)


def test_dropout_that_is_on_in_a_branch_is_refused(path: Path) -> None:
    """Which the run that compares may not take."""
    mode = node("Constant", [], ["mode"], value=onnx.numpy_helper.from_array(np.array(True)))
    drop = node("Dropout", ["x", "", "mode"], ["out"], name="drop")
    then, other = (
        helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info(*floats("out", 2, 3))])
        for nodes in ([mode, drop], [node("Neg", ["x"], ["out"])])
    )
    branch = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    write_model(path, [branch], [floats("x", 2, 3), ("c", TensorProto.BOOL, ())], [floats("y", 2, 3)])
    with pytest.raises(UnsupportedModelError, match=r"node 'drop' \(Dropout\): draws random numbers"):
        plan_file(path)


def test_dropout_of_no_element_may_be_turned_on_by_the_data(path: Path) -> None:
    mode = [node("ReduceMax", ["x"], ["m"], keepdims=0), node("Cast", ["m"], ["mode"], to=TensorProto.BOOL)]
    drop = node("Dropout", ["x", "ratio", "mode"], ["y"])
    write_model(
        path, [*mode, drop], [floats("x", 2)], [floats("y", 2)], constants={"ratio": np.array(0, np.float32)}
    )
    (y,) = run_plan(plan_file(path), {"x": np.array([1, 2], np.float32)})
    assert list(y) == [1, 2]


@pytest.mark.parametrize(
    ("length", "error", "message"),
    [
        (1 << 62, UnsupportedModelError, r"value 'x' has the shape 4611686018427387904: 18446744073709551616 bytes"),
        (1 << 44, DeviceMismatchError, "needs 70368744177664 bytes of memory in one piece, more than is here"),
    ],
)
def test_what_no_memory_holds_is_refused(path: Path, length: int, error: type[Exception], message: str) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", length)], [floats("y", length)])
    with pytest.raises(error, match=message):
        run_plan(plan_file(path), {})


def test_shape_arithmetic_of_a_function_is_folded(path: Path) -> None:
    """ONNX Runtime has no kernel of CenterCropPad, and folds before it writes out the function."""
    plan = assert_same(
        write_model(
            path,
            [node("CenterCropPad", ["x", "sizes"], ["y"])],
            [floats("x", 9, 4)],
            [floats("y", 5, 7)],
            constants={"sizes": np.array([5, 7])},
        ),
        {"x": RNG.standard_normal((9, 4)).astype(np.float32)},
    )
    assert [op.name for op in plan.programs[0].ops] == ["Pad to Slice (2 ops)", "Pad", "Slice"]


def test_quantised_twice_beside_a_size_that_is_not_folded(path: Path) -> None:
    nodes = [
        node("QuantizeLinear", ["x", "scale", "middle"], ["a"]),
        node("DequantizeLinear", ["a", "scale", "middle"], ["b"]),
        node("QuantizeLinear", ["b", "scale", "low"], ["c"]),
        node("DequantizeLinear", ["c", "scale", "low"], ["y"]),
        node("Size", ["x"], ["n"]),
    ]
    constants = {"scale": np.array(0.05, np.float32), "middle": np.array(120, np.uint8), "low": np.array(3, np.int8)}
    write_model(path, nodes, [floats("x", 64)], [floats("y", 64), ("n", TensorProto.INT64, ())], constants=constants)
    assert_same(path, {"x": np.linspace(-10, 10, 64, dtype=np.float32)})


def test_a_function_without_shape_inference(path: Path) -> None:
    x = RNG.standard_normal((2, 3, 4, 5)).astype(np.float32)
    write_model(
        path, [node("MeanVarianceNormalization", ["x"], ["y"])], [floats("x", 2, 3, 4, 5)], [floats("y", 2, 3, 4, 5)]
    )
    assert_same(path, {"x": x})


def test_an_output_that_folds_away_in_an_old_file(path: Path) -> None:
    """Below IR version 4 constants must be used, and ONNX Runtime folds one that is only returned."""
    one = np.ones((1,), np.float32)
    write_model(
        path,
        [node("Neg", ["w"], ["v"]), node("Add", ["x", "w"], ["y"])],
        [floats("x", 1), floats("w", 1)],
        [floats("v", 1), floats("y", 1)],
        constants={"w": one},
    )
    model = onnx.load(path)
    model.ir_version = 3
    onnx.save(model, path)
    assert_same(path, {"x": one})


@pytest.mark.parametrize("shape", [(2**62, 2**62), (0, 2**62, 2**62)])
def test_a_shape_that_no_process_can_address(path: Path, shape: tuple[int, ...]) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", *shape)], [floats("y", *shape)])
    with pytest.raises(UnsupportedModelError, match=r"value 'x' has the shape .*, more than a process can address"):
        plan_file(path)


def test_an_opset_that_onnx_runtime_does_not_know(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "_check_opsets", lambda _model: None)  # as an onnx that is newer would
    monkeypatch.setattr(model_file, "check_operators", lambda _model: None)
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", 2)], [floats("y", 2)], opset=99)
    sentence = r"refuses the model: it supports opsets of ai\.onnx up to \d+: export it for one of these"
    with pytest.raises(UnsupportedModelError, match=sentence):
        plan_file(path)


def test_more_dimensions_than_an_array_has(path: Path) -> None:
    write_model(path, [node("Relu", ["x"], ["y"])], [floats("x", *[1] * 100)], [("y", TensorProto.FLOAT, None)])
    with pytest.raises(UnsupportedModelError, match=r"value 'x' has 100 dimensions; a plan holds at most \d+"):
        plan_file(path)
