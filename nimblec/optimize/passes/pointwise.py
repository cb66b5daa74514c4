"""Convolutions of single pixels as matrix products, which add the bias in their epilogue."""

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake
from nimblec.graph.vocabulary import CONVOLUTION

aten = torch.ops.aten


def linear_convolutions(module: fx.GraphModule) -> None:
    """Convert convolutions of images of one pixel, as in squeeze-and-excitation, into linears."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(CONVOLUTION):
        if torch.Size(fake(node).shape[2:]).numel() == 1 and _is_linear(rewriter, node):
            images = argument(node, 0)
            rows = rewriter.call(aten.reshape.default, images, list(fake(images).shape[:2]), at=node)
            product = _linear(rewriter, node, rows)
            rewriter.replace(node, rewriter.call(aten.reshape.default, product, list(fake(node).shape), at=node))
    rewriter.finish()


def _is_linear(rewriter: Rewriter, node: fx.Node) -> bool:
    """Return whether each pixel of the result is a linear function of one pixel alone."""
    given = bound(node)
    weight, x = rewriter.value(given["weight"]), fake(given["input"])
    return (
        weight is not None
        and x.dim() == weight.dim()
        and torch.Size(weight.shape[2:]).numel() == 1
        and given["groups"] == 1
        and not given["transposed"]
        and not any(given["padding"])
        and x.shape[2:] == fake(node).shape[2:]
        and (given["bias"] is None or fake(given["bias"]).dtype == weight.dtype)
    )


def _linear(rewriter: Rewriter, node: fx.Node, rows: fx.Node) -> fx.Node:
    """Return the convolution ``node`` of ``rows`` (pixels, channels)."""
    given = bound(node)
    weight = rewriter.value(given["weight"])
    assert weight is not None
    matrix = rewriter.constant(weight.reshape(weight.shape[:2]).t(), at=node)
    if given["bias"] is None:
        return rewriter.call(aten.mm.default, rows, matrix, at=node)
    return rewriter.call(aten.addmm.default, given["bias"], rows, matrix, at=node)
