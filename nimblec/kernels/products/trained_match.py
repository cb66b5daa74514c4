"""Convolutions of trained weights, and gradients of convolutions, that one launch could compute."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.views import is_channels_last
from nimblec.graph.vocabulary import CONVOLUTION, CONVOLUTION_BACKWARD, DTYPES
from nimblec.kernels.images import convolution_shape, is_read_well, is_within_reach, pixel_stride
from nimblec.kernels.products.gemm_match import arithmetic_of
from nimblec.kernels.products.gemm_op import Arithmetic
from nimblec.kernels.shapes import Convolution

Kind = Literal["forward", "images", "weights", "depthwise", "depthwise images", "depthwise weights"]

_LONGEST_DEPTHWISE = 32
"""The most weights of a channel whose gradients a thread can sum at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedRequest:
    """A convolution, or the gradient of its ``images`` or ``weights``, of two tensors in the order its op takes.

    ``nodes`` are the framework's calls, of which the last is the result.
    """

    kind: Kind
    shape: Convolution
    first: fx.Node
    second: fx.Node
    bias: fx.Node | None
    nodes: tuple[fx.Node, ...]
    arithmetic: Arithmetic

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of everything that is read and written."""
        return fake(self.nodes[-1]).dtype

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""
        bias = "" if self.bias is None else " and bias"
        return f"{self.kind}{bias} {self.shape} of {pixel_stride(fake(self.first))} {self.dtype} {self.arithmetic}"


def requests(module: fx.GraphModule) -> Iterator[TrainedRequest]:
    """Yield all requests in a graph."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(CONVOLUTION, CONVOLUTION_BACKWARD):
        given = bound(node)
        if fake(node.all_input_nodes[0]).dtype not in DTYPES or given["transposed"] or fake(given["input"]).dim() != 4:
            continue
        request = _forward(rewriter, node, given) if is_call(node, CONVOLUTION) else _gradient(node, given)
        if request is None or not _is_laid(fake(request.nodes[-1])):
            continue
        if is_within_reach(fake(request.first), fake(request.second), fake(request.nodes[-1])):
            yield request


def _forward(rewriter: Rewriter, node: fx.Node, given: dict[str, Any]) -> TrainedRequest | None:
    """Return the request of a convolution whose weights are not constant."""
    x, weight = given["input"], given["weight"]
    if rewriter.value(weight) is not None or not is_read_well(fake(x)):
        return None
    if given["bias"] is not None and not fake(given["bias"]).is_contiguous():
        return None
    return _of_images("forward", "depthwise", given, node, x)


def _of_images(
    whole: Kind, depthwise: Kind, given: dict[str, Any], result: fx.Node, first: fx.Node
) -> TrainedRequest | None:
    """Return the request of new images, made of ``first`` and the weights; other groups are left to the library."""
    weight, channels = given["weight"], fake(given["input"]).shape[1]
    if given["groups"] == 1 and is_channels_last(fake(weight)):
        return _request(whole, given, result, first, weight)
    is_depthwise = given["groups"] == channels == fake(weight).shape[0]
    return _request(depthwise, given, result, first, weight) if is_depthwise and fake(weight).is_contiguous() else None


def _gradient(node: fx.Node, given: dict[str, Any]) -> TrainedRequest | None:
    """Return the request of a gradient of a convolution, where the call computes only this one."""
    grad, x, weight, mask = (given[name] for name in ("grad_output", "input", "weight", "output_mask"))
    result = only_user(node)
    if sum(mask) != 1 or mask[2] or result is None or result.target is not operator.getitem:
        return None
    assert mask[argument(result, 1)], f"{result.format_node()} reads a gradient that is not made"
    if not is_read_well(fake(grad)):
        return None
    if mask[0]:
        return _of_images("images", "depthwise images", given, result, grad)
    if not is_read_well(fake(x)):
        return None
    channels, taps = fake(x).shape[1], fake(weight)[0, 0].numel()
    if given["groups"] == channels == fake(grad).shape[1] and taps <= _LONGEST_DEPTHWISE:
        return _request("depthwise weights", given, result, grad, x)
    return _request("weights", given, result, grad, x) if given["groups"] == 1 else None


def _request(kind: Kind, given: dict[str, Any], result: fx.Node, first: fx.Node, second: fx.Node) -> TrainedRequest:
    weight, images = fake(given["weight"]), fake(given["input"])
    is_made = kind in ("images", "depthwise images")
    laid = torch.empty_like(images, device="meta", memory_format=torch.channels_last) if is_made else images
    is_forward = is_call(result, CONVOLUTION)
    return TrainedRequest(
        kind=kind,
        arithmetic=arithmetic_of(images.dtype, torch.backends.cudnn.conv),  # type: ignore[attr-defined]
        shape=convolution_shape(
            laid, weight.shape[0], weight.shape[2:], given["stride"], given["padding"], given["dilation"]
        ),
        first=first,
        second=second,
        bias=given["bias"] if is_forward else None,
        nodes=(result,) if is_forward else (argument(result, 0), result),
    )


def _is_laid(result: Tensor) -> bool:
    """Return whether it has the kernels' layout, other than in strides of axes of length 1."""
    laid = torch.empty_like(result, device="meta", memory_format=torch.channels_last)
    is_both = result.is_contiguous() and laid.is_contiguous()
    return result.numel() > 0 and (result.stride() == laid.stride() or is_both)
