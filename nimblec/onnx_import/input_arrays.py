"""Arrays that a user gives for inputs of an ONNX model: examples of them, and constants in their place."""

from collections.abc import Iterable, Mapping
from reprlib import repr as shortened

import numpy as np
from onnx import ModelProto, TensorProto

from nimblec.base.errors import UnsupportedModelError
from nimblec.base.options import InputSpec
from nimblec.onnx_import import model_file
from nimblec.onnx_import.model_file import ModelTensor
from nimblert.arrays.layouts import numpy_dtype

_CONVERTED = {"b": "iu", "i": "iu", "u": "iu", "f": "iuf", "c": "iufc"}
"""The kinds of numpy dtypes that a constant for an input of each kind may have besides the input's own."""


def make_constant(model: ModelProto, constants: Iterable[tuple[str, np.ndarray]]) -> None:
    """Make inputs of ``model`` constants; one number also fills an input of any rank with one element.

    Raises UnsupportedModelError for a name that no input has, and for values that do not fit its dtype or shape.
    """
    inputs = {tensor.name: tensor for tensor in model_file.inputs(model)}
    given = dict(constants)
    model.graph.initializer.extend(
        _initializer(_input("--constant", name, inputs), array) for name, array in given.items()
    )
    left = [value for value in model.graph.input if value.name not in given]
    del model.graph.input[:]
    model.graph.input.extend(left)


def _initializer(tensor: ModelTensor, given: np.ndarray) -> TensorProto:
    has_one = given.ndim == 0 and set(tensor.shape or ()) == {1}
    array = given.reshape((1,) * len(tensor.shape or ())) if has_one else given
    if not _fits(tensor.shape, array.shape):
        raise UnsupportedModelError(
            f"--constant {tensor.name}: an array of {_text(given.dtype.name, given.shape)}, expected "
            f"{_text(tensor.dtype, tensor.shape)}"
        )
    converted = _converted(array, tensor.dtype)
    if converted is None:
        raise UnsupportedModelError(
            f"--constant {tensor.name}: {shortened(given.tolist())} does not fit the dtype of the model's input, "
            f"{tensor.dtype}: give values that do"
        )
    element_type = model_file.element_type(tensor.dtype)
    return TensorProto(name=tensor.name, data_type=element_type, dims=converted.shape, raw_data=converted.tobytes())


def _converted(array: np.ndarray, dtype: str) -> np.ndarray | None:
    """Return ``array`` in a plan's dtype; None if it is of another kind, or a number is out of the dtype's range."""
    wanted = numpy_dtype(dtype)
    if array.dtype == wanted:
        return array
    kind = "f" if dtype == "bfloat16" else wanted.kind
    if array.dtype.kind not in _CONVERTED[kind]:
        return None
    with np.errstate(over="ignore"):
        converted = array.astype(wanted)
    is_kept = np.isfinite(converted) >= np.isfinite(array) if kind in "fc" else converted == array
    return converted if is_kept.all() else None


def check_examples(model: ModelProto, examples: Iterable[InputSpec]) -> None:
    """Raise UnsupportedModelError for an array whose name, dtype or shape fits no input of the model."""
    inputs = {tensor.name: tensor for tensor in model_file.inputs(model)}
    for example in examples:
        tensor = _input("--example", example.name, inputs)
        if not _fits(tensor.shape, example.shape) or example.dtype != tensor.dtype:
            raise UnsupportedModelError(
                f"--example {example.name}: an array of {_text(example.dtype, example.shape)}, expected "
                f"{_text(tensor.dtype, tensor.shape)}"
            )


def _input(option: str, name: str, inputs: Mapping[str, ModelTensor]) -> ModelTensor:
    if name not in inputs:
        names = ", ".join(map(repr, inputs)) or "none"
        raise UnsupportedModelError(f"{option} {name}: the model has no such input; its inputs are {names}")
    return inputs[name]


def _fits(shape: tuple[int | None, ...] | None, given: tuple[int, ...]) -> bool:
    """Return whether an array of the shape ``given`` may be an input of ``shape``."""
    if shape is None:
        return True
    return len(shape) == len(given) and all(size in {None, n} for size, n in zip(shape, given, strict=True))


def _text(dtype: str | None, shape: Iterable[int | None] | None) -> str:
    if shape is None:
        return f"{dtype} of any shape"
    return f"{dtype} {'x'.join('?' if size is None else str(size) for size in shape) or 'scalar'}"
