"""Python's numbers, which torch.onnx.export rounds to float32 also where float64 is computed with them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx_ir
from torch.onnx._internal.exporter._building import OpRecorder


@contextmanager
def exact_numbers() -> Iterator[None]:
    """Have torch.onnx.export make a float64 constant of a number that is cast to float64."""
    before = OpRecorder._call_op

    def call(recorder: OpRecorder, signature: Any, inputs: dict[str, Any], attributes: Any, *others: Any) -> Any:
        number = inputs.get("input")
        if isinstance(number, float) and _target(signature.name, inputs, attributes) == onnx_ir.DataType.DOUBLE:
            exact = onnx_ir.tensor(number, onnx_ir.DataType.DOUBLE)
            inputs = {**inputs, "input": recorder.opset.Constant(value=exact)}
        return before(recorder, signature, inputs, attributes, *others)

    OpRecorder._call_op = call  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        OpRecorder._call_op = before  # type: ignore[method-assign]


def _target(name: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> Any:
    """The dtype that a cast makes; None for another operator."""
    if name == "Cast":
        return attributes["to"]
    return getattr(inputs["target_type"], "dtype", None) if name == "CastLike" else None
