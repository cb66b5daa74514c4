"""Constant masks of scaled_dot_product_attention, in the form that the fastest kernel takes."""

from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.masks import hides_nothing, is_causal
from nimblec.graph.rewriter import Rewriter, bound, called, fake, is_pure
from nimblec.graph.vocabulary import ATTENTION

ALIGNMENT = 16
"""Rows of a mask must begin at multiples of so many elements, or CUDA copies the mask at every call."""


def canonicalize_masks(module: fx.GraphModule) -> None:
    """Drop masks that hide nothing, replace causal ones by a flag, and other boolean ones by added ones.

    On CUDA, three kernels convert a boolean mask into an added one at each call. Masks are
    (..., queries, keys), broadcast to the scores; views of constants count as constants here.
    """
    rewriter = Rewriter(module)
    fixed = _of_constants(rewriter)
    known: dict[fx.Node, Tensor] = {}
    added: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in rewriter.calls(ATTENTION):
        given = bound(node)
        mask, queries, keys = given["attn_mask"], fake(given["query"]), fake(given["key"])
        if mask not in fixed or given["is_causal"]:
            continue
        if mask not in known:
            known[mask] = _without_repeats(_evaluate(rewriter, mask, {}))
        value = known[mask]
        if hides_nothing(value):
            _say(node, None, is_causal=False)
        elif is_causal(value, (queries.shape[-2], keys.shape[-2])) and _is_positive(given["scale"]):
            _say(node, None, is_causal=True)
        elif value.dtype == torch.bool and bool(value.any(-1).all()):
            if (mask, queries.dtype) not in added:
                added[mask, queries.dtype] = rewriter.constant(_added(value, queries.dtype), at=mask)
            _say(node, added[mask, queries.dtype], is_causal=False)
    rewriter.finish()


def _is_positive(scale: float | None) -> bool:
    """Return whether minus infinity stays so: kernels hide keys by the flag before they multiply by the scale."""
    return scale is None or scale > 0


def _of_constants(rewriter: Rewriter) -> set[fx.Node]:
    """Return constants, and calls on constants, which may be too large to fold."""
    found: set[fx.Node] = set()
    for node in rewriter.graph.nodes:
        is_call = node.op == "call_function" and is_pure(node)
        if found.issuperset(node.all_input_nodes) if is_call else rewriter.value(node) is not None:
            found.add(node)
    return found


def _evaluate(rewriter: Rewriter, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node.op != "call_function":
        return rewriter.value(node)
    for source in node.all_input_nodes:
        if source not in known:
            known[source] = _evaluate(rewriter, source, known)
    return called(node, known.__getitem__)


def _without_repeats(value: Tensor) -> Tensor:
    """Return a mask with length 1 for axes along which it repeats, except for the last two."""
    for axis in range(value.dim() - 2):
        first = value.narrow(axis, 0, min(value.shape[axis], 1))
        if value.stride(axis) == 0 or torch.equal(first.expand_as(value), value):
            value = first
    return value


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zero where a boolean mask is True, minus infinity elsewhere; rows begin at aligned places."""
    *rows, keys = mask.shape
    padded = torch.zeros((*rows, -(-keys // ALIGNMENT) * ALIGNMENT), dtype=dtype, device=mask.device)
    return padded[..., :keys].masked_fill_(mask.logical_not(), -torch.inf)


def _say(node: fx.Node, mask: fx.Node | None, *, is_causal: bool) -> None:
    given = bound(node)
    names = ("query", "key", "value")
    node.args = (*(given[name] for name in names), mask, given["dropout_p"], is_causal)
    node.kwargs = {name: given[name] for name in ("scale", "enable_gqa") if name in node.kwargs}
