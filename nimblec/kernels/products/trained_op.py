"""Convolutions of trained weights and their gradients as torch ops: `nimblec.kernels.launch` says what an op is.

Images, weights (out channels, channels, height, width) and results lie channels last. ``counters``,
``trigger`` and ``arithmetic`` are as in `gemm_op`; ``window`` is a stride, a padding and a dilation,
each a pair, as ``aten.convolution`` takes them.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from nimblec.kernels.images import channels_last, convolution_shape, new_images, pixel_stride
from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling
from nimblec.kernels.products.gemm_reference import as_multiplied
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.trained_launches import (
    TEMPLATES,
    Cut,
    depthwise_images_launch,
    images_launch,
    scale,
    shared_sums,
)
from nimblec.kernels.products.trained_tilings import DepthwiseSum, weight_product

aten = torch.ops.aten


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor | None,
    window: Sequence[int],
    tiling: Sequence[int],
    trigger: str,
    *,
    arithmetic: str = "tf32",
) -> Prepared[Tensor]:
    x, weight = channels_last(x), _dense(weight)
    shape = convolution_shape(x, weight.shape[0], weight.shape[2:], *_pairs(window))
    out, cut = new_images(x, shape), _cut(counters, tiling, trigger, arithmetic)
    return Prepared(out, images_launch(shape, cut, source=x, weight=weight, bias=bias, out=out, is_gradient=False))


def _image_gradient(
    grad: Tensor,
    weight: Tensor,
    counters: Tensor | None,
    size: Sequence[int],
    window: Sequence[int],
    tiling: Sequence[int],
    trigger: str,
    *,
    arithmetic: str = "tf32",
) -> Prepared[Tensor]:
    grad, weight = channels_last(grad), _dense(weight)
    out = _new(grad, grad.shape[0], weight.shape[1], *size)
    shape = convolution_shape(out, weight.shape[0], weight.shape[2:], *_pairs(window))
    cut = _cut(counters, tiling, trigger, arithmetic)
    launch = images_launch(shape, cut, source=grad, weight=weight, bias=None, out=out, is_gradient=True)
    return Prepared(out, launch)


def _weight_gradient(
    grad: Tensor,
    x: Tensor,
    counters: Tensor | None,
    kernel: Sequence[int],
    window: Sequence[int],
    tiling: Sequence[int],
    trigger: str,
    *,
    arithmetic: str = "tf32",
) -> Prepared[Tensor]:
    grad, x = channels_last(grad), channels_last(x)
    shape = convolution_shape(x, grad.shape[1], kernel, *_pairs(window))
    out, cut = _new(x, shape.out_channels, shape.channels, *kernel), _cut(counters, tiling, trigger, arithmetic)
    tiles = prod(cut.tiling.tiles(weight_product(shape)))
    launch = Launch(
        template=f"{TEMPLATES}:weights",
        blocks=tiles * cut.tiling.split_k,
        pointers={"grad_ptr": grad, "x_ptr": x, "out_ptr": out, **cut.pointers(tiles, out.device)},
        settings={**shape.settings, "OUT_STRIDE": pixel_stride(grad), **cut.settings(x.dtype)},
        trigger=trigger,
    )
    return Prepared(out, launch)


def _depthwise_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Sequence[int], tiling: Sequence[int], trigger: str
) -> Prepared[Tensor]:
    x, weight = channels_last(x), weight.contiguous()
    shape = convolution_shape(x, weight.shape[0], weight.shape[2:], *_pairs(window))
    out, cut = new_images(x, shape), DepthwiseTiling.of(tiling)
    launch = depthwise_images_launch(
        shape, cut, source=x, weight=weight, bias=bias, out=out, trigger=trigger, is_gradient=False
    )
    return Prepared(out, launch)


def _depthwise_image_gradient(
    grad: Tensor, weight: Tensor, size: Sequence[int], window: Sequence[int], tiling: Sequence[int], trigger: str
) -> Prepared[Tensor]:
    grad, weight = channels_last(grad), weight.contiguous()
    out, cut = _new(grad, *grad.shape[:2], *size), DepthwiseTiling.of(tiling)
    shape = convolution_shape(out, weight.shape[0], weight.shape[2:], *_pairs(window))
    launch = depthwise_images_launch(
        shape, cut, source=grad, weight=weight, bias=None, out=out, trigger=trigger, is_gradient=True
    )
    return Prepared(out, launch)


def _depthwise_weight_gradient(
    grad: Tensor,
    x: Tensor,
    counters: Tensor | None,
    kernel: Sequence[int],
    window: Sequence[int],
    tiling: Sequence[int],
    trigger: str,
) -> Prepared[Tensor]:
    grad, x = channels_last(grad), channels_last(x)
    shape = convolution_shape(x, grad.shape[1], kernel, *_pairs(window))
    out, cut = _new(x, shape.out_channels, 1, *kernel), DepthwiseSum.of(tiling)
    tiles, size = prod(cut.tiles(shape)), cut.places(shape) * cut.block_c
    launch = Launch(
        template=f"{TEMPLATES}:depthwise_weights",
        blocks=tiles * cut.split_k,
        pointers={
            "grad_ptr": grad,
            "x_ptr": x,
            "out_ptr": out,
            **shared_sums(cut.split_k, tiles, size, counters, out.device),
        },
        settings={
            **{name: value for name, value in shape.settings.items() if name != "CHANNELS"},
            "OUT_STRIDE": pixel_stride(grad),
            "BLOCK_M": cut.block_m,
            "BLOCK_C": cut.block_c,
            "SPLIT_K": cut.split_k,
            "num_warps": cut.num_warps,
        },
        trigger=trigger,
    )
    return Prepared(out, launch)


def _cut(counters: Tensor | None, tiling: Sequence[int], trigger: str, arithmetic: str) -> Cut:
    return Cut(tiling=Tiling.of(tiling), counters=counters, trigger=trigger, arithmetic=arithmetic)


def _pairs(window: Sequence[int]) -> list[Sequence[int]]:
    """Return stride, padding and dilation, each as a pair."""
    return [window[n : n + 2] for n in (0, 2, 4)]


def _new(like: Tensor, *size: int) -> Tensor:
    """Allocate images or weights, channels last."""
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _dense(weight: Tensor) -> Tensor:
    """Return weights channels last, as the kernels read them; copy only as `channels_last` does."""
    return weight.contiguous(memory_format=torch.channels_last)


def _convolution_on_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    _counters: Tensor | None,
    window: Sequence[int],
    *_how: Any,
    arithmetic: str = "tf32",
) -> Tensor:
    images, filters = (as_multiplied(each, x.dtype, arithmetic) for each in (x, weight))
    total = aten.convolution(images, filters, None, *_pairs(window), False, [0, 0], 1) * scale(x.dtype, arithmetic)
    total = total if bias is None else total + bias.float()[:, None, None]
    return _new(x, *total.shape).copy_(total)


def _image_gradient_on_cpu(
    grad: Tensor,
    weight: Tensor,
    _counters: Tensor | None,
    size: Sequence[int],
    window: Sequence[int],
    *_how: Any,
    arithmetic: str = "tf32",
) -> Tensor:
    factor, filters = (as_multiplied(each, grad.dtype, arithmetic) for each in (grad, weight))
    images = factor.new_empty((grad.shape[0], weight.shape[1], *size))
    total = _gradient_of_images(factor, images, filters, window)
    return _new(grad, *total.shape).copy_(total * scale(grad.dtype, arithmetic))


def _weight_gradient_on_cpu(
    grad: Tensor,
    x: Tensor,
    _counters: Tensor | None,
    kernel: Sequence[int],
    window: Sequence[int],
    *_how: Any,
    arithmetic: str = "tf32",
) -> Tensor:
    factor, images = (as_multiplied(each, grad.dtype, arithmetic) for each in (grad, x))
    total = _gradient_of_weights(factor, images, (grad.shape[1], x.shape[1], *kernel), window)
    return _new(grad, *total.shape).copy_(total * scale(grad.dtype, arithmetic))


def _depthwise_convolution_on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Sequence[int], *_how: Any
) -> Tensor:
    vector = None if bias is None else bias.float()
    total = aten.convolution(x.float(), weight.float(), vector, *_pairs(window), False, [0, 0], x.shape[1])
    return _new(x, *total.shape).copy_(total)


def _depthwise_image_gradient_on_cpu(
    grad: Tensor, weight: Tensor, size: Sequence[int], window: Sequence[int], *_how: Any
) -> Tensor:
    images = grad.new_empty((*grad.shape[:2], *size), dtype=torch.float32)
    total = _gradient_of_images(grad.float(), images, weight.float(), window)
    return _new(grad, *total.shape).copy_(total)


def _depthwise_weight_gradient_on_cpu(
    grad: Tensor, x: Tensor, _counters: Tensor | None, kernel: Sequence[int], window: Sequence[int], *_how: Any
) -> Tensor:
    total = _gradient_of_weights(grad.float(), x.float(), (grad.shape[1], 1, *kernel), window)
    return _new(grad, *total.shape).copy_(total)


def _gradient_of_images(grad: Tensor, images: Tensor, weight: Tensor, window: Sequence[int]) -> Tensor:
    groups = images.shape[1] // weight.shape[1]
    total, *_ = aten.convolution_backward(
        grad, images, weight, None, *_pairs(window), False, [0, 0], groups, [True, False, False]
    )
    return total  # type: ignore[no-any-return]


def _gradient_of_weights(grad: Tensor, x: Tensor, size: tuple[int, ...], window: Sequence[int]) -> Tensor:
    groups = x.shape[1] // size[1]
    _, total, _ = aten.convolution_backward(
        grad, x, x.new_empty(size), None, *_pairs(window), False, [0, 0], groups, [False, True, False]
    )
    return total  # type: ignore[no-any-return]


trained_convolution = define_op(
    "trained_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? counters, int[] window, int[] tiling, "
    "str trigger, *, str arithmetic='tf32') -> Tensor",
    prepare=_convolution,
    reference=_convolution_on_cpu,
)
image_gradient = define_op(
    "image_gradient(Tensor grad, Tensor weight, Tensor(a!)? counters, int[] size, int[] window, int[] tiling, "
    "str trigger, *, str arithmetic='tf32') -> Tensor",
    prepare=_image_gradient,
    reference=_image_gradient_on_cpu,
)
weight_gradient = define_op(
    "weight_gradient(Tensor grad, Tensor x, Tensor(a!)? counters, int[] kernel, int[] window, int[] tiling, "
    "str trigger, *, str arithmetic='tf32') -> Tensor",
    prepare=_weight_gradient,
    reference=_weight_gradient_on_cpu,
)
depthwise_convolution = define_op(
    "depthwise_convolution(Tensor x, Tensor weight, Tensor? bias, int[] window, int[] tiling, str trigger) -> Tensor",
    prepare=_depthwise_convolution,
    reference=_depthwise_convolution_on_cpu,
)
depthwise_image_gradient = define_op(
    "depthwise_image_gradient(Tensor grad, Tensor weight, int[] size, int[] window, int[] tiling, str trigger) -> "
    "Tensor",
    prepare=_depthwise_image_gradient,
    reference=_depthwise_image_gradient_on_cpu,
)
depthwise_weight_gradient = define_op(
    "depthwise_weight_gradient(Tensor grad, Tensor x, Tensor(a!)? counters, int[] kernel, int[] window, "
    "int[] tiling, str trigger) -> Tensor",
    prepare=_depthwise_weight_gradient,
    reference=_depthwise_weight_gradient_on_cpu,
)
