"""Transposed convolutions whose windows do not overlap, as those that double an image in a UNet."""

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, bound, fake
from nimblec.graph.views import is_channels_last
from nimblec.graph.vocabulary import CONVOLUTION, DTYPES

aten = torch.ops.aten


def block_transposed_convolutions(module: fx.GraphModule) -> None:
    """Replace transposed convolutions whose windows do not overlap by a 1x1 convolution and one copy.

    The library computes them as the gradient of a convolution, by slow kernels whose result must be
    cleared first. A 1x1 convolution computes the whole block that each pixel becomes; the copy, which
    generated code fuses into the call that follows, puts the blocks side by side in the layout of the
    result. So this comes after the passes that change layouts.
    """
    rewriter = Rewriter(module)
    rewriter.propagate()
    for node in rewriter.calls(CONVOLUTION):
        if _makes_blocks(rewriter, node):
            rewriter.replace(node, _blocks(rewriter, node))
    rewriter.finish()


def _makes_blocks(rewriter: Rewriter, node: fx.Node) -> bool:
    """Return whether each pixel becomes a block: the kernel is as long as the stride, or the image is one pixel."""
    given, image, result = bound(node), fake(bound(node)["input"]), fake(node)
    weight = rewriter.value(given["weight"])
    if weight is None or not given["transposed"] or not image.dim() == weight.dim() == 4:
        return False
    return (
        given["groups"] == 1
        and not any((*given["padding"], *given["output_padding"]))
        and set(given["dilation"]) == {1}
        and all(n == m * k for n, m, k in zip(result.shape[2:], image.shape[2:], weight.shape[2:], strict=True))
        and result.dtype == weight.dtype
        and weight.dtype in DTYPES
        and _has_fitting_bias(rewriter, node, weight)
        and (is_channels_last(result) or result.is_contiguous())
    )


def _has_fitting_bias(rewriter: Rewriter, node: fx.Node, weight: Tensor) -> bool:
    given = bound(node)["bias"]
    bias = rewriter.value(given)
    if bias is None:
        return given is None
    return bias.dtype == weight.dtype and bias.shape == weight.shape[1:2]


def _blocks(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    """Return the result of ``node`` from its blocks: pixel after pixel if channels last, else channel after channel."""
    given = bound(node)
    image, weight = fake(given["input"]), fake(given["weight"])
    (batch, channels, *size), kernel = fake(node).shape, weight.shape[2:]
    if is_channels_last(fake(node)):
        pixels = _pixels(rewriter, node, (1, 2, 0))
        parts = [batch, *kernel, channels, *image.shape[2:]]
        laid = _moved(rewriter, node, pixels, parts, [0, 4, 1, 5, 2, 3], [batch, *size, channels])
        return rewriter.call(aten.permute.default, laid, [0, 3, 1, 2], at=node)
    pixels = _pixels(rewriter, node, (0, 1, 2))
    parts = [batch, channels, *kernel, *image.shape[2:]]
    return _moved(rewriter, node, pixels, parts, [0, 1, 4, 2, 5, 3], [batch, channels, *size])


def _pixels(rewriter: Rewriter, node: fx.Node, order: tuple[int, int, int]) -> fx.Node:
    """Return a 1x1 convolution from pixels to blocks, whose (channels, rows, columns) have this order of the axes."""
    given = bound(node)
    weight, bias = rewriter.value(given["weight"]), rewriter.value(given["bias"])
    assert weight is not None
    matrices = weight.movedim(0, 3).permute(*order, 3).reshape(-1, weight.shape[0], 1, 1)
    repeated = bias
    if bias is not None:
        repeated = bias[:, None, None].expand(weight.shape[1:]).permute(order).reshape(-1)
    constants = (None if t is None else rewriter.constant(t, at=node) for t in (matrices, repeated))
    geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return rewriter.call(CONVOLUTION, given["input"], *constants, *geometry, at=node)


def _moved(
    rewriter: Rewriter, node: fx.Node, pixels: fx.Node, parts: list[int], order: list[int], shape: list[int]
) -> fx.Node:
    """View ``pixels`` as ``parts``, copy them with their axes in this order, and join them to ``shape``."""
    split = rewriter.call(aten.reshape.default, pixels, parts, at=node)
    permuted = rewriter.call(aten.permute.default, split, order, at=node)
    if not fake(permuted).is_contiguous():  # ``reshape`` alone would keep another order where it can
        permuted = rewriter.call(aten.clone.default, permuted, memory_format=torch.contiguous_format, at=node)
    return rewriter.call(aten.reshape.default, permuted, shape, at=node)
