"""Attention for short sequences as a torch op: one launch, which reads and writes its neighbours' layouts.

`nimblec.kernels.launch` says what an op is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.products.fp8 import to_bytes
from nimblec.kernels.reductions.attention_shapes import Attention, Strides, attention_shape
from nimblec.kernels.reductions.attention_tilings import AttentionTiling, padded


def attention_launch(
    shape: Attention,
    tiling: AttentionTiling,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    scale: float,
    trigger: str,
    out_factor: Tensor | None = None,
) -> Launch:
    """Return the launch that writes the attention to ``out`` (batch, queries, heads, value size), contiguous.

    With ``out_factor`` it writes bytes of e4m3.
    """
    return Launch(
        template="nimblec.kernels.reductions.attention_template:attention",
        blocks=tiling.blocks(shape),
        pointers={
            "query_ptr": query,
            "key_ptr": key,
            "value_ptr": value,
            "mask_ptr": mask,
            "out_factor_ptr": out_factor,
            "out_ptr": out,
        },
        settings={
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
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "BLOCK_D": padded(shape.size),
            "BLOCK_V": padded(shape.value_size),
            "STAGES": tiling.num_stages,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        },
        trigger=trigger,
    )


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
    batch, heads, queries, _ = query.shape
    dtype = query.dtype if out_factor is None else torch.uint8
    out = query.new_empty((batch, queries, heads, value.shape[-1]), dtype=dtype)
    launch = attention_launch(
        attention_shape(query, key, value, mask, causal=causal),
        AttentionTiling.of(tiling),
        query=query,
        key=key,
        value=value,
        mask=mask,
        out=out,
        scale=scale,
        trigger=trigger,
        out_factor=out_factor,
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
    out = attended(query, key, value, mask, causal=causal, scale=scale).transpose(1, 2).contiguous()
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
