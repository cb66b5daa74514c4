"""Constants within branches on the CPU target, against ONNX Runtime, which saves them in forms that it cannot read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cpu_plans import assert_same, floats, write_model
from onnx import NodeProto, TensorProto, helper, numpy_helper

import nimblec

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3)).astype(np.float32)
INPUTS = {"x": X, "c": np.array(True)}
node = helper.make_node


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def write_branches(path: Path, nodes: Sequence[NodeProto], **constants: Any) -> None:
    """Write a model whose input c chooses between ``nodes``, from x to out, with their own constants, and -x."""
    out = [helper.make_tensor_value_info(*floats("out", 2, 3))]
    then = helper.make_graph(nodes, "then", [], out, **constants)
    other = helper.make_graph([node("Neg", ["x"], ["out"])], "other", [], out)
    branch = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    write_model(path, [branch], [floats("x", 2, 3), ("c", TensorProto.BOOL, ())], [floats("y", 2, 3)])


@pytest.mark.parametrize("is_stored_apart", [False, True])
def test_large_constants(path: Path, is_stored_apart: bool) -> None:
    constants = {"v": RNG.standard_normal((3, 400)), "w": RNG.standard_normal((400, 3))}
    write_branches(
        path,
        [node("MatMul", ["x", "v"], ["a"]), node("MatMul", ["a", "w"], ["out"])],
        initializer=[numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()],
    )
    onnx.save(onnx.load(path), path, save_as_external_data=is_stored_apart, location="data")
    assert_same(path, INPUTS)


def test_constants_of_a_body_in_a_body(path: Path) -> None:
    k = numpy_helper.from_array(RNG.standard_normal((2, 3)).astype(np.float32))
    out = [helper.make_tensor_value_info(*floats("inner", 2, 3))]
    then = helper.make_graph([node("Constant", [], ["k"], value=k), node("Mul", ["x", "k"], ["inner"])], "t", [], out)
    other = helper.make_graph([node("Abs", ["x"], ["inner"])], "o", [], out)
    inside = node("If", ["c"], ["i"], then_branch=then, else_branch=other)
    write_branches(path, [inside, node("Sin", ["i"], ["out"])])
    assert_same(path, INPUTS)


def test_sparse_constants(path: Path) -> None:
    values = numpy_helper.from_array(np.array([1.5, -2], np.float32), "w")
    indices = numpy_helper.from_array(np.array([[0, 1], [2, 0]]), "places")
    sparse = helper.make_sparse_tensor(values, indices, [3, 3])
    write_branches(path, [node("MatMul", ["x", "w"], ["out"])], sparse_initializer=[sparse])
    assert_same(path, INPUTS)


def test_sparse_constants_in_a_data_file_beside_new_weights(path: Path) -> None:
    """`--refittable` optimises copies of the model, which lie elsewhere."""
    values = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    values.external_data.add(key="location", value="data")
    (path.parent / "data").write_bytes(np.array([1.5, -2], np.float32).tobytes())
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 6])), [3, 3])
    write_branches(path, [node("MatMul", ["x", "w"], ["out"])], sparse_initializer=[sparse])
    plan = nimblec.compile(path, target="cpu", plan_cache=None, refittable=True, streams=1)
    assert_same(path, INPUTS, plan=plan)
