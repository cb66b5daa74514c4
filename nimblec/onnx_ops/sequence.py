"""Sequences of tensors, which exist at import only, and optional values."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.onnx_ops.axes import axis_of
from nimblec.onnx_ops.creation import dtype_of
from nimblec.onnx_ops.indexing import gather
from nimblec.onnx_ops.table import Known, Refused, op


def _place(position: int | None, count: int, default: int) -> int:
    place = default if position is None else position
    if not -count <= place <= count:
        raise Refused(f"position {place} is out of range for a sequence of {count}")
    return place + count if place < 0 else place


@op("SequenceConstruct", since=11)
def construct(*inputs: Tensor) -> list[Tensor]:
    return list(inputs)


@op("SequenceEmpty", since=11)
def empty(*, dtype: int = 1) -> list[Tensor]:
    dtype_of(dtype)
    return []


@op("SequenceLength", since=11)
def length(input_sequence: list[Tensor]) -> Tensor:
    return torch.tensor(len(input_sequence))


@op("SequenceAt", since=11)
def item_at(input_sequence: list[Tensor], position: Tensor) -> Tensor:
    if not isinstance(position, FakeTensor):
        return input_sequence[_place(int(position), len(input_sequence), 0)]
    if len({(tensor.shape, tensor.dtype) for tensor in input_sequence}) != 1:
        raise Refused("its position is computed while the model runs, and the tensors differ in shape or dtype")
    return gather(torch.stack(input_sequence), position)


@op("SequenceInsert", since=11)
def insert(input_sequence: list[Tensor], tensor: Tensor, position: int | None = None) -> list[Tensor]:
    place = _place(position, len(input_sequence), len(input_sequence))
    return [*input_sequence[:place], tensor, *input_sequence[place:]]


@op("SequenceErase", since=11)
def erase(input_sequence: list[Tensor], position: int | None = None) -> list[Tensor]:
    place = _place(position, len(input_sequence), len(input_sequence) - 1)
    return [*input_sequence[:place], *input_sequence[place + 1 :]]


@op("ConcatFromSequence", since=11)
def concatenate_sequence(input_sequence: list[Tensor], *, axis: int, new_axis: int = 0) -> Tensor:
    if new_axis:
        return torch.stack(input_sequence, axis)
    return torch.cat(input_sequence, axis)


@op("SplitToSequence", since=11)
def split_to_sequence(
    input: Tensor,
    split: Known | None = None,
    *,
    axis: int = 0,
    keepdims: int = 1,
) -> list[Tensor]:
    axis = axis_of(axis, input.dim())
    if split is None:
        parts = list(torch.split(input, 1, axis))
        return parts if keepdims else [part.squeeze(axis) for part in parts]
    if split.dim() == 0:
        return list(torch.split(input, int(split), axis))
    return list(torch.split(input, split.tolist(), axis))


@op("OptionalHasElement", since=15)
def has_element(input: Any = None) -> Tensor:
    return torch.tensor(input is not None)


@op("OptionalGetElement", since=15)
def get_element(input: Any) -> Any:
    return input
