"""Attention written out as products and a softmax becomes one scaled_dot_product_attention.

Rows whose scores are all masked with minus infinity are NaN before and zero after; no other value
changes by more than rounding.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from nimblec.graph.masks import HIDDEN, is_causal
from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.scalars import number, scaled
from nimblec.graph.vocabulary import ATTENTION, DTYPES, RESHAPES, is_like

aten = torch.ops.aten

HEAD_SIZES = range(8, 257, 8)
"""Head sizes of the fused kernels; any other is decomposed into the same calls again."""

SOFTMAX = aten._softmax.default


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """The argument of a softmax: the product of queries and keys, scaled, with masks added.

    ``shape`` is that of the scores where the masks are added: (batch, heads, queries, keys), or
    without batch.
    """

    product: fx.Node
    scale: float
    masks: tuple[fx.Node, ...]
    hidden: Tensor | None
    shape: tuple[int, ...]


def fuse_attention(module: fx.GraphModule) -> None:
    """Replace each product of values and a softmax over a product of queries and keys by one attention call."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(aten.bmm.default):
        scores = _read(rewriter, argument(node, 0))
        if scores is not None and _fits(scores, node):
            rewriter.replace(node, _attention(rewriter, node, scores))
    rewriter.finish()


def _read(rewriter: Rewriter, weights: fx.Node) -> _Scores | None:
    """Walk up from the weights of the values to the product of queries and keys; None where they are no attention."""
    node = _through(weights, *RESHAPES, aten._to_copy.default)
    if not is_call(node, SOFTMAX) or only_user(node) is None or not _is_whole(weights, node):
        return None
    rank = fake(node).dim()
    if bound(node)["dim"] % rank != rank - 1:
        return None
    node = _through(argument(node, 0), aten._to_copy.default)
    found = _Scores(product=node, scale=1.0, masks=(), hidden=None, shape=tuple(fake(node).shape))
    while not is_call(found.product, aten.bmm.default):
        step = _step(rewriter, found)
        if step is None or only_user(found.product) is None:
            return None
        found = step
    return found if only_user(found.product) is not None else None


def _through(node: fx.Node, *targets: torch._ops.OpOverload) -> fx.Node:
    while is_call(node, *targets) and only_user(node) is not None:
        node = argument(node, 0)
    return node


def _is_whole(weights: fx.Node, softmax: fx.Node) -> bool:
    """Return whether the weights have the rows and columns of the softmax, and the dtype of the scores."""
    scores = _through(argument(softmax, 0), aten._to_copy.default)
    return fake(weights).shape[-2:] == fake(softmax).shape[-2:] and fake(weights).dtype == fake(scores).dtype


def _step(rewriter: Rewriter, found: _Scores) -> _Scores | None:
    """Return one call further up."""
    node = found.product
    if is_call(node, *RESHAPES):
        source = argument(node, 0)
        same = fake(source).shape[-2:] == fake(node).shape[-2:]
        return replace(found, product=source) if same else None
    times = scaled(rewriter, node)
    if times is not None:
        if times[1] <= 0 or not is_like(times[0], node):  # kernels multiply minus infinity by the scale
            return None
        return replace(found, product=times[0], scale=found.scale * times[1])
    if is_call(node, aten.add.Tensor) and node.kwargs.get("alpha", 1) == 1:
        return _masked(found, node)
    return _filled(rewriter, found, node)


def _masked(found: _Scores, node: fx.Node) -> _Scores | None:
    """Match ``node`` as a sum of scores and a mask; the scores are the term that comes from the product."""
    terms = [term for term in node.args[:2] if isinstance(term, fx.Node)]
    for scores, mask in (terms, terms[::-1]) if len(terms) == 2 else ():
        full = is_like(scores, node) and tuple(fake(node).shape) == found.shape and found.hidden is None
        # A scale between the softmax and the mask would apply to the mask too.
        if full and found.scale == 1 and fake(mask).dtype == fake(node).dtype and _leads_to_product(scores):
            return replace(found, product=scores, masks=(*found.masks, mask))
    return None


def _leads_to_product(node: fx.Node) -> bool:
    calls = (*RESHAPES, aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.where.self, aten.masked_fill.Scalar)
    while is_call(node, *calls):
        node = argument(node, 1) if node.target is aten.where.self else argument(node, 0)
    return is_call(node, aten.bmm.default)


