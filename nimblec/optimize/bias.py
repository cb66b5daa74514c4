"""Biases that the next generated kernel can add."""

import torch
from torch import fx

from nimblec.optimize.batch_norm import CONVOLUTION
from nimblec.optimize.fusible import is_fusible, is_view
from nimblec.optimize.rewriter import Rewriter, bound, fake

aten = torch.ops.aten


def free_biases(module: fx.GraphModule) -> None:
    """A convolution adds its bias by a kernel of its own: where a fusible call follows, let it add the bias."""
    rewriter = Rewriter(module)
    rewriter.propagate()
    for node in rewriter.calls(CONVOLUTION):
        bias = rewriter.value(bound(node)["bias"])
        if bias is None or not all(is_fusible(user) and not is_view(user) for user in node.users):
            continue
        shape = [-1, *[1] * (fake(node).dim() - 2)]
        if fake(node).dtype != bias.dtype or fake(node).dim() != fake(bound(node)["weight"]).dim():
            continue
        plain = rewriter.call(CONVOLUTION, *node.args[:2], None, *node.args[3:], at=node)
        column = rewriter.constant(bias.reshape(shape), at=node)
        rewriter.replace(node, rewriter.call(aten.add.Tensor, plain, column, at=node))
    rewriter.finish()
