"""Attention and rotary position embeddings, of ONNX and of ONNX Runtime (com.microsoft)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from nimblec.onnx_ops.table import MICROSOFT, Declined, Ints, Node, Refused, op

ORT_MASK_VALUE = -10000.0
"""ONNX Runtime adds this to the score of a masked key, unless ``mask_filter_value`` says otherwise."""


def split_heads(x: Tensor, heads: int | None) -> Tensor:
    """Return (batch, tokens, hidden) as (batch, heads, tokens, head size); four dimensions stay."""
    if x.dim() == 4:
        return x
    if x.dim() != 3 or not heads or x.shape[2] % heads:
        raise Refused(f"an input of shape {tuple(x.shape)} does not make {heads} heads")
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Return (batch, heads, tokens, head size) as (batch, tokens, hidden)."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def causal_allowed(queries: int, keys: int, offset: int) -> Tensor:
    """Return which key (column) each query (row) may attend to, when ``offset`` keys come before."""
    return torch.arange(keys).unsqueeze(0) <= torch.arange(queries).unsqueeze(1) + offset


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool) -> Tensor:
    """Call the fused attention; ``mask`` is boolean (True attends) or added to the scores."""
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, **({"enable_gqa": True} if grouped else {})
    )


@op("Attention", since=23, inputs=6)
@op("Attention", since=24)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    node: Node,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    plain = not softcap and softmax_precision in (None, 1) and nonpad_kv_seqlen is None
    if not plain or node.wants(3) or left_window_size != -1 or right_window_size != -1 or q.dtype != v.dtype:
        raise Declined
    query, key, value = split_heads(q, q_num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    if past_key is not None and past_value is not None:
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    offset = 0 if past_key is None else past_key.shape[2]
    causal = bool(is_causal)
    mask = attn_mask
    if mask is not None or offset:
        mask = _known_mask(mask, query.shape[2], key.shape[2], offset, causal=causal)
        causal = False
    y = scaled_attention(query, key, value, mask, scale, causal)
    return (join_heads(y) if q.dim() == 3 else y), key, value


def _known_mask(mask: Tensor | None, queries: int, keys: int, offset: int, *, causal: bool) -> Tensor | None:
    """Compose a mask known at import with causality; decline others, and rows that attend to nothing.

    ONNX gives such rows a result of zero; that of fused kernels is undefined.
    """
    if isinstance(mask, FakeTensor) or (mask is not None and mask.shape[-1] != keys):
        raise Declined
    allowed = causal_allowed(queries, keys, offset) if causal else torch.ones(queries, keys, dtype=torch.bool)
    if mask is None:
        composed = allowed
    elif mask.dtype == torch.bool:
        composed = allowed & mask
    else:
        composed = torch.where(allowed, mask, torch.full((), float("-inf"), dtype=mask.dtype))
    attends = composed if composed.dtype == torch.bool else composed > float("-inf")
    if not bool(attends.any(-1).all()):
        raise Declined
    return None if composed.dtype == torch.bool and bool(composed.all()) else composed


@op("RotaryEmbedding", since=23)
def rotary_embedding(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    heads = num_heads if x.dim() == 3 else x.shape[1]
    if not heads or (x.dim() == 3 and x.shape[2] % heads):
        raise Refused(f"an input of shape {tuple(x.shape)} does not make {num_heads} heads")
    if position_ids is not None:
        cos_cache = functional.embedding(position_ids.to(torch.int64), cos_cache)
        sin_cache = functional.embedding(position_ids.to(torch.int64), sin_cache)
    head_axis = 1 if x.dim() == 4 else 2
    apart = x if x.dim() == 4 else x.reshape(x.shape[0], x.shape[1], heads, -1)
    half = (rotary_embedding_dim or apart.shape[3]) // 2
    cos, sin = cos_cache.narrow(-1, 0, half).unsqueeze(head_axis), sin_cache.narrow(-1, 0, half).unsqueeze(head_axis)
    return _rotated(apart, cos, sin, half, interleaved=bool(interleaved)).reshape(x.shape)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, half: int, *, interleaved: bool) -> Tensor:
    """Rotate pairs of the first ``2 * half`` elements of each head: neighbours, or one of each half."""
    turned, kept = x.split((2 * half, x.shape[-1] - 2 * half), -1)
    if interleaved:
        first, second = turned.reshape(*turned.shape[:-1], half, 2).unbind(-1)
    else:
        first, second = turned.split(half, -1)
    parts = (first * cos - second * sin, first * sin + second * cos)
    result = torch.stack(parts, -1).reshape(turned.shape) if interleaved else torch.cat(parts, -1)
    return result if kept.shape[-1] == 0 else torch.cat([result, kept], -1)


@op("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding_microsoft(
    x: Tensor,
    position_ids: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    if is_packed_batching or scale != 1.0:
        raise Refused(f"is_packed_batching {is_packed_batching} and scale {scale}; expected 0 and 1")
    width = 2 * cos_cache.shape[1]
    heads = num_heads
    if x.dim() == 3 and not heads:
        if rotary_embedding_dim:
            raise Refused("attribute 'rotary_embedding_dim' needs 'num_heads'")
        heads = x.shape[2] // width
    if position_ids.dim() == 1:
        tokens = x.shape[2] if x.dim() == 4 else x.shape[1]
        position_ids = (position_ids + torch.arange(tokens)).unsqueeze(0).expand(x.shape[0], tokens)
    return rotary_embedding(
        x,
        cos_cache,
        sin_cache,
        position_ids,
        interleaved=interleaved,
        num_heads=heads or None,
        rotary_embedding_dim=rotary_embedding_dim,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """The masking of keys in com.microsoft attention: ``value`` is added to their scores."""

    mask: Tensor | None
    bias: Tensor | None
    unidirectional: bool
    value: float

    def added(self, q: Tensor, keys: int, offset: int) -> Tensor | None:
        """Return what to add to the scores of ``q`` (batch, heads, queries, size)."""
        total = self.bias
        if self.mask is not None:
            hidden = (self._kept(q.shape[0], keys) == 0).to(q.dtype) * self.value
            total = hidden if total is None else total + hidden
        if self.unidirectional:
            lowest = torch.full((), torch.finfo(q.dtype).min, dtype=q.dtype)
            allowed = causal_allowed(q.shape[2], keys, offset)
            causal = torch.where(allowed, torch.zeros((), dtype=q.dtype), lowest)
            # A minimum, not a sum, which could overflow to minus infinity.
            total = causal if total is None else torch.where(allowed, total, lowest)
        return total

    def _kept(self, batch: int, keys: int) -> Tensor:
        """Return the mask as 0 for hidden keys: (batch, 1, 1 or queries, keys)."""
        assert self.mask is not None
        if self.mask.dim() == 1 and self.mask.shape[0] == batch:
            return (torch.arange(keys) < self.mask.unsqueeze(1)).unsqueeze(1).unsqueeze(1)
        if self.mask.dim() == 1 and self.mask.shape[0] == 2 * batch:
            ends, starts = self.mask.reshape(2, batch, 1, 1, 1).unbind(0)
            return (torch.arange(keys) < ends) & (torch.arange(keys) >= starts)
        if self.mask.dim() == 2 and self.mask.shape[1] == keys:
            return self.mask.unsqueeze(1).unsqueeze(1)
        if self.mask.dim() == 3 and self.mask.shape[2] == keys:
            return self.mask.unsqueeze(1)
        raise Refused(f"a mask of shape {tuple(self.mask.shape)} for {keys} keys is not supported")


def _attend(q: Tensor, k: Tensor, v: Tensor, masking: Masking, offset: int, scale: float | None) -> Tensor:
    if masking.unidirectional and masking.mask is None and masking.bias is None and not offset:
        return join_heads(scaled_attention(q, k, v, None, scale, causal=True))
    return join_heads(scaled_attention(q, k, v, masking.added(q, k.shape[2], offset), scale, causal=False))


@op("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    mask_filter_value: float = ORT_MASK_VALUE,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _projections(query, key, value, bias, num_heads)
    offset = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    masking = Masking(
        mask=key_padding_mask, bias=attention_bias, unidirectional=bool(unidirectional), value=mask_filter_value
    )
    return _attend(q, k, v, masking, offset, scale or None), k, v


def _projections(
    query: Tensor, key: Tensor | None, value: Tensor | None, bias: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values by head, with the bias of their projections."""
    if key is None:
        if query.dim() != 5 or bias is not None:
            raise Refused(f"a query of shape {tuple(query.shape)} without a key; expected five dimensions and no bias")
        q, k, v = query.permute(3, 0, 2, 1, 4).unbind(0)
        return q, k, v
    if value is None:
        if key.dim() != 5 or bias is not None:
            raise Refused(f"a key of shape {tuple(key.shape)} without a value; expected five dimensions and no bias")
        k, v = key.permute(3, 0, 2, 1, 4).unbind(0)
        return split_heads(query, heads), k, v
    if bias is not None:
        hidden, width = query.shape[-1], key.shape[-1] if key.dim() == 3 else query.shape[-1]
        q_bias, k_bias, v_bias = bias.split((hidden, width, bias.shape[0] - hidden - width))
        query = query + q_bias
        if key.dim() == 3 and value.dim() == 3:
            key, value = key + k_bias, value + v_bias
    return split_heads(query, heads), split_heads(key, heads), split_heads(value, heads)


@op("Attention", domain=MICROSOFT)
def attention_microsoft(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask_index: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = ORT_MASK_VALUE,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Ints | None = None,
    rotary_embedding_dim: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[Tensor, Tensor | None]:
    if do_rotary or past_present_share_buffer:
        raise Refused(f"do_rotary {do_rotary} and past_present_share_buffer {past_present_share_buffer}; expected 0")
    batch, tokens, width = x.shape
    rows = x.reshape(batch * tokens, width)
    projected = torch.mm(rows, weights) if bias is None else torch.addmm(bias, rows, weights)
    sizes = qkv_hidden_sizes or (weights.shape[1] // 3,) * 3
    parts = projected.reshape(batch, tokens, -1).split(sizes, -1)
    q, k, v = (split_heads(part, num_heads) for part in parts)
    offset = 0
    if past is not None:
        offset = past.shape[3]
        k, v = torch.cat([past.select(0, 0), k], 2), torch.cat([past.select(0, 1), v], 2)
    masking = Masking(
        mask=mask_index, bias=attention_bias, unidirectional=bool(unidirectional), value=mask_filter_value
    )
    present = torch.stack([k, v]) if k.shape == v.shape else None
    return _attend(q, k, v, masking, offset, scale or None), present
