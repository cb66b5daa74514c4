"""Convolutions over one axis as convolutions of images of one row, which have layouts and kernels."""

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, bound, fake, only_user
from nimblec.graph.vocabulary import CONVOLUTION, activation_of

aten = torch.ops.aten


def convolve_as_images(module: fx.GraphModule) -> None:
    """Replace convolutions over one axis, by constant weights, by those of images of one row."""
    rewriter = Rewriter(module)
    for convolution in rewriter.calls(CONVOLUTION):
        node, given = convolution, bound(convolution)
        weight = rewriter.value(given["weight"])
        if fake(node).dim() != 3 or weight is None or given["transposed"]:
            continue
        given["input"] = rewriter.call(aten.unsqueeze.default, given["input"], 2, at=node)
        given["weight"] = rewriter.constant(weight.unsqueeze(2), at=node)
        for name, of_rows in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
            given[name] = [of_rows, *given[name]]
        images, user = rewriter.call(CONVOLUTION, *given.values(), at=node), only_user(node)
        if user is not None and activation_of(user) is not None:
            # The kernel computes an activation of images, too.
            images = rewriter.call(user.target, images, *user.args[1:], at=user, **user.kwargs)
            node = user
        rewriter.replace(node, rewriter.call(aten.squeeze.dim, images, 2, at=node))
    rewriter.finish()
