"""Check the arrays that a user gives for inputs of an ONNX model."""

from collections.abc import Iterable

from onnx import ModelProto

from nimblec.errors import UnsupportedModelError
from nimblec.frontend.onnx import model_file
from nimblec.options import InputSpec


def check_examples(model: ModelProto, examples: Iterable[InputSpec]) -> None:
    """Raise UnsupportedModelError for an array whose name, dtype or shape fits no input of the model."""
    known = {tensor.name: tensor for tensor in model_file.inputs(model)}
    for example in examples:
        if example.name not in known:
            names = ", ".join(repr(name) for name in known) or "none"
            raise UnsupportedModelError(
                f"--example {example.name}: the model has no such input; its inputs are {names}"
            )
        tensor = known[example.name]
        fits = tensor.shape is None or (
            len(tensor.shape) == len(example.shape)
            and all(size in {None, given} for size, given in zip(tensor.shape, example.shape, strict=True))
        )
        if not fits or example.dtype != tensor.dtype:
            raise UnsupportedModelError(
                f"--example {example.name}: an array of {_text(example.dtype, example.shape)}, expected "
                f"{_text(tensor.dtype, tensor.shape)}"
            )


def _text(dtype: str | None, shape: Iterable[int | None] | None) -> str:
    if shape is None:
        return f"{dtype} of any shape"
    return f"{dtype} {'x'.join('?' if size is None else str(size) for size in shape) or 'scalar'}"
