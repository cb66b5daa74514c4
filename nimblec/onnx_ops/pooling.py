"""Pooling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nimblec.onnx_ops.axes import repeated, sizes_of
from nimblec.onnx_ops.convolution import pad_spatial, padding_of
from nimblec.onnx_ops.table import Ints, Node, Refused, op

aten = torch.ops.aten


class Window:
    """The windows of a pooling: kernel, strides, dilations and the padding of each spatial axis.

    ``overhang`` is what the last window of each axis reaches beyond the padded input, which
    ``ceil_mode`` allows.
    """

    def __init__(
        self,
        x: Tensor,
        kernel_shape: Ints,
        strides: Ints | None,
        dilations: Ints | None,
        pads: Ints | None,
        auto_pad: str,
        ceil_mode: int,
    ) -> None:
        self.rank = x.dim() - 2
        if not 1 <= self.rank <= 3:
            raise Refused(f"input has {x.dim()} dimensions; expected 3 to 5")
        self.lengths = tuple(x.shape[2:])
        self.kernel = repeated(kernel_shape, self.rank, 1, "kernel_shape")
        self.strides = repeated(strides, self.rank, 1, "strides")
        self.dilations = repeated(dilations, self.rank, 1, "dilations")
        if min((*self.kernel, *self.strides, *self.dilations)) < 1:
            raise Refused("kernel_shape, strides and dilations must be positive")
        self.before, self.after = padding_of(
            auto_pad, pads, self.lengths, self.kernel, self.strides, self.dilations
        )
        if min((*self.before, *self.after)) < 0:
            raise Refused(f"attribute 'pads' is {pads}; expected no negative value")
        self.overhang = tuple(self._overhang(i) if ceil_mode else 0 for i in range(self.rank))

    def _overhang(self, i: int) -> int:
        extent = (self.kernel[i] - 1) * self.dilations[i] + 1
        padded = self.lengths[i] + self.before[i] + self.after[i]
        count = -(-(padded - extent) // self.strides[i]) + 1
        if (count - 1) * self.strides[i] >= self.lengths[i] + self.before[i]:
            count -= 1
        return max(0, (count - 1) * self.strides[i] + extent - padded)

    @property
    def ends(self) -> Ints:
        """Padding after each axis, with the overhang."""
        return tuple(a + o for a, o in zip(self.after, self.overhang, strict=True))

    @property
    def symmetric(self) -> bool:
        """Whether torch's own padding will do: equal on both sides, at most half a kernel."""
        half = all(2 * p <= k for p, k in zip(self.before, self.kernel, strict=True))
        return half and self.before == self.after and not any(self.overhang)


def _max_pool(x: Tensor, window: Window, padding: Sequence[int], *, indices: bool) -> tuple[Tensor, Tensor | None]:
    arguments = (list(window.kernel), list(window.strides), list(padding), list(window.dilations))
    if window.rank == 1:
        x = x.unsqueeze(-2)
        arguments = ([1, *arguments[0]], [1, *arguments[1]], [0, *arguments[2]], [1, *arguments[3]])
    pool = aten.max_pool3d_with_indices if window.rank == 3 else aten.max_pool2d_with_indices
    y, where = pool(x, *arguments)
    if window.rank == 1:
        y, where = y.squeeze(-2), where.squeeze(-2)
    return y, where if indices else None


