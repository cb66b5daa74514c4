"""Constants, ranges and conversions."""

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.onnx_ops.axes import zero_like
from nimblec.onnx_ops.counted import Counted, bounded, counted, range_of, with_range
from nimblec.onnx_ops.table import Description, Floats, Ints, Known, Node, Refused, op

ELEMENT_TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
}
"""torch's dtype of each number of ``TensorProto.DataType``."""


def dtype_of(element_type: int) -> torch.dtype:
    """Return the dtype for an ONNX element type; raise `Refused` for strings and narrow floats."""
    if element_type not in ELEMENT_TYPES:
        raise Refused(f"element type {element_type} is not supported")
    return ELEMENT_TYPES[element_type]


@op("Constant")
def constant(
    *,
    value: Known | None = None,
    value_float: float | None = None,
    value_floats: Floats | None = None,
    value_int: int | None = None,
    value_ints: Ints | None = None,
) -> Tensor:
    if value is not None:
        return value
    if value_float is not None or value_floats is not None:
        return torch.tensor(value_floats if value_float is None else value_float, dtype=torch.float32)
    if value_int is not None or value_ints is not None:
        return torch.tensor(value_ints if value_int is None else value_int, dtype=torch.int64)
    raise Refused("has no value of a supported kind")


@op("ConstantOfShape", since=9)
def constant_of_shape(input: Tensor, *, node: Node, value: Known | None = None) -> Tensor | Counted:
    element = torch.zeros(1) if value is None else value
    if element.numel() != 1:
        raise Refused(f"attribute 'value' has {element.numel()} elements; expected one")
    bound, counts = bounded(input, node)
    return counted(element.reshape(()).expand(bound), counts)


@op("Range", since=11)
def arange(
    start: Tensor, limit: Tensor, delta: Tensor, *, node: Node, stash_type: int = 1
) -> Tensor | Counted:
    dtype = start.dtype
    half = dtype in (torch.float16, torch.bfloat16)
    if half and stash_type != 1:
        raise Refused(f"attribute 'stash_type' is {stash_type}; expected 1 (float)")
    first, last, step = (value.reshape(()) for value in (start, limit, delta))
    if not isinstance(step, FakeTensor) and step == 0:
        raise Refused("input 2 'delta' is 0")
    count = _steps(first, last, step)
    ends = [range_of(value) for value in (start, limit)]
    if isinstance(count, FakeTensor) and not isinstance(step, FakeTensor) and None not in ends:
        (low, high, _), (lower, upper, counts) = (end for end in ends if end is not None)
        least, most = (_steps(high, lower, step), _steps(low, upper, step))[:: 1 if step > 0 else -1]
        is_limit = bool(step == 1) and bool(low == 0) and bool(high == 0)
        count = with_range(count, least, most, counts if is_limit else ())
    bound, axes = bounded(count, node)
    work = torch.float32 if half else dtype
    return counted((first.to(work) + torch.arange(bound[0]).to(work) * step.to(work)).to(dtype), axes)


def _steps(first: Tensor, last: Tensor, step: Tensor) -> Tensor:
    """Return the number of elements of a range, int64."""
    wide = (last.to(torch.float64) - first.to(torch.float64)) / step.to(torch.float64)
    return torch.ceil(wide).clamp(min=0).to(torch.int64).reshape(())


@op("EyeLike", since=9)
def eye_like(x: Description, *, dtype: int | None = None, k: int = 0) -> Tensor:
    if len(x.shape) != 2:
        raise Refused(f"input 0 has {len(x.shape)} dimensions; expected 2")
    rows, columns = x.shape
    diagonal = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] == k
    return diagonal.to(x.dtype if dtype is None else dtype_of(dtype))


@op("Cast", since=6)
def cast(x: Tensor, *, round_mode: str = "up", saturate: int = 1, to: int) -> Tensor:
    return convert(x, dtype_of(to))


@op("CastLike", since=15)
def cast_like(x: Tensor, target_type: Description, *, round_mode: str = "up", saturate: int = 1) -> Tensor:
    return convert(x, target_type.dtype)


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` as ``dtype``: fractions are cut off, integers wrap."""
    if x.dtype.is_floating_point and dtype in (torch.uint16, torch.uint32):
        return x.to(torch.int64).to(dtype)
    return x.to(dtype)


@op("Dropout", since=7)
def dropout(data: Tensor, *, ratio: float = 0.5) -> tuple[Tensor, Tensor]:
    return data, torch.ones(data.shape, dtype=torch.bool)


@op("Dropout", since=12)
def dropout_input(
    data: Tensor, ratio: Description | None = None, training_mode: bool = False, *, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    if training_mode:
        raise Refused("input 2 'training_mode' is true; expected false")
    return data, torch.ones(data.shape, dtype=torch.bool)


@op("BitCast", since=26)
def bit_cast(x: Tensor, *, to: int) -> Tensor:
    dtype = dtype_of(to)
    if dtype.itemsize != x.dtype.itemsize:
        raise Refused(f"{x.dtype} and {dtype} differ in size")
    return x.view(dtype)


@op("Trilu", since=14)
def triangle(x: Tensor, k: int = 0, *, upper: int = 1) -> Tensor:
    rows, columns = x.shape[-2:]
    above = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
    kept = above >= k if upper else above <= k
    return torch.where(kept, x, zero_like(x))


def _enter_window(name: str, constant: float, once: float, twice: float) -> None:
    """Enter the window ``constant - once * cos(t) + twice * cos(2 t)``."""

    @op(name, since=17)
    def window(
        size: Tensor, *, node: Node, output_datatype: int = 1, periodic: int = 1
    ) -> Tensor | Counted:
        bound, counts = bounded(size, node)
        steps = (size.reshape(()) if periodic else size.reshape(()) - 1).clamp(min=1)
        angle = torch.arange(bound[0], dtype=torch.float64) * (2 * math.pi) / steps
        values = constant - once * torch.cos(angle) + twice * torch.cos(2 * angle)
        return counted(values.to(dtype_of(output_datatype)), counts)


_enter_window("HannWindow", 0.5, 0.5, 0.0)
_enter_window("HammingWindow", 25 / 46, 21 / 46, 0.0)
_enter_window("BlackmanWindow", 0.42, 0.5, 0.08)
