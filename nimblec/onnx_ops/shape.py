"""Operators that move elements and leave their values alone."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from nimblec.onnx_ops.axes import along, axes_of, axis_of, sizes_of
from nimblec.onnx_ops.counted import Counted, counted
from nimblec.onnx_ops.table import Description, Ints, Known, Node, Refused, op
from nimblec.onnx_ops.unsigned import bitwise, index_select


@op("Shape")
def shape(data: Description, *, end: int | None = None, start: int = 0) -> Tensor:
    return torch.tensor(data.shape[start:end], dtype=torch.int64)


@op("Size")
def size(data: Description) -> Tensor:
    return torch.tensor(prod(data.shape), dtype=torch.int64)


@op("Reshape", since=5)
def reshape(data: Tensor, shape: Tensor, *, node: Node, allowzero: int = 0) -> Tensor | Counted:
    if shape.dtype != torch.int64:
        raise Refused(f"input 1 'shape' is {shape.dtype}; expected an integer")
    if isinstance(shape, FakeTensor):
        return _reshape_within(data, shape, node, keeps_zeros=bool(allowzero))
    sizes = shape.tolist()
    if not allowzero:
        for i, length in enumerate(sizes):
            if length == 0:
                sizes[i] = data.shape[axis_of(i, data.dim())]
    if -1 in sizes and prod(sizes) == 0:
        raise Refused(f"shape {tuple(sizes)} has both 0 and -1")
    return torch.reshape(data, sizes)


def _reshape_within(data: Tensor, shape: Tensor, node: Node, *, keeps_zeros: bool) -> Tensor | Counted:
    """Reshape to a shape that is computed while the model runs, in memory of its bound."""
    bound, (length, count) = node.bound(0), (data.numel(), shape.numel())
    if len(bound) != count or not length:
        raise Refused(f"makes {count} dimensions of {length} elements; its bound is {bound}")
    sizes = shape.to(torch.int64)
    if not keeps_zeros:
        same = torch.tensor([*data.shape, *[0] * count][:count])
        sizes = torch.where(sizes == 0, same, sizes)
    known = torch.where(sizes == -1, torch.tensor(1), sizes).prod()
    sizes = torch.where(sizes == -1, torch.div(torch.tensor(length), known.clamp(min=1), rounding_mode="floor"), sizes)
    # A shape of other numbers of elements ends the run, like sizes beyond the bound.
    sizes = torch.where(sizes.prod() == length, sizes, torch.tensor(bound) + 1)
    place = torch.tensor(0)
    for axis, most in enumerate(bound):
        place = place * sizes.select(0, axis) + along(torch.arange(most), axis, count)
    values = index_select(data.reshape(-1), 0, place.reshape(-1).clamp(max=length - 1)).reshape(bound)
    return counted(values, {axis: sizes.select(0, axis) for axis in range(count)})


@op("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis if axis == x.dim() else axis_of(axis, x.dim())
    return torch.reshape(x, (prod(x.shape[:axis]), prod(x.shape[axis:])))


@op("Squeeze")
def squeeze_attribute(data: Tensor, *, axes: Ints | None = None) -> Tensor:
    return squeeze(data, axes)


@op("Squeeze", since=13)
def squeeze(data: Tensor, axes: Ints | None = None) -> Tensor:
    if axes is None:
        axes = tuple(i for i, length in enumerate(data.shape) if length == 1)
    axes = axes_of(axes, data.dim())
    if any(data.shape[axis] != 1 for axis in axes):
        raise Refused(f"shape {tuple(data.shape)} is not 1 along axes {axes}")
    return torch.reshape(data, [length for i, length in enumerate(data.shape) if i not in axes])


@op("Unsqueeze")
def unsqueeze_attribute(data: Tensor, *, axes: Ints) -> Tensor:
    return unsqueeze(data, axes)


@op("Unsqueeze", since=13)
def unsqueeze(data: Tensor, axes: Ints) -> Tensor:
    rank = data.dim() + len(axes)
    new = axes_of(axes, rank)
    old = iter(data.shape)
    return torch.reshape(data, [1 if i in new else next(old) for i in range(rank)])


@op("Transpose")
def transpose(data: Tensor, *, perm: Ints | None = None) -> Tensor:
    return torch.permute(data, perm if perm is not None else tuple(reversed(range(data.dim()))))


@op("Expand", since=8)
def expand(x: Tensor, shape: Ints) -> Tensor:
    return x.expand(sizes_of(torch.broadcast_shapes(x.shape, shape)))


@op("Tile", since=6)
@bitwise
def tile(x: Tensor, repeats: Ints) -> Tensor:
    if len(repeats) != x.dim():
        raise Refused(f"repeats {repeats} do not fit {x.dim()} dimensions")
    sizes_of(length * count for length, count in zip(x.shape, repeats, strict=True))
    return x.repeat(repeats)


@op("Concat", since=4)
def concatenate(*inputs: Tensor, axis: int) -> Tensor:
    return torch.cat(inputs, axis_of(axis, inputs[0].dim()))


@op("Split", since=2)
def split_attribute(x: Tensor, *, node: Node, axis: int = 0, split: Ints | None = None) -> tuple[Tensor, ...]:
    return _split(x, node, axis, split)


@op("Split", since=13)
def split(
    x: Tensor, split: Ints | None = None, *, node: Node, axis: int = 0, num_outputs: int | None = None
) -> tuple[Tensor, ...]:
    if split is None and num_outputs not in (None, len(node.outputs)):
        raise Refused(f"attribute 'num_outputs' is {num_outputs}; the node has {len(node.outputs)} outputs")
    return _split(x, node, axis, split)


def _split(x: Tensor, node: Node, axis: int, sizes: Ints | None) -> tuple[Tensor, ...]:
    axis = axis_of(axis, x.dim())
    length, count = x.shape[axis], len(node.outputs)
    if sizes is None:
        chunk = -(-length // count)
        sizes = tuple(min(chunk, max(0, length - i * chunk)) for i in range(count))
        if node.opset < 18 and length % count:
            raise Refused(f"axis {axis} of length {length} does not split evenly into {count}")
    if sum(sizes) != length or len(sizes) != count or min(sizes) < 0:
        raise Refused(f"split {sizes} does not make {count} parts of axis {axis} of length {length}")
    return tuple(torch.split_with_sizes(x, sizes, axis))


@op("Slice")
def slice_attributes(data: Tensor, *, axes: Ints | None = None, ends: Ints, starts: Ints) -> Tensor:
    return slice_of(data, starts, ends, axes)


@op("Slice", since=10)
@bitwise
def slice_of(
    data: Tensor, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None
) -> Tensor:
    axes = axes_of(range(len(starts)) if axes is None else axes, data.dim())
    steps = (1,) * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise Refused(f"starts {starts}, ends {ends}, axes {axes} and steps {steps} do not fit together")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        data = _slice_axis(data, axis, range(*slice(start, end, step).indices(data.shape[axis])))
    return data


def _slice_axis(data: Tensor, axis: int, chosen: range) -> Tensor:
    if len(chosen) == data.shape[axis] and chosen.step == 1:
        return data
    if not chosen:
        return data.narrow(axis, 0, 0)
    if chosen.step > 0:
        return torch.ops.aten.slice(data, axis, chosen[0], chosen[-1] + 1, chosen.step)
    return torch.flip(torch.ops.aten.slice(data, axis, chosen[-1], chosen[0] + 1, -chosen.step), [axis])


PAD_MODES = {"constant", "reflect", "edge", "wrap"}


@op("Pad", since=2)
def pad_attributes(data: Tensor, *, mode: str = "constant", pads: Ints, value: float = 0.0) -> Tensor:
    return pad_all(data, pads, value, mode)


@op("Pad", since=11, inputs=3)
@op("Pad", since=18)
@bitwise
def pad(
    data: Tensor,
    pads: Ints,
    constant_value: Known | None = None,
    axes: Ints | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    axes = axes_of(range(data.dim()) if axes is None else axes, data.dim())
    if len(pads) != 2 * len(axes):
        raise Refused(f"pads {pads} do not fit {len(axes)} axes")
    every = [0] * (2 * data.dim())
    for i, axis in enumerate(axes):
        every[axis], every[data.dim() + axis] = pads[i], pads[len(axes) + i]
    return pad_all(data, every, 0 if constant_value is None else constant_value.item(), mode)


def pad_all(data: Tensor, pads: Sequence[int], value: float, mode: str) -> Tensor:
    """Pad ``data`` by ``pads``: first what goes before each axis, then what goes after each."""
    rank = data.dim()
    if mode not in PAD_MODES or len(pads) != 2 * rank:
        raise Refused(f"mode {mode!r} with pads {tuple(pads)} does not fit {rank} dimensions")
    sizes_of(length + pads[i] + pads[rank + i] for i, length in enumerate(data.shape))
    if not any(pads):
        return data
    if mode == "constant":
        sides = [pads[side * rank + axis] for axis in reversed(range(rank)) for side in (0, 1)]
        fits = data.dtype.is_floating_point or isinstance(value, (bool, int))
        return torch.ops.aten.constant_pad_nd(data, sides, value if fits else int(value))
    for axis in range(rank):
        data = _pad_axis(data, axis, pads[axis], pads[rank + axis], mode)
    return data


def _pad_axis(data: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """Pad one axis by picking elements: each position of the result has a source known now."""
    length = data.shape[axis]
    if before == after == 0:
        return data
    if length == 0:
        raise Refused(f"axis {axis} is empty and cannot be padded in mode {mode!r}")
    position = torch.arange(-before, length + after)
    if mode == "edge":
        source = position.clamp(0, length - 1)
    elif mode == "wrap":
        source = position.remainder(length)
    else:
        period = max(1, 2 * (length - 1))
        folded = position.remainder(period)
        source = torch.where(folded < length, folded, period - folded)
    return torch.index_select(data, axis, source)


@op("DepthToSpace")
@bitwise
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    b = blocksize
    if mode not in ("DCR", "CRD") or b < 1 or c % (b * b):
        raise Refused(f"mode {mode!r} with blocksize {b} does not fit {c} channels")
    if mode == "CRD":
        return functional.pixel_shuffle(x, b)
    parts = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // (b * b), h * b, w * b)


@op("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    b = blocksize
    if mode not in ("DCR", "CRD") or b < 1 or h % b or w % b:
        raise Refused(f"mode {mode!r} with blocksize {b} does not fit {h} x {w} pixels")
    parts = x.reshape(n, c, h // b, b, w // b, b)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return parts.permute(order).reshape(n, c * b * b, h // b, w // b)


@op("CenterCropPad", since=18)
@bitwise
def center_crop_pad(x: Tensor, shape: Ints, *, axes: Ints | None = None) -> Tensor:
    axes = axes_of(range(x.dim()) if axes is None else axes, x.dim())
    if len(shape) != len(axes):
        raise Refused(f"shape {shape} does not fit axes {axes}")
    pads = [0] * (2 * x.dim())
    for axis, wanted in zip(axes, sizes_of(shape), strict=True):
        length = x.shape[axis]
        if wanted < length:
            x = x.narrow(axis, (length - wanted) // 2, wanted)
        else:
            pads[axis] = (wanted - length) // 2
            pads[x.dim() + axis] = wanted - length - pads[axis]
    return pad_all(x, pads, 0, "constant")
