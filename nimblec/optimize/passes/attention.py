"""Attention written out as products and a softmax becomes one scaled_dot_product_attention.

Rows whose scores are all masked with minus infinity are NaN before and zero after; no other value
changes by more than rounding.
"""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, fx

from nimblec.graph.masks import HIDDEN, is_causal
from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.scalars import number, scaled
from nimblec.graph.vocabulary import ATTENTION, DTYPES, RESHAPES, TRANSPOSES, WHOLE_VIEWS, is_like

aten = torch.ops.aten

HEAD_SIZES = range(8, 257, 8)
"""Head sizes of the fused kernels; any other is decomposed into the same calls again."""

SOFTMAX = aten._softmax.default

_BETWEEN = (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.where.self, aten.masked_fill.Scalar)
"""Calls on the way from a product to its softmax."""
_IN_ORDER = tuple(view for view in WHOLE_VIEWS if view not in TRANSPOSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """The argument of a softmax: the product of queries and keys, scaled, with masks added.

    ``shape`` is theirs in the softmax: (..., heads, queries, keys). Each mask comes with the shape that the scores have
    where it is added, which may be another view. Of ``factors``, each has a number for each head, as in Swin V2.
    """

    product: fx.Node
    scale: float
    factors: tuple[fx.Node, ...]
    masks: tuple[tuple[fx.Node, torch.Size], ...]
    hidden: Tensor | None
    shape: torch.Size

    @property
    def is_scaled(self) -> bool:
        """Whether what is added further up would be multiplied too."""
        return self.scale != 1 or bool(self.factors)


def fuse_attention(module: fx.GraphModule) -> None:
    """Replace each product of values and a softmax over a product of queries and keys by attention of four axes."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(ATTENTION):
        if fake(node).dim() != 4:
            rewriter.replace(node, _with_one_batch(rewriter, node))
    for node in rewriter.calls(aten.baddbmm.default):
        if _leads_to_softmax(node):
            _take_apart(rewriter, node)
    for node in rewriter.calls(aten.bmm.default):
        scores = _read(rewriter, argument(node, 0))
        if scores is not None and _fits(scores, node):
            rewriter.replace(node, _attention(rewriter, node, scores))
    rewriter.finish()


def _with_one_batch(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    """Return a call of attention with one axis before that of heads."""

    def folded(operand: fx.Node) -> fx.Node:
        *batches, heads = fake(operand).shape[:-2] or (1,)
        return rewriter.call(aten.reshape.default, operand, [prod(batches), heads, *fake(operand).shape[-2:]], at=node)

    given = bound(node)
    mask = given["attn_mask"]
    if mask is not None and _leading(fake(mask)) == 1:
        mask = _four_axes(rewriter, mask, node)
    elif mask is not None:
        scores = [*fake(node).shape[:-1], fake(given["key"]).shape[-2]]
        mask = folded(rewriter.call(aten.expand.default, mask, scores, at=node))
    operands = (folded(given[name]) for name in ("query", "key", "value"))
    how = {"scale": given["scale"], "enable_gqa": given["enable_gqa"]}
    result = rewriter.call(ATTENTION, *operands, mask, given["dropout_p"], given["is_causal"], **how, at=node)
    return rewriter.call(aten.reshape.default, result, list(fake(node).shape), at=node)


def _leads_to_softmax(node: fx.Node) -> bool:
    while (user := only_user(node)) is not None and is_call(user, *_IN_ORDER, *_BETWEEN):
        node = user
    return user is not None and is_call(user, SOFTMAX)


def _take_apart(rewriter: Rewriter, node: fx.Node) -> None:
    """Replace a `baddbmm` by a product, its scale, and a sum."""
    given = bound(node)
    if given["beta"] != 1:
        return
    scores = rewriter.call(aten.bmm.default, given["batch1"], given["batch2"], at=node)
    if given["alpha"] != 1:
        scores = rewriter.call(aten.mul.Tensor, scores, given["alpha"], at=node)
    mask = rewriter.value(given["self"])
    if mask is None or bool(mask.any()):
        scores = rewriter.call(aten.add.Tensor, scores, given["self"], at=node)
    rewriter.replace(node, scores)


def _read(rewriter: Rewriter, weights: fx.Node) -> _Scores | None:
    """Walk up from the weights of the values to the product of queries and keys; None where they are no attention."""
    node = _through(weights, *_IN_ORDER, aten._to_copy.default)
    if not is_call(node, SOFTMAX) or only_user(node) is None or not _is_whole(weights, node):
        return None
    rank = fake(node).dim()
    if bound(node)["dim"] % rank != rank - 1:
        return None
    node = _through(argument(node, 0), aten._to_copy.default)
    found = _Scores(product=node, scale=1.0, factors=(), masks=(), hidden=None, shape=fake(node).shape)
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
        return replace(found, product=argument(node, 0))
    times = scaled(rewriter, node)
    if times is not None:
        if times[1] <= 0 or not is_like(times[0], node):  # kernels multiply minus infinity by the scale
            return None
        return replace(found, product=times[0], scale=found.scale * times[1])
    if is_call(node, aten.add.Tensor) and node.kwargs.get("alpha", 1) == 1:
        return _masked(found, node)
    if is_call(node, aten.mul.Tensor):
        return _multiplied(found, node)
    return _filled(rewriter, found, node)


def _multiplied(found: _Scores, node: fx.Node) -> _Scores | None:
    """Match ``node`` as scores times a factor for each head."""
    for scores, factor in (node.args[:2], node.args[1::-1]):
        if not isinstance(scores, fx.Node) or not isinstance(factor, fx.Node) or not is_like(scores, node):
            continue
        is_of_heads = fake(factor).shape[-2:] == (1, 1) and fake(factor).dtype == fake(node).dtype
        if is_of_heads and fake(node).shape == found.shape and _leads_to_product(scores):
            return replace(found, product=scores, factors=(*found.factors, factor))
    return None


def _masked(found: _Scores, node: fx.Node) -> _Scores | None:
    """Match ``node`` as a sum of scores and a mask; the scores are the term that comes from the product."""
    terms = [term for term in node.args[:2] if isinstance(term, fx.Node)]
    for scores, mask in (terms, terms[::-1]) if len(terms) == 2 else ():
        full = is_like(scores, node) and found.hidden is None
        # A scale between the softmax and the mask would apply to the mask too.
        if full and not found.is_scaled and fake(mask).dtype == fake(node).dtype and _leads_to_product(scores):
            return replace(found, product=scores, masks=(*found.masks, (mask, fake(node).shape)))
    return None


def _leads_to_product(node: fx.Node) -> bool:
    while is_call(node, *RESHAPES, *_BETWEEN):
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
    if found.masks or found.hidden is not None or found.is_scaled:
        return None
    if not is_like(scores, node) or fake(node).shape != found.shape:
        return None
    return replace(found, product=scores, hidden=hidden)


def _fits(scores: _Scores, node: fx.Node) -> bool:
    queries, values = fake(argument(scores.product, 0)), fake(argument(node, 1))
    rows = fake(argument(node, 0)).shape
    added = [fake(mask) for mask, shape in scores.masks if shape == scores.shape]
    broadcast = (*added, scores.hidden, *map(fake, scores.factors))
    return (
        fake(node).dtype in DTYPES
        and queries.dtype == fake(node).dtype
        and queries.shape[-1] in HEAD_SIZES
        and values.shape[-1] in HEAD_SIZES
        and len(scores.shape) >= 3
        and all(_leading(each) in (1, prod(scores.shape[:-3])) for each in broadcast)
        and prod(scores.shape[:-2]) == rows[0]
        and fake(scores.product).shape == rows
    )


def _attention(rewriter: Rewriter, node: fx.Node, scores: _Scores) -> fx.Node:
    """Return the call that replaces ``node``, the product with the values."""
    *batches, heads = scores.shape[:-2]
    batch = prod(batches)

    def split(operand: fx.Node) -> fx.Node:
        """Return (batch * heads, a, b) as (batch, heads, a, b)."""
        wanted = (batch, heads, *fake(operand).shape[1:])
        if is_call(operand, *RESHAPES) and tuple(fake(argument(operand, 0)).shape) == wanted:
            return argument(operand, 0)
        return rewriter.call(aten.reshape.default, operand, list(wanted), at=node)

    (queries, factor), (columns, other) = (_unscaled(rewriter, argument(scores.product, n)) for n in range(2))
    keys = rewriter.call(aten.transpose.int, split(columns), 2, 3, at=node)
    queries = split(queries)
    for each in scores.factors:
        queries = rewriter.call(aten.mul.Tensor, queries, _four_axes(rewriter, each, node), at=node)
    mask, causal = _mask(rewriter, scores, node)
    result = rewriter.call(
        ATTENTION,
        *(queries, keys, split(argument(node, 1)), mask, 0.0, causal),
        scale=scores.scale * factor * other,
        at=node,
    )
    return rewriter.call(aten.reshape.default, result, list(fake(node).shape), at=node)


def _unscaled(rewriter: Rewriter, node: fx.Node) -> tuple[fx.Node, float]:
    """Return a node without its factor: exports multiply queries and keys each by the root of the scale."""
    inner, views = node, list[fx.Node]()
    while is_call(inner, *WHOLE_VIEWS) and only_user(inner) is not None:
        inner, views = argument(inner, 0), [*views, inner]
    found = scaled(rewriter, inner)
    if found is None or not is_like(found[0], inner) or found[1] <= 0 or only_user(inner) is None:
        return node, 1.0
    for view in (view for view in views if is_call(view, *RESHAPES)):
        view.target = aten.reshape.default  # unlike ``view``, of any strides
    rewriter.replace(inner, found[0])
    return (node if views else found[0]), found[1]


def _mask(rewriter: Rewriter, scores: _Scores, node: fx.Node) -> tuple[fx.Node | None, bool]:
    """Return the sum of the masks, if any, and whether a causal flag replaces it."""
    if scores.hidden is not None:
        if is_causal(scores.hidden.logical_not(), scores.shape[-2:]):
            return None, True
        zeros = torch.zeros(scores.hidden.shape, dtype=fake(node).dtype, device=scores.hidden.device)
        filled = rewriter.constant(zeros.masked_fill(scores.hidden, -torch.inf), at=node)
        return _four_axes(rewriter, filled, node), False
    constants = [rewriter.value(mask) for mask, _ in scores.masks]
    if len(constants) == 1 and constants[0] is not None and is_causal(constants[0], scores.shape[-2:]):
        return None, True
    sums: dict[torch.Size, fx.Node] = {}
    for mask, shape in scores.masks:
        sums[shape] = rewriter.call(aten.add.Tensor, sums[shape], mask, at=node) if shape in sums else mask
    total = None
    for shape, mask in sums.items():
        whole = mask
        if shape != scores.shape:
            whole = rewriter.call(aten.expand.default, whole, list(shape), at=node)
            whole = rewriter.call(aten.reshape.default, whole, list(scores.shape), at=node)
        whole = _four_axes(rewriter, whole, node)
        total = whole if total is None else rewriter.call(aten.add.Tensor, total, whole, at=node)
    return total, False


def _four_axes(rewriter: Rewriter, mask: fx.Node, node: fx.Node) -> fx.Node:
    shape = fake(mask).shape
    if len(shape) == 4:
        return mask
    heads = [1] * (3 - len(shape)) + list(shape[-3:])
    return rewriter.call(aten.reshape.default, mask, [_leading(fake(mask)), *heads], at=node)


def _leading(mask: Tensor | None) -> int:
    """Return the number of masks before the axis of heads; 1 without a mask."""
    return 1 if mask is None else prod(mask.shape[:-3])
