"""Pooling, resizing and padding in training, in terms of ATen operators that exporters know.

Means over windows, interpolation and padding by values within are linear and work along one axis after the other:
along each, they and their gradients are products with a matrix, which is what the operator makes of the identity.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

aten = torch.ops.aten

_Along: TypeAlias = Callable[[Tensor], Tensor]
"""An operator along the last axis but one of images, which leaves the last one as it is."""

_WIDTH = 2
"""Of images that an operator is tried on; of one pixel, the CPU resizes smoothly by other weights (torch 2.13)."""


def adaptive_mean_backward(axes: int, grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the adaptive mean over windows of the last ``axes``."""
    return _back(grad, x.shape[-axes:], [partial(_adaptive_mean, size=size) for size in grad.shape[-axes:]])


def _adaptive_mean(images: Tensor, size: int) -> Tensor:
    found: Tensor = aten.adaptive_avg_pool2d(images, (size, _WIDTH))
    return found


def mean_backward(
    axes: int,
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Return the gradient of a mean over windows of the last ``axes``."""
    kernel, pads = (list(s) * axes if len(s) == 1 else list(s) for s in (kernel_size, padding))
    steps = (list(stride) * axes)[:axes] or kernel

    def along(images: Tensor, k: int, step: int, pad: int) -> Tensor:
        divisor = None if divisor_override is None else 1
        found: Tensor = aten.avg_pool2d(images, (k, 1), (step, 1), (pad, 0), ceil_mode, count_include_pad, divisor)
        return found

    windows = zip(kernel, steps, pads, strict=True)
    found = _back(grad, x.shape[-axes:], [partial(along, k=k, step=step, pad=pad) for k, step, pad in windows])
    return found if divisor_override is None else found / divisor_override


def resize_backward(
    forward: Any, axes: int, grad: Tensor, output_size: Sequence[int], input_size: Sequence[int], *settings: Any
) -> Tensor:
    """Return the gradient of resizing the last ``axes``; ``forward`` does so with two, and is alike along both.

    ``settings`` are whether corners are aligned, for some ways of resizing, and a scale for each axis, by default None.
    """
    given = [setting for setting in settings if isinstance(setting, bool)]
    scales = [*settings[len(given) :], *[None] * axes][:axes]

    def along(images: Tensor, size: int, scale: float | None) -> Tensor:
        found: Tensor = forward(images, (size, _WIDTH), *given, scale, None)
        return found

    sizes = zip(output_size, scales, strict=True)
    return _back(grad, input_size[-axes:], [partial(along, size=size, scale=scale) for size, scale in sizes])


def nearest(axes: int, x: Tensor, output_size: Sequence[int], *scales: float | None) -> Tensor:
    """Resize the last ``axes`` to the nearest element, as "nearest-exact" has it."""
    for axis, size, scale in zip(range(-axes, 0), output_size, [*scales, *[None] * axes], strict=False):
        with _real_tensors():
            numbers = torch.arange(x.shape[axis], dtype=torch.float64)[None, None, :, None].repeat(1, 1, 1, _WIDTH)
            places = aten._upsample_nearest_exact2d(numbers, (size, _WIDTH), scale, None)[0, 0, :, 0].long()
        x = x.index_select(axis, places)
    return x


def padding_backward(pad: Callable[..., Tensor], axes: int, grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Return the gradient of padding the last ``axes`` as ``pad`` does two; ``padding`` begins with the last."""

    def along(images: Tensor, before: int, after: int) -> Tensor:
        return pad(images, (0, 0, before, after))

    ends = reversed(list(zip(padding[::2], padding[1::2], strict=True)))
    return _back(grad, x.shape[-axes:], [partial(along, before=before, after=after) for before, after in ends])


def _back(grad: Tensor, sizes: Sequence[int], operators: Sequence[_Along]) -> Tensor:
    """Return the gradient back through linear operators along the last axes, whose ``sizes`` before them are given."""
    for axis, size, along in zip(range(-len(sizes), 0), sizes, operators, strict=True):
        grad = _product(grad, axis, _transposed(along, size, grad))
    return grad


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Compute numbers while a step is traced, which become constants of the graph."""
    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        yield


def _transposed(along: _Along, size: int, like: Tensor) -> Tensor:
    """Return the matrix of an operator along an axis, transposed: (size after it, size before it)."""
    with _real_tensors():
        made = along(torch.eye(size)[None, ..., None].repeat(1, 1, 1, _WIDTH))
        return made[0, ..., 0].T.contiguous().to(like.dtype)


def _product(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Return an axis times a matrix: a repetition or a sum of neighbours where it is no more than that."""
    with _real_tensors():
        before, after = matrix.shape
        few = min(before, after)
        times, rest = divmod(max(before, after), few)
        factor = float(matrix[0, 0])
        is_plain = not rest and torch.equal(
            matrix, factor * torch.eye(few, dtype=matrix.dtype).repeat_interleave(times, int(after > before))
        )
    if not is_plain:
        return (x.movedim(axis, -1) @ matrix).movedim(-1, axis)
    if after > before:
        repeated = [-1] * (x.dim() + 1)
        repeated[axis] = times
        x = x.unflatten(axis, (few, 1)).expand(repeated).flatten(axis - 1, axis)
    elif before > after:
        x = x.unflatten(axis, (few, times)).sum(axis)
    return x if factor == 1 else x * factor


def maximum_backward(axes: int, grad: Tensor, x: Tensor, *window_and_indices: Any) -> Tensor:
    """Return the gradient of a maximum over windows: what each window gives goes to the element that it took."""
    outer = x.shape[:-axes]
    flat = grad.new_zeros((*outer, prod(x.shape[-axes:])))
    places, values = (t.reshape(*outer, prod(t.shape[-axes:])) for t in (window_and_indices[-1], grad))
    return flat.scatter_add(-1, places, values).reshape(x.shape)


RESAMPLING: dict[Any, Callable[..., Any]] = {
    aten._adaptive_avg_pool2d_backward.default: partial(adaptive_mean_backward, 2),
    aten._adaptive_avg_pool3d_backward.default: partial(adaptive_mean_backward, 3),
    aten.avg_pool2d_backward.default: partial(mean_backward, 2),
    aten.avg_pool3d_backward.default: partial(mean_backward, 3),
    aten.adaptive_max_pool2d_backward.default: partial(maximum_backward, 2),
    aten.adaptive_max_pool3d_backward.default: partial(maximum_backward, 3),
    aten.max_pool2d_with_indices_backward.default: partial(maximum_backward, 2),
    aten.max_pool3d_with_indices_backward.default: partial(maximum_backward, 3),
    aten.replication_pad1d_backward.default: partial(padding_backward, aten.replication_pad2d, 1),
    aten.replication_pad2d_backward.default: partial(padding_backward, aten.replication_pad2d, 2),
    aten.replication_pad3d_backward.default: partial(padding_backward, aten.replication_pad2d, 3),
    aten.reflection_pad1d_backward.default: partial(padding_backward, aten.reflection_pad2d, 1),
    aten.reflection_pad2d_backward.default: partial(padding_backward, aten.reflection_pad2d, 2),
    aten.reflection_pad3d_backward.default: partial(padding_backward, aten.reflection_pad2d, 3),
    aten.upsample_nearest1d_backward.default: partial(resize_backward, aten.upsample_nearest2d, 1),
    aten.upsample_nearest2d_backward.default: partial(resize_backward, aten.upsample_nearest2d, 2),
    aten.upsample_nearest3d_backward.default: partial(resize_backward, aten.upsample_nearest2d, 3),
    aten._upsample_nearest_exact1d_backward.default: partial(resize_backward, aten._upsample_nearest_exact2d, 1),
    aten._upsample_nearest_exact2d_backward.default: partial(resize_backward, aten._upsample_nearest_exact2d, 2),
    aten._upsample_nearest_exact3d_backward.default: partial(resize_backward, aten._upsample_nearest_exact2d, 3),
    aten._upsample_nearest_exact1d.default: partial(nearest, 1),
    aten._upsample_nearest_exact2d.default: partial(nearest, 2),
    aten._upsample_nearest_exact3d.default: partial(nearest, 3),
    aten.upsample_linear1d_backward.default: partial(resize_backward, aten.upsample_bilinear2d, 1),
    aten.upsample_bilinear2d_backward.default: partial(resize_backward, aten.upsample_bilinear2d, 2),
    aten.upsample_trilinear3d_backward.default: partial(resize_backward, aten.upsample_bilinear2d, 3),
    aten.upsample_bicubic2d_backward.default: partial(resize_backward, aten.upsample_bicubic2d, 2),
    aten._upsample_bilinear2d_aa_backward.default: partial(resize_backward, aten._upsample_bilinear2d_aa, 2),
    aten._upsample_bicubic2d_aa_backward.default: partial(resize_backward, aten._upsample_bicubic2d_aa, 2),
}
"""Decompositions for a graph that is exported."""
