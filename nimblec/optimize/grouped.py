"""Grouped convolutions that cuDNN computes slowly channels last: in the other order."""

import torch
from torch import fx

from nimblec.optimize.batch_norm import CONVOLUTION
from nimblec.optimize.layout import HALF, is_channels_last
from nimblec.optimize.rewriter import Rewriter, bound, fake

aten = torch.ops.aten

_LONGEST_DEPTHWISE = 7
"""Pixels that a fast depthwise kernel reaches."""
_WIDE = 32
"""Channels of a group from which on it makes no difference."""


def lay_groups_contiguous(module: fx.GraphModule) -> None:
    """Copy images to the order of the axes before grouped convolutions that are slow channels last, and back.

    cuDNN (9.x, measured on an H200, float16 and float32) computes them by a kernel for a few groups at a
    time: up to ten times slower, copies counted. Fast channels last are only depthwise convolutions of
    small kernels, and groups of 4, 8, 16 ... channels with as many results. Generated kernels make
    the copies on their way.
    """
    rewriter = Rewriter(module)
    slow = [node for node in rewriter.calls(CONVOLUTION) if is_slow_channels_last(node)]
    if slow:
        rewriter.propagate()
    for node in slow:
        if is_channels_last(fake(node)):
            _lay(rewriter, node)
    rewriter.finish()


def is_slow_channels_last(node: fx.Node) -> bool:
    """Whether cuDNN would compute a convolution faster in another order than channels last."""
    given = bound(node)
    groups, weight = given["groups"], fake(given["weight"])
    kernel = weight.shape[2:]
    if groups == 1 or given["transposed"] or kernel.numel() == 1:
        return False
    read, made = weight.shape[1], weight.shape[0] // groups
    if read == made == 1:
        reach = max(d * (size - 1) + 1 for size, d in zip(kernel, given["dilation"], strict=True))
        return reach > _LONGEST_DEPTHWISE
    if read == made and read >= 4 and not read & (read - 1):
        return False
    if read < 4 <= made and fake(node).dtype in HALF:  # slower still in the other order
        return False
    return read < _WIDE


def _lay(rewriter: Rewriter, node: fx.Node) -> None:
    images, weight, *rest = node.args
    value = rewriter.value(weight)
    if value is not None:
        weight = rewriter.constant(value.contiguous(), at=node)
    copied = rewriter.call(aten.clone.default, images, memory_format=torch.contiguous_format, at=node)
    result = rewriter.call(CONVOLUTION, copied, weight, *rest, at=node)
    rewriter.replace(node, rewriter.call(aten.clone.default, result, memory_format=torch.channels_last, at=node))