def _filled(rewriter: Rewriter, found: _Scores, node: fx.Node) -> _Scores | None:
    """Match ``node`` as scores that a constant condition hides in part, never a whole row, without another mask."""
    if is_call(node, aten.where.self):
        keep, scores, fill = (argument(node, n) for n in range(3))
        kept = rewriter.value(keep)
        hidden = None if kept is None else kept.logical_not()
    elif is_call(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        scores, condition, fill = (argument(node, n) for n in range(3))
        hidden = rewriter.value(condition)
    else:
        return None
    low = number(rewriter, fill)
    if hidden is None or hidden.dim() < 2 or low is None or low > HIDDEN or bool(hidden.all(-1).any()):
        return None
    if found.masks or found.hidden is not None or found.scale != 1:
        return None
    if not is_like(scores, node) or tuple(fake(node).shape) != found.shape:
        return None
    return replace(found, product=scores, hidden=hidden)


def _fits(scores: _Scores, node: fx.Node) -> bool:
    queries, values = fake(argument(scores.product, 0)), fake(argument(node, 1))
    rows = tuple(fake(argument(node, 0)).shape)
    return (
        fake(node).dtype in DTYPES
        and queries.dtype == fake(node).dtype
        and queries.shape[-1] in HEAD_SIZES
        and values.shape[-1] in HEAD_SIZES
        and len(scores.shape) in (3, 4)
        and torch.Size(scores.shape[:-2]).numel() == rows[0]
        and tuple(fake(scores.product).shape) == rows
    )


def _attention(rewriter: Rewriter, node: fx.Node, scores: _Scores) -> fx.Node:
    """Return the call that replaces ``node``, the product with the values."""
    batch, heads = (1, *scores.shape)[-4:-2]

    def split(operand: fx.Node) -> fx.Node:
        """Return (batch * heads, a, b) as (batch, heads, a, b)."""
        wanted = (batch, heads, *fake(operand).shape[1:])
        if is_call(operand, *RESHAPES) and tuple(fake(argument(operand, 0)).shape) == wanted:
            return argument(operand, 0)
        return rewriter.call(aten.reshape.default, operand, list(wanted), at=node)

    queries, columns = (split(argument(scores.product, n)) for n in range(2))
    values = split(argument(node, 1))
    scale = scores.scale
    queries, factor = _unscaled(rewriter, queries)
    columns, other = _unscaled(rewriter, columns)
    keys = rewriter.call(aten.transpose.int, columns, 2, 3, at=node)
    mask, causal = _mask(rewriter, scores, node)
    result = rewriter.call(
        ATTENTION,
        *(queries, keys, values, mask, 0.0, causal),
        scale=scale * factor * other,
        at=node,
    )
    return rewriter.call(aten.reshape.default, result, list(fake(node).shape), at=node)


def _unscaled(rewriter: Rewriter, node: fx.Node) -> tuple[fx.Node, float]:
    """Return a node without its factor: exports multiply queries and keys each by the root of the scale."""
    found = scaled(rewriter, node)
    if found is None or not is_like(found[0], node) or found[1] <= 0:
        return node, 1.0
    return found


def _mask(rewriter: Rewriter, scores: _Scores, node: fx.Node) -> tuple[fx.Node | None, bool]:
    """Return the sum of the masks, if any, and whether a causal flag replaces it."""
    if scores.hidden is not None:
        if is_causal(scores.hidden.logical_not(), scores.shape[-2:]):
            return None, True
        zeros = torch.zeros(scores.hidden.shape, dtype=fake(node).dtype, device=scores.hidden.device)
        filled = rewriter.constant(zeros.masked_fill(scores.hidden, -torch.inf), at=node)
        return _four_axes(rewriter, filled, node), False
    constants = [rewriter.value(mask) for mask in scores.masks]
    if len(constants) == 1 and constants[0] is not None and is_causal(constants[0], scores.shape[-2:]):
        return None, True
    masks = [_four_axes(rewriter, mask, node) for mask in scores.masks]
    total = masks[0] if masks else None
    for mask in masks[1:]:
        total = rewriter.call(aten.add.Tensor, total, mask, at=node)
    return total, False


def _four_axes(rewriter: Rewriter, mask: fx.Node, node: fx.Node) -> fx.Node:
    shape = list(fake(mask).shape)
    if len(shape) == 4:
        return mask
    return rewriter.call(aten.reshape.default, mask, [1] * (4 - len(shape)) + shape, at=node)
