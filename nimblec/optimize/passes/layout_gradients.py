"""The gradients of a convolution as calls of their own, so that each can be scheduled by itself."""

import operator

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, bound
from nimblec.graph.vocabulary import CONVOLUTION_BACKWARD

aten = torch.ops.aten

_BIAS = 2
"""The place of the bias's gradient among the results."""


def split_gradients(module: fx.GraphModule) -> None:
    """Compute the gradients of a convolution's images, weights and bias by calls of their own.

    The layer before waits only for the gradient of the images; that of the weights may run beside it.
    """
    rewriter = Rewriter(module)
    for node in rewriter.calls(CONVOLUTION_BACKWARD):
        if sum(bound(node)["output_mask"]) > 1:
            for read in list(node.users):
                rewriter.replace(read, _alone(rewriter, node, argument(read, 1), at=read))
    rewriter.finish()


def _alone(rewriter: Rewriter, node: fx.Node, place: int, *, at: fx.Node) -> fx.Node:
    """Return a call that computes one of the gradients that ``node`` returns."""
    given = bound(node)
    if place == _BIAS:
        dims = [dim for dim in range(given["grad_output"].meta["val"].dim()) if dim != 1]
        return rewriter.call(aten.sum.dim_IntList, given["grad_output"], dims, at=at)
    sizes = None if place else given["bias_sizes"]
    given |= {"bias_sizes": sizes, "output_mask": [n == place for n in range(3)]}
    return rewriter.call(operator.getitem, rewriter.call(node.target, *given.values(), at=at), place, at=at)
