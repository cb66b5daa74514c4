"""Backward operators of ATen in terms of forward ones, which exporters and kernels know."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions

from nimblec.training.gradients import GRADIENTS
from nimblec.training.resampling import RESAMPLING

aten = torch.ops.aten


def decompositions(*, exported: bool) -> dict[Any, Callable[..., Any]]:
    """Return decompositions of training's operators: core ATen's and, for a graph to be ``exported``, our own.

    For the latter operators the framework has kernels, which a plan for a GPU can hold.
    """
    found = dict(_core())
    if exported:
        found |= {
            aten.convolution_backward.default: convolution_backward,
            aten.addcdiv_.default: add_quotient,
            aten.addcmul_.default: add_product,
            **GRADIENTS,
            **RESAMPLING,
        }
    return found


@cache
def _core() -> dict[Any, Callable[..., Any]]:
    """Return core ATen's decompositions of training's operators; cached, as torch would search all operators."""
    return {op: made for op, made in core_aten_decompositions().items() if _is_of_training(op)}


def add_quotient(into: Tensor, dividend: Tensor, divisor: Tensor, *, value: Any = 1) -> Any:
    """Decompose `addcdiv_` with a factor that torch.onnx does not accept: a learning rate that is a tensor."""
    return NotImplemented if isinstance(value, int | float) else into.add_(dividend * value / divisor)


def add_product(into: Tensor, left: Tensor, right: Tensor, *, value: Any = 1) -> Any:
    """Decompose `addcmul_` as `add_quotient` does `addcdiv_`."""
    return NotImplemented if isinstance(value, int | float) else into.add_(left * value * right)


def _is_of_training(op: Any) -> bool:
    """Return whether it is a gradient, or an operator of which only gradients need all outputs.

    Batch norm writes its statistics unseen; of nll_loss torch.onnx (2.13) exports a wrong second output, the sum of
    the weights. The gradient of reflection stays one call, which core ATen's makes a hundred.
    """
    name = op.name()
    return any(part in name for part in ("backward", "batch_norm", "nll_loss")) and "reflection_pad" not in name


class _Window(NamedTuple):
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Decompose the gradients of a convolution: each is a convolution of the other two tensors.

    The gradient of the weight of a convolution is one over the batch, with stride and dilation exchanged; with
    groups, each channel of each image is a group of its own, and images are summed.
    """
    del bias_sizes, output_padding  # no gradient flows back from output padding
    sizes = tuple(weight.shape[2:])
    window = _Window(stride, padding, dilation, groups)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0] and transposed:
        grad_x = _narrowed(_convolution(grad, weight, window), x.shape[2:])
    elif output_mask[0]:
        grad_x = _spread(grad, weight, window, x.shape[2:])
    if output_mask[1]:
        # In a transposed convolution, the gradient and the input change places.
        near, far = (grad, x) if transposed else (x, grad)
        grad_weight = _weight_gradient(near, far, sizes, window)
    if output_mask[2]:
        grad_bias = grad.sum((0, *range(2, grad.dim())))
    return grad_x, grad_weight, grad_bias


def _spread(grad: Tensor, weight: Tensor, window: _Window, image: Sequence[int]) -> Tensor:
    """Return a gradient back through the windows of a convolution, to an image of these sizes."""
    reached = [
        (n - 1) * s - 2 * p + d * (k - 1) + 1
        for n, s, p, d, k in zip(
            grad.shape[2:], window.stride, window.padding, window.dilation, weight.shape[2:], strict=True
        )
    ]
    rest = [n - r for n, r in zip(image, reached, strict=True)]
    return _convolution(grad, weight, window, transposed=True, output_padding=rest)


def _weight_gradient(x: Tensor, grad: Tensor, sizes: Sequence[int], window: _Window) -> Tensor:
    """Return the weights' gradient (channels of ``grad``, channels of ``x`` / groups, *sizes)."""
    exchanged = window._replace(stride=window.dilation, dilation=window.stride, groups=1)
    if window.groups == 1:
        found = _convolution(x.transpose(0, 1), grad.transpose(0, 1), exchanged).transpose(0, 1)
    else:
        batch, channels, *image = x.shape
        groups, outs = window.groups, grad.shape[1] // window.groups
        flat = x.reshape(1, batch * channels, *image)
        # In each image and group, each channel of ``grad`` is paired with each channel of ``x``.
        shape = (batch, groups, channels // groups, outs, *grad.shape[2:])
        kernels = grad.reshape(batch, groups, 1, outs, *grad.shape[2:]).expand(shape).reshape(-1, 1, *grad.shape[2:])
        found = _convolution(flat, kernels, exchanged._replace(groups=batch * channels))
        found = found.reshape(*shape[:4], *found.shape[2:]).sum(0)
        found = found.transpose(1, 2).reshape(groups * outs, channels // groups, *found.shape[3:])
    # The convolution is larger if the stride leaves pixels over.
    return _narrowed(found, sizes)


def _narrowed(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    for axis, size in enumerate(sizes, start=2):
        if tensor.shape[axis] != size:
            tensor = tensor.narrow(axis, 0, size)
    return tensor


def _convolution(
    x: Tensor,
    weight: Tensor,
    window: _Window,
    *,
    transposed: bool = False,
    output_padding: Sequence[int] | None = None,
) -> Tensor:
    added = list(output_padding or [0] * len(window.stride))
    lists = [list(window.stride), list(window.padding), list(window.dilation)]
    found: Tensor = aten.convolution.default(x, weight, None, *lists, transposed, added, window.groups)
    return found
