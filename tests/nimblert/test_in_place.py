"""Operators that may write over what they read: they compute what they compute elsewhere, and no other may."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from nimblert.check import onnx_operators

ROWS = 64
ELEMENT_TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


def session(nodes: list[Any], inputs: list[Any], outputs: list[Any], held: Any = ()) -> Any:
    """Return a session of these nodes as they are, on several threads."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "one", inputs, outputs, held)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_in(made: Any, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
    """Run with the results in these arrays."""
    binding = made.io_binding()
    for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, array in arrays.items():
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    made.run_with_iobinding(binding)


def check(operator: str, arrays: Mapping[str, np.ndarray], output: str, **attributes: Any) -> None:
    """Compare a run whose output lies over an input with one out of place."""
    infos = [helper.make_tensor_value_info(n, ELEMENT_TYPES[a.dtype.name], a.shape) for n, a in arrays.items()]
    like = arrays[output]
    result = helper.make_tensor_value_info("result", ELEMENT_TYPES[like.dtype.name], like.shape)
    made = session([helper.make_node(operator, list(arrays), ["result"], **attributes)], infos, [result])
    (wanted,) = made.run(None, dict(arrays))
    memory = {name: array.copy() for name, array in arrays.items()}
    run_in(made, memory, {"result": memory[output]})
    np.testing.assert_array_equal(memory[output], wanted, strict=True)
    for name in arrays.keys() - {output}:
        np.testing.assert_array_equal(memory[name], arrays[name])


def draw(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(1, 100, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("output", ["left", "right"])
@pytest.mark.parametrize("other", [(ROWS, 4096), (4096,), (ROWS, 1), ()])
def test_arithmetic(operator: str, dtype: str, output: str, other: tuple[int, ...]) -> None:
    arrays = {name: draw(dtype, *((ROWS, 4096) if name == output else other)) for name in ("left", "right")}
    check(operator, arrays, output)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scattered_rows(dtype: str, reduction: str) -> None:
    rows = np.array([[3], [9], [ROWS - 1], [-ROWS]])
    arrays = {"data": draw(dtype, ROWS, 4096), "indices": rows, "updates": draw(dtype, 4, 4096) + 1}
    check("ScatterND", arrays, "data", reduction=reduction)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_scattered_elements(dtype: str, axis: int) -> None:
    indices = np.arange(4 * 8).reshape(4, 8) % 7
    arrays = {"data": draw(dtype, ROWS, 4096), "indices": indices, "updates": draw(dtype, 4, 8) + 1}
    check("ScatterElements", arrays, "data", axis=axis)


def test_every_operator_is_tested_here() -> None:
    assert {"Add", "Sub", "Mul", "Div", "ScatterND", "ScatterElements"} == onnx_operators.IN_PLACE
