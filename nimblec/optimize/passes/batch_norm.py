"""Fold channel-wise scales and shifts, mostly batch norms, into the weights of a neighbour.

The weights are computed in float64 and rounded once. A fold that would lose more than that one
rounding (an overflow, or weights too small for their dtype) is not made.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.affine import ChannelAffine, read_affine
from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.views import axis_before
from nimblec.graph.vocabulary import CONVOLUTION, NORMS, WHOLE_VIEWS
from nimblec.graph.weights import Weights, constant_weights, rounded_weights

aten = torch.ops.aten


def fold_batch_norm(module: fx.GraphModule) -> None:
    """Fold scales and shifts into the convolution or linear before them, else after them.

    A batch norm in float32 or float64 that cannot be folded becomes one ``addcmul``.
    """
    rewriter = Rewriter(module)
    for node in list(module.graph.nodes):
        affine = read_affine(rewriter, node)
        if affine is None or _fold_back(rewriter, affine) or _fold_forward(rewriter, affine):
            continue
        if is_call(argument(node, 0), *NORMS) and fake(node).dtype in (torch.float32, torch.float64):
            _as_addcmul(rewriter, affine)
    rewriter.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A call and its new weights."""

    call: fx.Node
    weights: Weights


def _fold_back(rewriter: Rewriter, affine: ChannelAffine) -> bool:
    """Fold into what computes the source: a convolution, a linear, or a concatenation of such."""
    changes = _changes(rewriter, affine.source, affine)
    for change in changes or ():
        _apply(rewriter, change)
    if changes:
        _drop(rewriter, affine)
    return bool(changes)


def _drop(rewriter: Rewriter, affine: ChannelAffine) -> None:
    """Replace the scaled and shifted value by its source."""
    norm = argument(affine.node, 0)
    rewriter.replace(affine.node, affine.source)
    if is_call(norm, *NORMS):
        rewriter.graph.erase_node(norm)


def _changes(rewriter: Rewriter, node: fx.Node, affine: ChannelAffine) -> list[_Change] | None:
    """Return the changes by which ``node``, used once, is computed scaled and shifted; None where it cannot be."""
    if only_user(node) is None:
        return None
    if is_call(node, aten.cat.default):
        return _changes_of_parts(rewriter, node, affine)
    if is_call(node, *WHOLE_VIEWS):
        return _changes_of_viewed(rewriter, node, affine)
    weights = None
    if is_call(node, CONVOLUTION):
        weights = _scaled_convolution(rewriter, node, affine)
    elif is_call(node, aten.addmm.default, aten.mm.default):
        weights = _scaled_linear(rewriter, node, affine)
    return [_Change(call=node, weights=weights)] if weights else None


def _changes_of_viewed(rewriter: Rewriter, node: fx.Node, affine: ChannelAffine) -> list[_Change] | None:
    """Return the changes through a view that keeps the channels, as after a linear over more than two axes."""
    axis = None if affine.axis is None else axis_before(node, affine.axis)
    if (axis is None) != (affine.axis is None):
        return None
    (source,) = node.all_input_nodes
    return _changes(rewriter, source, replace(affine, axis=axis))


def _changes_of_parts(rewriter: Rewriter, node: fx.Node, affine: ChannelAffine) -> list[_Change] | None:
    """Return the changes through a concatenation along the channels, each part by its slice of the factors."""
    parts, axis = bound(node)["tensors"], bound(node)["dim"] % fake(node).dim()
    slices = [affine] * len(parts)
    if affine.axis is not None:
        if affine.axis != axis or any(fake(part).dim() != fake(node).dim() for part in parts):  # torch drops (0,)
            return None
        lengths = [fake(part).shape[axis] for part in parts]
        halves = zip(affine.scale.split(lengths), affine.shift.split(lengths), strict=True)
        slices = [replace(affine, scale=scale, shift=shift) for scale, shift in halves]
    changes: list[_Change] = []
    for part, part_affine in zip(parts, slices, strict=True):
        found = _changes(rewriter, part, part_affine)
        if found is None:
            return None
        changes += found
    return changes


def _scaled_convolution(rewriter: Rewriter, node: fx.Node, affine: ChannelAffine) -> Weights | None:
    given = bound(node)
    transposed = given["transposed"]
    old = constant_weights(rewriter, given["weight"], given["bias"], fake(node).shape[1])
    vectors = old and fake(node).dim() == old.weight.dim() and affine.along(1, old.weight)
    if not old or not vectors:
        return None
    scale, shift = vectors
    if bool((scale == 1).all()):
        return _shifted(old, shift)
    if transposed:
        weight = _scale_second_axis(old.weight, scale.expand(len(old.bias)), given["groups"])
    else:
        weight = old.weight.double() * scale.reshape(-1, *[1] * (old.weight.dim() - 1))
    return rounded_weights(old.weight, weight, old.bias.double() * scale + shift, axis=1 if transposed else 0)


