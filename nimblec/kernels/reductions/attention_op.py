"""Attention for short sequences as a torch op: one launch, which reads and writes its neighbours' layouts.

`nimblec.kernels.launch` says what an op is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.products.fp8 import to_bytes
from nimblec.kernels.reductions.attention_shapes import Strides, attention_shape
from nimblec.kernels.reductions.attention_tilings import AttentionTiling, padded


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    tiling: Sequence[int],
    trigger: str,
    out_factor: Tensor | None = None,
) -> Prepared[Tensor]:
    """Return the attention (batch, queries, heads, value size), without gaps; with ``out_factor`` in bytes of e4m3."""
    shape, tile = attention_shape(query, key, value, mask, causal=causal), AttentionTiling.of(tiling)
    dtype = query.dtype if out_factor is None else torch.uint8
    sizes = shape.batch, shape.queries, shape.heads, shape.value_size
    out = torch.empty_permuted(sizes, shape.result_order, dtype=dtype, device=query.device)
    launch = Launch(
        template="nimblec.kernels.reductions.attention_template:attention",
        blocks=tile.blocks(shape),
        pointers={
            "query_ptr": query,
            "key_ptr": key,
            "value_ptr": value,
            "mask_ptr": mask,
            "out_factor_ptr": out_factor,
            "out_ptr": out,
        },
        settings={
            "OUT_BATCH": out.stride(0),
            "OUT_ROW": out.stride(1),
            "HEADS": shape.heads,
            "GROUP": shape.heads // shape.key_heads,
            "QUERIES": shape.queries,
            "KEYS": shape.keys,
            "SIZE": shape.size,
            "VALUE_SIZE": shape.value_size,
            **_named("QUERY", shape.query_strides),
            **_named("KEY", shape.key_strides),
            **_named("VALUE", shape.value_strides),
            **_named("MASK", shape.mask_strides or (0, 0, 0, 0)),
            "CAUSAL": shape.causal,
            "SCALE": scale,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": padded(shape.size),
            "BLOCK_V": padded(shape.value_size),
            "STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        },
        trigger=trigger,
    )
    return Prepared(out, launch)


def _named(name: str, strides: Strides) -> dict[str, int]:
    return dict(zip((f"{name}_{axis}" for axis in ("BATCH", "HEAD", "ROW", "COLUMN")), strides, strict=True))


def _attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    *_how: object,
    out_factor: Tensor | None = None,
) -> Tensor:
    out = attended(query, key, value, mask, causal=causal, scale=scale).transpose(1, 2)
    order = attention_shape(query, key, value, mask, causal=causal).result_order
    out = out.permute(order).contiguous().permute(order)
    return out.to(query.dtype) if out_factor is None else to_bytes(out, out_factor)


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    """Return the kernel's result in float32: (batch, heads, queries, value size)."""
    added = mask if mask is None or mask.dtype == torch.bool else mask.float()
    return functional.scaled_dot_product_attention(
        query.float(),
        key.float(),
        value.float(),
        added,
        is_causal=causal,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


attention = define_op(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float scale, int[] tiling, "
    "str trigger, *, Tensor? out_factor=None) -> Tensor",
    prepare=_attention,
    reference=_attention_on_cpu,
)
