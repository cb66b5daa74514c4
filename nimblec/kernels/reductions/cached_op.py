"""One query's attention to a cache as a torch op, which writes the new key and value into the cache.

`nimblec.kernels.launch` says what an op is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.reductions.attention_op import attended
from nimblec.kernels.reductions.attention_shapes import attention_shape
from nimblec.kernels.reductions.attention_tilings import padded
from nimblec.kernels.shapes import next_power_of_2

_STEP_NBYTES = 65_536
"""The most keys and values that a block reads in one step: half of its threads' registers."""
_LOOP_NBYTES = 32_768
"""The same where there are several steps, two of which are in shared memory."""
_THREAD_NBYTES = 256
"""Keys and values of a thread in one step."""


def cached_tiling(keys: int, size: int, value_size: int, itemsize: int) -> list[int]:
    """Return how many keys a block reads in a step, its warps, and its stages."""
    row_nbytes = (padded(size) + padded(value_size)) * itemsize
    block_n, num_stages = max(16, next_power_of_2(keys)), 1
    if block_n * row_nbytes > _STEP_NBYTES:
        block_n, num_stages = max(16, _LOOP_NBYTES // row_nbytes), 2
    return [block_n, min(8, max(1, block_n * row_nbytes // (32 * _THREAD_NBYTES))), num_stages]


def _cached_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    position: Tensor,
    mask: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    tiling: Sequence[int],
    trigger: str,
) -> Prepared[Tensor]:
    shape = attention_shape(query, keys, values, mask, causal=False)
    out = query.new_empty((shape.batch, 1, shape.heads, shape.value_size))
    block_n, num_warps, num_stages = tiling
    angles = (shape.batch, 1, 1, shape.size)
    strides = {
        "QUERY": shape.query_strides,
        "KEY": shape.key_strides,
        "VALUE": shape.value_strides,
        "NEW_KEY": new_key.stride(),
        "NEW_VALUE": new_value.stride(),
        "MASK": shape.mask_strides or (0, 0, 0, 0),
        "COS": (0, 0, 0, 0) if cos is None else cos.expand(angles).stride(),
        "SIN": (0, 0, 0, 0) if sin is None else sin.expand(angles).stride(),
    }
    launch = Launch(
        template="nimblec.kernels.reductions.cached_template:cached_attention",
        blocks=shape.batch * shape.heads,
        pointers={
            "query_ptr": query,
            "keys_ptr": keys,
            "values_ptr": values,
            "new_key_ptr": new_key,
            "new_value_ptr": new_value,
            "position_ptr": position,
            "mask_ptr": mask,
            "cos_ptr": cos,
            "sin_ptr": sin,
            "out_ptr": out,
        },
        settings={
            "HEADS": shape.heads,
            "GROUP": shape.heads // shape.key_heads,
            "KEYS": shape.keys,
            "SIZE": shape.size,
            "VALUE_SIZE": shape.value_size,
            **{f"{name}_BATCH": batch for name, (batch, *_) in strides.items()},
            **{f"{name}_COLUMN": column for name, (*_, column) in strides.items()},
            **{f"{name}_HEAD": head for name, (_, head, *_) in strides.items() if name not in ("COS", "SIN")},
            **{f"{name}_ROW": strides[name][2] for name in ("KEY", "VALUE")},
            "POSITION_BATCH": position.stride(0) if position.shape[0] > 1 else 0,
            "SCALE": scale,
            "BLOCK_N": block_n,
            "BLOCK_D": padded(shape.size),
            "BLOCK_V": padded(shape.value_size),
            "STAGES": num_stages,
            "num_warps": num_warps,
            "num_stages": num_stages,
            # The position is checked, and nothing else.
            "debug": True,
            "sanitize_overflow": False,
        },
        trigger=trigger,
    )
    return Prepared(out, launch)


def _cached_attention_on_cpu(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    position: Tensor,
    mask: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    *_how: object,
) -> Tensor:
    if cos is not None and sin is not None:
        query, new_key = rotated(query, cos, sin), rotated(new_key, cos, sin)
    rows = position.reshape(position.shape[0], -1)[:, 0, None, None, None]
    for kept, new in ((keys, new_key), (values, new_value)):
        kept.scatter_(2, rows.expand(new.shape), new)
    found = attended(query, keys, values, mask, causal=False, scale=scale)
    return found.transpose(1, 2).to(query.dtype).contiguous()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x (batch, heads, rows, size), rounded once."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos.float() + torch.cat((-second, first), -1) * sin.float()).to(x.dtype)


cached_attention = define_op(
    "cached_attention(Tensor query, Tensor(a!) keys, Tensor(b!) values, Tensor new_key, Tensor new_value, "
    "Tensor position, Tensor? mask, Tensor? cos, Tensor? sin, float scale, int[] tiling, str trigger) -> Tensor",
    prepare=_cached_attention,
    reference=_cached_attention_on_cpu,
)