def _scaled_linear(rewriter: Rewriter, node: fx.Node, affine: ChannelAffine) -> Weights | None:
    given = bound(node)
    bias = given["self"] if "mat1" in given else None  # ``mm`` has none
    old = constant_weights(rewriter, given["mat2"], bias, fake(node).shape[1])
    vectors = old and _is_plain(given) and affine.along(1, old.weight)
    if not old or not vectors:
        return None
    scale, shift = vectors
    if bool((scale == 1).all()):
        return _shifted(old, shift)
    return rounded_weights(old.weight, old.weight.double() * scale, old.bias.double() * scale + shift, axis=1)


def _fold_forward(rewriter: Rewriter, affine: ChannelAffine) -> bool:
    """Fold into the one convolution without padding, or the linear, that reads the result; a number through views."""
    read, user = affine.node, only_user(affine.node)
    while affine.axis is None and user is not None and is_call(user, *WHOLE_VIEWS):
        read, user = user, only_user(user)
    if user is None:
        return False
    weights = None
    if is_call(user, CONVOLUTION) and argument(user, 0) is read:
        weights = _absorbing_convolution(rewriter, user, affine)
    elif is_call(user, aten.addmm.default) and argument(user, 1) is read:
        weights = _absorbing_linear(rewriter, user, affine)
    if weights is None:
        return False
    _apply(rewriter, _Change(call=user, weights=weights))
    _drop(rewriter, affine)
    return True


def _absorbing_convolution(rewriter: Rewriter, node: fx.Node, affine: ChannelAffine) -> Weights | None:
    given = bound(node)
    old = constant_weights(rewriter, given["weight"], given["bias"], fake(node).shape[1])
    vectors = old and fake(node).dim() == old.weight.dim() and affine.along(1, old.weight)
    # Padding zeros are not shifted; at its edges a transposed convolution sums fewer taps.
    if not old or not vectors or given["transposed"] or any(given["padding"]):
        return None
    channels = fake(argument(node, 0)).shape[1]
    scaled, moved = (_scale_second_axis(old.weight, v.expand(channels), given["groups"]) for v in vectors)
    bias = old.bias.double() + moved.sum(dim=tuple(range(1, moved.dim())))
    return rounded_weights(old.weight, scaled, bias, axis=0)


def _absorbing_linear(rewriter: Rewriter, node: fx.Node, affine: ChannelAffine) -> Weights | None:
    given = bound(node)
    old = constant_weights(rewriter, given["mat2"], given["self"], fake(node).shape[1])
    vectors = old and _is_plain(given) and affine.along(1, old.weight)
    if not old or not vectors:
        return None
    scale, shift = (v.expand(old.weight.shape[0]) for v in vectors)
    weight = old.weight.double()
    return rounded_weights(old.weight, weight * scale[:, None], old.bias.double() + shift @ weight, axis=1)


def _scale_second_axis(weight: Tensor, values: Tensor, groups: int) -> Tensor:
    """Multiply ``weight`` (a * groups, b, ...) by ``values`` (b * groups), each group of rows by its own b of them."""
    grouped = weight.double().reshape(groups, -1, *weight.shape[1:])
    return (grouped * values.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))).reshape(weight.shape)


def _is_plain(given: dict[str, Any]) -> bool:
    """Return whether a linear scales neither its bias nor its product."""
    return given.get("alpha", 1) == 1 and given.get("beta", 1) == 1


def _shifted(old: Weights, shift: Tensor) -> Weights | None:
    """Return the same weights, another bias."""
    bias = (old.bias.double() + shift).to(old.bias.dtype)
    return Weights(weight=old.weight, bias=bias) if bool(bias.isfinite().all()) else None


def _apply(rewriter: Rewriter, change: _Change) -> None:
    call, new = change.call, change.weights
    given = bound(call)
    bias = rewriter.constant(new.bias, at=call)
    weight = given["weight" if is_call(call, CONVOLUTION) else "mat2"]
    if new.weight is not rewriter.value(weight):  # a shift alone keeps the weights, which may be shared
        weight = rewriter.constant(new.weight, at=call)
    if is_call(call, CONVOLUTION):
        call.args = (argument(call, 0), weight, bias, *call.args[3:])
    else:
        call.args, call.target = (bias, given["mat1" if "mat1" in given else "self"], weight), aten.addmm.default


def _as_addcmul(rewriter: Rewriter, affine: ChannelAffine) -> None:
    """Scale and shift by one call; in half precision the norm stays, as it computes in float32."""
    like = fake(affine.node)
    shape = [1, -1, *[1] * (like.dim() - 2)]
    scale, shift = (
        rewriter.constant(vector.to(like.dtype).reshape(shape), at=affine.node)
        for vector in (affine.scale, affine.shift)
    )
    rewriter.replace(affine.node, rewriter.call(aten.addcmul.default, shift, affine.source, scale, at=affine.node))
