"""Gather, scatter, sort and select."""

from math import prod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.onnx_ops.axes import along, axis_of
from nimblec.onnx_ops.counted import Counted, counted, places, range_of
from nimblec.onnx_ops.counted import non_zero as counted_non_zero
from nimblec.onnx_ops.counted import unique as unique_rows
from nimblec.onnx_ops.table import Ints, Refused, op
from nimblec.onnx_ops.unsigned import SIGNED, bitwise, index_select, not_zero, ordered, unordered

_MOST_COLUMNS = 256
"""Elements of the slices among which Unique finds equal ones: they are sorted once for each."""


def _from_front(indices: Tensor, length: int) -> Tensor:
    """Return indices counted from the front as int64; at import, refuse those out of range."""
    wide = indices.to(torch.int64)
    if length == 0:
        return wide
    if not isinstance(wide, FakeTensor) and wide.numel():
        lowest, highest = int(wide.min()), int(wide.max())
        if not -length <= lowest <= highest < length:
            raise Refused(f"index {lowest if lowest < -length else highest} is out of range for length {length}")
    return torch.remainder(wide, length)


@op("Gather")
@bitwise
def gather(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis = axis_of(axis, data.dim())
    index = _from_front(indices, data.shape[axis])
    if axis == 0 and data.dim() == 2 and data.dtype.is_floating_point:
        return torch.embedding(data, index)
    if index.dim() == 0:
        return torch.index_select(data, axis, index.reshape(1)).squeeze(axis)
    picked = torch.index_select(data, axis, index.reshape(-1))
    return picked.reshape([*data.shape[:axis], *index.shape, *data.shape[axis + 1 :]])


@op("GatherElements", since=11)
@bitwise
def gather_elements(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis = axis_of(axis, data.dim())
    return torch.gather(data, axis, _from_front(indices, data.shape[axis]))


def _flat_index(indices: Tensor, shape: Ints) -> Tensor:
    """Return positions in a tensor of ``shape`` flattened; the last axis of ``indices`` is a point."""
    flat = torch.zeros((), dtype=torch.int64)
    for i, length in enumerate(shape):
        flat = flat * length + _from_front(indices.select(-1, i), length)
    return flat


@op("GatherND", since=11)
@bitwise
def gather_nd(data: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    depth = indices.shape[-1]
    if not 0 <= batch_dims < min(data.dim(), indices.dim()) or batch_dims + depth > data.dim():
        raise Refused(f"indices of shape {tuple(indices.shape)} do not fit data of {data.dim()} dimensions")
    batch, inner = data.shape[:batch_dims], data.shape[batch_dims + depth :]
    point = data.shape[batch_dims : batch_dims + depth]
    flat = _flat_index(indices, point)
    count = torch.Size(batch).numel()
    offset = torch.arange(count).reshape([*batch, *[1] * (flat.dim() - batch_dims)]) * torch.Size(point).numel()
    rows = data.reshape(count * torch.Size(point).numel(), -1) if data.numel() else data.reshape(0, 0)
    picked = torch.index_select(rows, 0, (flat + offset).reshape(-1))
    return picked.reshape([*indices.shape[:-1], *inner])


SCATTER_REDUCTIONS = {"none": None, "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _reduction(name: str) -> str | None:
    if name not in SCATTER_REDUCTIONS:
        raise Refused(f"attribute 'reduction' is {name!r}; expected one of {', '.join(SCATTER_REDUCTIONS)}")
    return SCATTER_REDUCTIONS[name]


def _scatter(data: Tensor, axis: int, index: Tensor, updates: Tensor, how: str | None) -> Tensor:
    if data.dtype in SIGNED and how in ("amax", "amin"):
        return unordered(_scatter_signed(ordered(data), axis, index, ordered(updates), how), data.dtype)
    return _scatter_signed(data, axis, index, updates, how)


@bitwise
def _scatter_signed(data: Tensor, axis: int, index: Tensor, updates: Tensor, how: str | None) -> Tensor:
    if how is None:
        return torch.scatter(data, axis, index, updates)
    return torch.scatter_reduce(data, axis, index, updates, how, include_self=True)


@op("Scatter", since=9)
def scatter(data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0) -> Tensor:
    return scatter_elements(data, indices, updates, axis=axis)


@op("ScatterElements", since=11)
def scatter_elements(
    data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    axis = axis_of(axis, data.dim())
    index = _from_front(indices, data.shape[axis])
    return _scatter(data, axis, index, updates, _reduction(reduction))


@op("ScatterND", since=11)
def scatter_nd(data: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    how = _reduction(reduction)
    depth = indices.shape[-1]
    if depth > data.dim():
        raise Refused(f"indices of shape {tuple(indices.shape)} do not fit data of {data.dim()} dimensions")
    rows = torch.Size(data.shape[:depth]).numel()
    width = torch.Size(data.shape[depth:]).numel()
    index = _flat_index(indices, data.shape[:depth]).reshape(-1, 1).expand(-1, width)
    flat, values = data.reshape(rows, width), updates.reshape(index.shape)
    return _scatter(flat, 0, index, values, how).reshape(data.shape)


@op("TensorScatter", since=24)
@bitwise
def tensor_scatter(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Tensor:
    axis = axis_of(axis, past_cache.dim())
    if axis == 0 or mode not in ("linear", "circular"):
        raise Refused(f"axis {axis} with mode {mode!r} is not supported")
    length = past_cache.shape[axis]
    first = torch.zeros(update.shape[0], dtype=torch.int64) if write_indices is None else write_indices
    place = along(first.to(torch.int64), 0, update.dim()) + along(
        torch.arange(update.shape[axis]), axis, update.dim()
    )
    if mode == "circular":
        place = torch.remainder(place, length)
    return torch.scatter(past_cache, axis, place.expand(update.shape), update)


@op("OneHot", since=9)
def one_hot(indices: Tensor, depth: int, values: Tensor, *, axis: int = -1) -> Tensor:
    axis = axis_of(axis, indices.dim() + 1)
    index = indices.to(torch.int64).unsqueeze(axis)
    index = torch.where(index < 0, index + depth, index)
    hit = index == along(torch.arange(depth), axis, index.dim())
    return torch.where(hit, values.select(0, 1), values.select(0, 0))


@op("TopK")
def top_k_attribute(x: Tensor, *, axis: int = -1, k: int) -> tuple[Tensor | Counted, ...]:
    return top_k(x, torch.tensor(k), axis=axis)


@op("TopK", since=10)
def top_k(
    x: Tensor, k: Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor | Counted, ...]:
    axis = axis_of(axis, x.dim())
    if k.numel() != 1:
        raise Refused(f"k has {k.numel()} elements; expected one")
    length, count, known = x.shape[axis], k.reshape(()).to(torch.int64), range_of(k)
    most = length if known is None else int(known.most)
    if not isinstance(k, FakeTensor) and not 0 <= most <= length:
        raise Refused(f"k is {most}; axis {axis} has length {length}")
    taken = max(0, min(most, length))
    order = torch.sort(ordered(x), dim=axis, descending=bool(largest), stable=True)[1].narrow(axis, 0, taken)
    if x.dtype in SIGNED:
        values = torch.gather(x.view(SIGNED[x.dtype]), axis, order).view(x.dtype)
    else:
        values = torch.gather(x, axis, order)
    counts = {axis: count.clamp(min=0)} if isinstance(k, FakeTensor) else {}
    return counted(values, counts), counted(order, counts)


@op("Compress", since=9)
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor | Counted:
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = axis_of(axis, x.dim())
    mask = condition.reshape(-1).narrow(0, 0, min(condition.numel(), x.shape[axis]))
    if not isinstance(mask, FakeTensor):
        return index_select(x, axis, torch.nonzero(mask).reshape(-1))
    index, count = places(mask)
    return Counted(index_select(x, axis, index), {axis: count})


@op("NonZero", since=9)
def non_zero(x: Tensor) -> Tensor | Counted:
    mask = not_zero(x)
    return counted_non_zero(mask) if isinstance(x, FakeTensor) else torch.nonzero(mask).T.contiguous()


@op("ReverseSequence", since=10)
@bitwise
def reverse_sequence(x: Tensor, sequence_lens: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    if {batch_axis, time_axis} != {0, 1} or x.dim() < 2:
        raise Refused(f"axes {batch_axis} and {time_axis} of {x.dim()} dimensions; expected 0 and 1")
    return torch.gather(x, time_axis, reversed_steps(x, sequence_lens, batch_axis, time_axis))


def reversed_steps(x: Tensor, lengths: Tensor, batch_axis: int, time_axis: int) -> Tensor:
    """Return the step of time that stands at each place once each sequence is turned round."""
    step = along(torch.arange(x.shape[time_axis]), time_axis, x.dim())
    length = along(lengths.to(torch.int64).clamp(max=x.shape[time_axis]), batch_axis, x.dim())
    return torch.where(step < length, length - 1 - step, step).expand(x.shape)


@op("Unique", since=11)
def unique(
    x: Tensor,
    *,
    axis: int | None = None,
    sorted: int = 1,
) -> tuple[Tensor | Counted, ...]:
    rows = x.reshape(-1, 1) if axis is None else x.movedim(axis_of(axis, x.dim()), 0)
    keys = ordered(rows.reshape(rows.shape[0], prod(rows.shape[1:])))
    if keys.shape[1] > _MOST_COLUMNS:
        raise Refused(f"compares slices of {keys.shape[1]} elements; expected at most {_MOST_COLUMNS}")
    values, first, inverse, sizes, count = unique_rows(rows, keys, in_order=bool(sorted))
    place = 0 if axis is None else axis_of(axis, x.dim())
    shaped = values.reshape(-1) if axis is None else values.movedim(0, place)
    filled = (shaped, place), (first, 0), (sizes, 0)
    y, indices, counts = (_filled(value, each, count) for value, each in filled)
    return y, indices, inverse, counts


def _filled(values: Tensor, axis: int, count: Tensor) -> Tensor | Counted:
    """Return what is filled of the values, if that is known at import."""
    if isinstance(count, FakeTensor):
        return Counted(values, {axis: count})
    return values.narrow(axis, 0, int(count)).contiguous()
