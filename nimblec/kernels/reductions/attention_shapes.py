"""The geometry of an attention."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Strides = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Queries (batch, heads, queries, size), keys (batch, key heads, keys, size), values (.., keys, value size).

    Strides are in elements; those of the mask broadcast it to (batch, heads, queries, keys), None without one.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    query_strides: Strides
    key_strides: Strides
    value_strides: Strides
    mask_strides: Strides | None
    causal: bool

    @property
    def read_keys(self) -> int:
        """Keys that some query reads."""
        return min(self.keys, self.queries) if self.causal else self.keys

    @property
    def result_order(self) -> tuple[int, ...]:
        """The order in memory of results' axes (batch, queries, heads, value size): batch second as in queries."""
        batch, _, row, _ = self.query_strides
        return (1, 0, 2, 3) if 0 < batch < row else (0, 1, 2, 3)

    @property
    def spans(self) -> tuple[int, ...]:
        """The elements that queries, keys, values, results and mask each span in memory."""
        rows = (self.batch, self.heads, self.queries)
        columns = (self.batch, self.key_heads, self.keys)
        return (
            _span((*rows, self.size), self.query_strides),
            _span((*columns, self.size), self.key_strides),
            _span((*columns, self.value_size), self.value_strides),
            self.batch * self.heads * self.queries * self.value_size,
            _span((*rows, self.keys), self.mask_strides or (0, 0, 0, 0)),
        )


def attention_shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool) -> Attention:
    """Return the geometry of tensors with four axes; the mask's axes, at most four, broadcast to the scores."""
    batch, heads, queries, size = query.shape
    _, key_heads, keys, value_size = value.shape
    return Attention(
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        queries=queries,
        keys=keys,
        size=size,
        value_size=value_size,
        query_strides=_strides(query),
        key_strides=_strides(key),
        value_strides=_strides(value),
        mask_strides=None if mask is None else _strides(mask.expand(batch, heads, queries, keys)),
        causal=causal,
    )


def _strides(x: Tensor) -> Strides:
    """Return the strides, zero for axes of length 1, where they do not matter."""
    a, b, c, d = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return a, b, c, d


def _span(sizes: Sequence[int], strides: Strides) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
