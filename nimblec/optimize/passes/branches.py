"""Sums of convolutions of the same images become one: blocks as they are trained, with a norm in each branch.

Ding et al., "RepVGG: Making VGG-style ConvNets Great Again", 2021; the blocks of MobileOne, FastViT,
RepViT and several YOLOs are like it.
"""

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from nimblec.graph.affine import read_affine
from nimblec.graph.rewriter import Rewriter, bound, fake, is_call, only_user
from nimblec.graph.vocabulary import CONVOLUTION, is_like
from nimblec.graph.weights import Weights, constant_weights, rounded_weights
from nimblec.optimize.passes.batch_norm import fold_batch_norm

aten = torch.ops.aten

_SIGNS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """A convolution of ``images``."""

    images: fx.Node
    weights: Weights
    geometry: dict[str, Any]
    """The arguments of `aten.convolution` after the bias, by name."""


def join_branches(module: fx.GraphModule) -> None:
    """Replace sums and differences of convolutions of the same images by one convolution with summed weights.

    Norms of these images are terms too, and a scale of the sum is folded.
    """
    rewriter = Rewriter(module)
    is_joined = False
    for node in rewriter.calls(*_SIGNS):
        call = _joined(rewriter, node)
        if call is not None:
            rewriter.replace(node, call)
            is_joined = True
    rewriter.finish()
    if is_joined:
        fold_batch_norm(module)


def _joined(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """Return the convolution that computes the sum ``node``; None where none does, or rounding would lose too much."""
    terms, signs = node.args[:2], (1, _SIGNS[node.target])  # type: ignore[index]
    is_broadcast = not all(isinstance(term, fx.Node) and is_like(term, node) for term in terms)
    if is_broadcast or node.kwargs.get("alpha", 1) != 1:
        return None
    for (large, sign), (other, other_sign) in permutations(zip(terms, signs, strict=True)):
        like = _convolution(rewriter, large)
        small = None if like is None else _convolution(rewriter, other) or _affine(rewriter, other, like)
        if like is None or small is None:
            continue
        embedded = _embedded(small, like)
        if embedded is not None:
            weight = sign * like.weights.weight.double() + other_sign * embedded
            bias = sign * like.weights.bias.double() + other_sign * small.weights.bias.double()
            new = rounded_weights(like.weights.weight, weight, bias, axis=0)
            return None if new is None else _call(rewriter, like, new, at=node)
    return None


def _call(rewriter: Rewriter, like: _Branch, weights: Weights, *, at: fx.Node) -> fx.Node:
    constants = [rewriter.constant(tensor, at=at) for tensor in (weights.weight, weights.bias)]
    return rewriter.call(CONVOLUTION, like.images, *constants, *like.geometry.values(), at=at)


def _convolution(rewriter: Rewriter, node: Any) -> _Branch | None:
    """Return a convolution with constant weights, read by one other call."""
    if not is_call(node, CONVOLUTION) or only_user(node) is None:
        return None
    given = bound(node)
    images, weight, bias = (given.pop(name) for name in ("input", "weight", "bias"))
    weights = constant_weights(rewriter, weight, bias, fake(node).shape[1])
    if weights is None or given["transposed"] or weights.weight.dim() != fake(node).dim():
        return None
    return _Branch(images=images, weights=weights, geometry=given)


def _affine(rewriter: Rewriter, node: Any, like: _Branch) -> _Branch | None:
    """Match scales and shifts of channels as a 1x1 convolution of the images and with the groups of ``like``."""
    old, groups, rank = like.weights.weight, like.geometry["groups"], like.weights.weight.dim() - 2
    if not isinstance(node, fx.Node) or node is like.images or old.shape[0] != old.shape[1] * groups:
        return None
    scale, shift = old.new_ones(old.shape[0]).double(), old.new_zeros(old.shape[0]).double()
    while node is not like.images:
        read = read_affine(rewriter, node) if only_user(node) is not None else None
        factors = read and read.along(1, old)
        if read is None or not factors or fake(node).dim() != old.dim() or fake(node).shape[1] != len(scale):
            return None
        scale, shift = scale * factors[0], scale * factors[1] + shift
        node = read.source
    blocks = torch.eye(old.shape[1], dtype=scale.dtype, device=scale.device).repeat(groups, 1)
    weight = (blocks * scale[:, None]).reshape(*old.shape[:2], *[1] * rank)
    geometry = like.geometry | {"stride": [1] * rank, "padding": [0] * rank}
    return _Branch(images=like.images, weights=Weights(weight=weight, bias=shift), geometry=geometry)


def _embedded(small: _Branch, large: _Branch) -> Tensor | None:
    """Return the weights of ``small``, padded with zeros to the kernel of ``large``; None where they do not fit."""
    if small.images is not large.images:
        return None
    kernel, within = small.weights.weight.shape[2:], large.weights.weight.shape[2:]
    a, b = small.geometry, large.geometry
    if list(a["stride"]) != list(b["stride"]) or a["groups"] != b["groups"]:
        return None
    around: list[int] = []
    for axis in reversed(range(len(kernel))):
        if kernel[axis] > 1 and a["dilation"][axis] != b["dilation"][axis]:
            return None
        before, rest = divmod(b["padding"][axis] - a["padding"][axis], b["dilation"][axis])
        after = within[axis] - kernel[axis] - before
        if rest or before < 0 or after < 0:
            return None
        around += [before, after]
    return functional.pad(small.weights.weight.double(), around)
