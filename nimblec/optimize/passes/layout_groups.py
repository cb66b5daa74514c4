"""Grouped convolutions that cuDNN computes slowly channels last are computed contiguous."""

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, bound, fake
from nimblec.graph.views import is_channels_last
from nimblec.graph.vocabulary import CONVOLUTION, HALF, is_well_grouped

aten = torch.ops.aten

_LONGEST_DEPTHWISE = 7
"""The largest extent, in pixels, of a fast depthwise kernel."""
_WIDE = 32
"""Channels of a group from which the layout makes no difference."""


def lay_groups_contiguous(module: fx.GraphModule) -> None:
    """Copy images to contiguous before grouped convolutions that are slow channels last, and back after them.

    cuDNN (9.x, measured on an H200, float16 and float32) computes them by a kernel for a few groups at a
    time: ten times slower and more, copies included. Channels last only depthwise convolutions of small
    kernels are fast, and groups of 4, 8, 16 ... channels with as many results. Generated kernels fuse
    the copies with their neighbours.
    """
    rewriter = Rewriter(module)
    slow = [node for node in rewriter.calls(CONVOLUTION) if _is_slow(node)]
    if slow:
        rewriter.propagate()
    for node in slow:
        if is_channels_last(fake(node)):
            _lay(rewriter, node)
    rewriter.finish()


def _is_slow(node: fx.Node) -> bool:
    """Return whether cuDNN computes a convolution faster contiguous than channels last."""
    given = bound(node)
    weight = fake(given["weight"])
    made, read, *kernel = weight.shape[0] // given["groups"], *weight.shape[1:]
    if is_well_grouped(node) or given["transposed"] or set(kernel) == {1} or read >= _WIDE:
        return False
    if read == made == 1:
        return max(d * (size - 1) + 1 for size, d in zip(kernel, given["dilation"], strict=True)) > _LONGEST_DEPTHWISE
    return read >= 4 or made < 4 or fake(node).dtype not in HALF  # others are slower still when contiguous


def _lay(rewriter: Rewriter, node: fx.Node) -> None:
    images, weight, *rest = node.args
    value = rewriter.value(weight)
    if value is not None:
        weight = rewriter.constant(value.contiguous(), at=node)
    copied = rewriter.call(aten.clone.default, images, memory_format=torch.contiguous_format, at=node)
    result = rewriter.call(CONVOLUTION, copied, weight, *rest, at=node)
    rewriter.replace(node, rewriter.call(aten.clone.default, result, memory_format=torch.channels_last, at=node))
