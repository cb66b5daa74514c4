"""Prologues, computed by a kernel as it reads: batch norm, activation and gate before a convolution.

Networks that normalise before they convolve (DenseNet, NASNet, ResNet v2) and those that weight
channels (squeeze and excitation) have these as calls of their own: the convolution before them has
other readers, or the channels' weights depend on its whole result.
"""

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from nimblec.graph.affine import read_affine
from nimblec.graph.fusible import is_fusible
from nimblec.graph.rewriter import Rewriter, argument, fake, is_call, times_read
from nimblec.graph.views import is_view
from nimblec.graph.vocabulary import WHOLE_VIEWS, activation_of, is_like
from nimblec.kernels.images import is_read_well

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrologueMatch:
    """Calls that compute ``activation(x * scale + shift) * gate``: ``nodes`` in their order, the last is the result.

    Only ``sharers`` requests read that result, a row through ``views``. ``scale`` and ``shift`` are (channels,) in
    float64. The images and the gate are known by their places among the calls' arguments, as these may be replaced.
    """

    nodes: tuple[fx.Node, ...]
    x_place: int
    gate_place: int | None = None
    sharers: int = 1
    views: tuple[fx.Node, ...] = ()
    activation: str = "none"
    scale: Tensor | None = field(default=None, repr=False)
    shift: Tensor | None = field(default=None, repr=False)

    @property
    def x(self) -> fx.Node:
        """The images that the kernel reads instead."""
        x: fx.Node = argument(self.nodes[0], self.x_place)
        return x

    @property
    def gate(self) -> fx.Node | None:
        """A factor for each image and channel, (images, channels, 1, 1), or for each element of a row."""
        return None if self.gate_place is None else argument(self.nodes[-1], self.gate_place)


def prologues(
    rewriter: Rewriter, readers: Iterable[fx.Node], taken: Collection[fx.Node]
) -> dict[fx.Node, PrologueMatch]:
    """Return the prologues of ``readers``, convolutions of images channels last, where they have one.

    ``taken`` are calls that other launches compute already. Two kinds of calls stay, as fusing them would
    save no launch: those whose value is also needed in memory, and those that a generated kernel computes
    together with the call that makes their images, such as a concatenation.
    """
    known = dict.fromkeys(readers)
    found = {}
    for reader in known:
        images = argument(reader, 0)
        if all(user in known and times_read(images, user) == 1 for user in images.users):
            before = _walk(rewriter, images, taken)
            if before is not None and (before.x in taken or not _is_generated(before.x)):
                found[reader] = replace(before, sharers=len(images.users))
    return found


def row_prologue(node: fx.Node, taken: Collection[fx.Node]) -> PrologueMatch | None:
    """Return the prologue ``activation(x) * gate`` of a product of one row that reads ``node``, if it has one.

    Gated networks, as in decoders, have it. Elements follow each other in memory, in all shapes that views give them.
    """
    views: tuple[fx.Node, ...] = ()
    while is_call(node, *WHOLE_VIEWS) and is_view(node) and len(node.users) == 1:
        views, node = (node, *views), argument(node, 0)
    factors = [factor for factor in node.args if isinstance(factor, fx.Node)]
    if not is_call(node, aten.mul.Tensor) or node in taken or len(node.users) > 1 or len({*factors}) < 2:
        return None
    if not all(is_like(factor, node) and fake(factor).is_contiguous() for factor in factors):
        return None
    for place, factor in enumerate(factors):
        activation = None if factor in taken or len(factor.users) > 1 else activation_of(factor)
        if activation is not None and is_like(x := argument(factor, 0), node) and fake(x).is_contiguous():
            x_place = factor.args.index(x)
            nodes = (factor, node)
            return PrologueMatch(nodes=nodes, x_place=x_place, gate_place=1 - place, activation=activation, views=views)
    return PrologueMatch(nodes=(node,), x_place=0, gate_place=1, views=views)


def _walk(rewriter: Rewriter, last: fx.Node, taken: Collection[fx.Node]) -> PrologueMatch | None:
    """Return the calls up to ``last`` that a launch can compute; all but ``last`` have one user."""
    before, node = None, last
    while node not in taken and (node is last or len(node.users) == 1):
        longer = _gated(rewriter, node, before) or _activated(node, before) or _scaled(rewriter, node, before)
        if longer is None or not (is_like(longer.x, last) and is_read_well(fake(longer.x))):
            break
        before, node = longer, longer.x
    return before


def _gated(rewriter: Rewriter, node: fx.Node, before: PrologueMatch | None) -> PrologueMatch | None:
    """Match ``x * gate``, the last step of a prologue."""
    if before is not None or not is_call(node, aten.mul.Tensor) or len(node.all_input_nodes) < 2:
        return None
    images, channels = fake(node).shape[:2]
    for place, gate in enumerate(node.args):
        if not isinstance(gate, fx.Node) or rewriter.value(gate) is not None:
            continue
        value = fake(gate)
        if value.shape == (images, channels, 1, 1) and value.dtype == fake(node).dtype and value.is_contiguous():
            return PrologueMatch(nodes=(node,), x_place=1 - place, gate_place=place)
    return None


def _activated(node: fx.Node, before: PrologueMatch | None) -> PrologueMatch | None:
    activation = activation_of(node)
    if activation is None:
        return None
    if before is None:
        return PrologueMatch(nodes=(node,), x_place=0, activation=activation)
    if before.activation != "none" or before.scale is not None:
        return None
    return replace(before, nodes=(node, *before.nodes), x_place=0, activation=activation)


def _scaled(rewriter: Rewriter, node: fx.Node, before: PrologueMatch | None) -> PrologueMatch | None:
    """Return a batch norm, or a product or sum with a constant for each channel."""
    read = read_affine(rewriter, node)
    factors = None if read is None else read.along(1, fake(node))
    if read is None or factors is None:
        return None
    first = argument(node, 0) if node.target is operator.getitem else node
    nodes = (node,) if first is node else (first, node)
    x_place = first.args.index(read.source)
    scale, shift = (factor.expand(fake(node).shape[1]) for factor in factors)
    if before is None:
        return PrologueMatch(nodes=nodes, x_place=x_place, scale=scale, shift=shift)
    if before.scale is not None and before.shift is not None:
        scale, shift = scale * before.scale, shift * before.scale + before.shift
    return replace(before, nodes=(*nodes, *before.nodes), x_place=x_place, scale=scale, shift=shift)


def _is_generated(node: fx.Node) -> bool:
    return is_fusible(argument(node, 0) if node.target is operator.getitem else node)
