"""Rotary embeddings before attention, which computes them as it reads (Su et al., RoFormer, 2021)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user, views
from nimblec.graph.vocabulary import DTYPES, is_like, uncast
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.attention_shapes import attention_shape
from nimblec.kernels.reductions.attention_tilings import AttentionTiling, padded

aten = torch.ops.aten

_MOST_ELEMENTS = 64
"""Elements of keys that a thread may rotate in a step: more, and their partners and angles, do not fit in registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rotation:
    """A rotary embedding of ``x``, whose pairs are from both halves of a head: ``x * cos + (-second, first) * sin``."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def rotate_in_attention(module: fx.GraphModule) -> None:
    """Have attention rotate queries and keys, where all blocks read few keys."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(attention):
        given = bound(node)
        query, key, cos, sin = unrotated(given["query"], given["key"])
        if cos is None or not _is_served(given, query, key):
            continue
        node.args = (query, key, *node.args[2:])
        node.kwargs = {**node.kwargs, "cos": cos, "sin": sin}
    rewriter.finish()


def _is_served(given: dict[str, Any], query: fx.Node, key: fx.Node) -> bool:
    """Return whether a block reads all keys in one step, and results stay where they are."""
    tiling = AttentionTiling.of(given["tiling"])
    before, after = (
        attention_shape(fake(q), fake(k), fake(given["value"]), None, causal=given["causal"])
        for q, k in ((given["query"], given["key"]), (query, key))
    )
    elements = tiling.block_n * padded(after.size) // (32 * tiling.num_warps)
    is_small = tiling.steps(after) == 1 and elements <= _MOST_ELEMENTS and max(after.spans) < 1 << 31
    return is_small and before.result_order == after.result_order


def unrotated(query: fx.Node, key: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, fx.Node | None]:
    """Return query and key before they were rotated, cosines and sines; None for these where both were not alike."""
    turned, new = _rotation(query), _rotation(key)
    if turned and new and (turned.cos, turned.sin) == (new.cos, new.sin):
        return turned.x, new.x, new.cos, new.sin
    return query, key, None, None


def _rotation(node: fx.Node) -> _Rotation | None:
    """Match a rotary embedding that is read once, by cosines and sines of each position that all heads share.

    It may be computed in float32 between two casts.
    """
    total = argument(node, 0) if is_call(node, aten._to_copy.default) else node
    if not is_call(total, aten.add.Tensor) or bound(total)["alpha"] != 1 or only_user(node) is None:
        return None
    for straight, turned in (total.args[:2], total.args[1::-1]):
        for wide, cos in _factors(straight):
            for joined, sin in _factors(turned):
                is_shared = _is_shared(cos, total) and fake(cos).shape == fake(sin).shape
                is_shared &= (fake(cos).dtype, fake(cos).stride()) == (fake(sin).dtype, fake(sin).stride())
                x = wide if total is node else uncast(wide)
                is_rotation = is_like(wide, total) and is_like(joined, total) and _is_turned(joined, wide)
                if is_rotation and is_shared and is_like(x, node):
                    return _Rotation(x=x, cos=cos, sin=sin)
    return None


def _factors(product: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the two factors of a product, in both orders."""
    if is_call(product, aten.mul.Tensor):
        first, second = product.args
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            yield first, second
            yield second, first


def _is_shared(angles: fx.Node, x: fx.Node) -> bool:
    """Return whether there are as many for x (batch, heads, rows, size) in each sequence, or in all."""
    value, (batch, _, *row) = fake(angles), fake(x).shape
    shape = [1] * (4 - value.dim()) + [*value.shape]
    return value.dtype in DTYPES and len(shape) == 4 and shape[0] in (1, batch) and shape[1:] == [1, *row]


def _is_turned(joined: fx.Node, x: fx.Node) -> bool:
    """Return whether a value is the second half of x, negated, and the first half after it."""
    if not is_call(joined, aten.cat.default) or bound(joined)["dim"] % 4 != 3 or len(argument(joined, 0)) != 2:
        return False
    second, first = argument(joined, 0)
    return is_call(second, aten.neg.default) and _is_half(first, x, 0) and _is_half(argument(second, 0), x, 1)


def _is_half(part: fx.Node, x: fx.Node, number: int) -> bool:
    """Return whether a view is the first half of x along the last axis, number 0, or the second."""
    if views(part) is not x:
        return False
    half, whole = fake(part), fake(x)
    begin = half.storage_offset() - whole.storage_offset()
    length = whole.shape[3] // 2
    return bool(
        whole.shape[3] % 2 == 0
        and half.shape == (*whole.shape[:3], length)
        and half.stride() == whole.stride()
        and begin == number * length * whole.stride(3)
    )