@op("MaxPool")
def max_pool(
    x: Tensor,
    *,
    node: Node,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    kernel_shape: Ints,
    pads: Ints | None = None,
    storage_order: int = 0,
    strides: Ints | None = None,
) -> tuple[Tensor, Tensor | None]:
    window = Window(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return _pooled(x, window, node, storage_order)


def _pooled(x: Tensor, window: Window, node: Node, storage_order: int) -> tuple[Tensor, Tensor | None]:
    if x.dtype in (torch.int8, torch.uint8):
        y, where = _pooled(x.to(torch.float32), window, node, storage_order)
        return y.to(x.dtype), where
    wanted = node.wants(1)
    if window.symmetric:
        y, where = _max_pool(x, window, window.before, indices=wanted)
        lengths, before = window.lengths, (0,) * window.rank
    else:
        padded = pad_spatial(x, window.before, window.ends, float("-inf"))
        y, where = _max_pool(padded, window, (0,) * window.rank, indices=wanted)
        lengths, before = tuple(padded.shape[2:]), window.before
    if where is not None:
        where = _positions(where, x, lengths, before, storage_order)
    return y, where


def _positions(where: Tensor, x: Tensor, lengths: Ints, before: Ints, storage_order: int) -> Tensor:
    """Turn positions in a padded plane into positions in the whole of ``x`` flattened."""
    coordinates: list[Tensor] = []
    for length, start in zip(reversed(lengths), reversed(before), strict=True):
        coordinates.insert(0, where % length - start)
        where = where // length
    order = range(len(lengths)) if storage_order == 0 else reversed(range(len(lengths)))
    flat = torch.zeros((), dtype=torch.int64)
    for axis in order:
        flat = flat * x.shape[2 + axis] + coordinates[axis]
    planes = torch.arange(x.shape[0] * x.shape[1]).reshape([x.shape[0], x.shape[1], *[1] * len(lengths)])
    return planes * torch.Size(x.shape[2:]).numel() + flat


def _sum_windows(x: Tensor, window: Window) -> Tensor:
    """Sum each window of ``x``, padded with zeros by a convolution with ones."""
    rank = window.rank
    flat = x.reshape([x.shape[0] * x.shape[1], 1, *x.shape[2:]])
    flat = pad_spatial(flat, window.before, window.ends)
    ones = torch.ones([1, 1, *window.kernel], dtype=x.dtype)
    y = aten.convolution(flat, ones, None, window.strides, [0] * rank, window.dilations, False, [0] * rank, 1)
    return y.reshape([*x.shape[:2], *y.shape[2:]])


def _average_pool(x: Tensor, window: Window, count_include_pad: int) -> Tensor:
    plain = all(d == 1 for d in window.dilations)
    if window.symmetric and plain:
        pool = aten.avg_pool3d if window.rank == 3 else aten.avg_pool2d
        arguments = (list(window.kernel), list(window.strides), list(window.before))
        if window.rank == 1:
            arguments = ([1, *arguments[0]], [1, *arguments[1]], [0, *arguments[2]])
            return pool(x.unsqueeze(-2), *arguments, False, bool(count_include_pad)).squeeze(-2)
        return pool(x, *arguments, False, bool(count_include_pad))
    return _sum_windows(x, window) / _window_sizes(window, count_include_pad).to(x.dtype)


def _window_sizes(window: Window, count_include_pad: int) -> Tensor:
    """Count the elements that each window averages: inside the input, or inside its padding too."""
    inside = torch.ones([1, 1, *window.lengths])
    inside = pad_spatial(inside, window.before, window.after, float(count_include_pad))
    inside = pad_spatial(inside, [0] * window.rank, window.overhang)
    ones = torch.ones([1, 1, *window.kernel])
    zeros = [0] * window.rank
    return aten.convolution(inside, ones, None, window.strides, zeros, window.dilations, False, zeros, 1)


@op("AveragePool")
def average_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints | None = None,
    kernel_shape: Ints,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    window = Window(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return _average_pool(x, window, count_include_pad)


@op("LpPool", since=2)
def lp_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    kernel_shape: Ints,
    p: int = 2,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    window = Window(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return _sum_windows(torch.abs(x) ** p, window) ** (1 / p)


def _spatial(x: Tensor) -> list[int]:
    if x.dim() < 3:
        raise Refused(f"input has {x.dim()} dimensions; expected 3 or more")
    return list(range(2, x.dim()))


@op("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    return torch.mean(x, _spatial(x), keepdim=True)


@op("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    return torch.amax(x, _spatial(x), keepdim=True)


@op("GlobalLpPool", since=2)
def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    return torch.sum(torch.abs(x) ** p, _spatial(x), keepdim=True) ** (1 / p)


@op("MaxUnpool", since=9)
def max_unpool(
    x: Tensor,
    i: Tensor,
    output_shape: Ints | None = None,
    *,
    kernel_shape: Ints,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    rank = x.dim() - 2
    strides = repeated(strides, rank, 1, "strides")
    both = repeated(pads, 2 * rank, 0, "pads")
    inferred = [
        (length - 1) * s + k - p - q
        for length, s, k, p, q in zip(x.shape[2:], strides, kernel_shape, both, both[rank:], strict=False)
    ]
    shape = sizes_of((*x.shape[:2], *inferred))
    if output_shape not in (None, shape):
        # ONNX's backend case counts the indices in `shape`, its text and ONNX Runtime in `output_shape`.
        raise Refused(f"input 2 'output_shape' is {output_shape}; expected {shape}, in which the indices count")
    flat = torch.zeros(torch.Size(shape).numel(), dtype=x.dtype)
    return torch.scatter(flat, 0, i.to(torch.int64).reshape(-1), x.reshape(-1)).reshape(shape)
