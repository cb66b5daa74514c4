# ruff: noqa: ANN001, ANN201, ANN202 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
# ruff: noqa: PLR0915 - one kernel; branches are taken while it is compiled
"""The Triton kernel of one query's attention to a cache of keys and values, which gets the new key and value.

A block computes one head of one sequence, without tensor cores: they would multiply 15 rows of nothing. The block
rotates the query and the new key (Su et al., RoFormer, 2021), and attends to the new rows in registers: whether another
block has stored them in the cache by then does not matter. No other kernel of a run touches the cache, so a block that
reads it in one step does so before the wait for the kernel before (`nimblec.kernels.device`).
"""

import triton
import triton.language as tl

from nimblec.kernels.device import wait


@triton.jit
def cached_attention(
    query_ptr,
    keys_ptr,
    values_ptr,
    new_key_ptr,
    new_value_ptr,
    position_ptr,
    mask_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    QUERY_BATCH: tl.constexpr,
    QUERY_HEAD: tl.constexpr,
    QUERY_COLUMN: tl.constexpr,
    KEY_BATCH: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    KEY_ROW: tl.constexpr,
    KEY_COLUMN: tl.constexpr,
    VALUE_BATCH: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    VALUE_COLUMN: tl.constexpr,
    NEW_KEY_BATCH: tl.constexpr,
    NEW_KEY_HEAD: tl.constexpr,
    NEW_KEY_COLUMN: tl.constexpr,
    NEW_VALUE_BATCH: tl.constexpr,
    NEW_VALUE_HEAD: tl.constexpr,
    NEW_VALUE_COLUMN: tl.constexpr,
    POSITION_BATCH: tl.constexpr,
    MASK_BATCH: tl.constexpr,
    MASK_HEAD: tl.constexpr,
    MASK_COLUMN: tl.constexpr,
    COS_BATCH: tl.constexpr,
    COS_COLUMN: tl.constexpr,
    SIN_BATCH: tl.constexpr,
    SIN_COLUMN: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Store new key and value (batch, key heads, 1, size) at their position; attend with query (batch, heads, 1, size).

    Writes out (batch, 1, heads, value size) without gaps. Keys and values have a head for each ``GROUP`` heads of the
    query. A mask of bits says which keys are read, any other is added to the scores. With cosines and sines (batch,
    size), query and new key are rotated by them.
    """
    STEPS: tl.constexpr = (KEYS + BLOCK_N - 1) // BLOCK_N
    LOG2E: tl.constexpr = 1.4426950408889634
    dtype: tl.constexpr = keys_ptr.dtype.element_ty

    head = tl.program_id(0) % HEADS
    batch = tl.program_id(0) // HEADS
    within = tl.arange(0, BLOCK_N)
    deep = tl.arange(0, BLOCK_D)
    across = tl.arange(0, BLOCK_V)
    is_deep = deep < SIZE
    is_across = across < VALUE_SIZE
    keys_ptr += batch * KEY_BATCH + head // GROUP * KEY_HEAD
    values_ptr += batch * VALUE_BATCH + head // GROUP * VALUE_HEAD
    key_ptrs = keys_ptr + within[:, None] * KEY_ROW + deep[None, :] * KEY_COLUMN
    value_ptrs = values_ptr + within[:, None] * VALUE_ROW + across[None, :] * VALUE_COLUMN
    if STEPS == 1:
        is_key = (within < KEYS)[:, None]
        keys = tl.load(key_ptrs, mask=is_key & is_deep[None, :], other=0.0)
        values = tl.load(value_ptrs, mask=is_key & is_across[None, :], other=0.0)
    wait(TRIGGER)

    position = tl.load(position_ptr + batch * POSITION_BATCH)
    tl.device_assert((position >= 0) & (position < KEYS), "the position of a key is outside of the cache")
    cos_ptr = cos_ptr if cos_ptr is None else cos_ptr + batch * COS_BATCH
    sin_ptr = sin_ptr if sin_ptr is None else sin_ptr + batch * SIN_BATCH
    query_ptr += batch * QUERY_BATCH + head * QUERY_HEAD
    query = _rotated(query_ptr, QUERY_COLUMN, cos_ptr, COS_COLUMN, sin_ptr, SIN_COLUMN, deep, SIZE).to(tl.float32)
    new_key_ptr += batch * NEW_KEY_BATCH + head // GROUP * NEW_KEY_HEAD
    new_key = _rotated(new_key_ptr, NEW_KEY_COLUMN, cos_ptr, COS_COLUMN, sin_ptr, SIN_COLUMN, deep, SIZE)
    new_value_ptr += batch * NEW_VALUE_BATCH + head // GROUP * NEW_VALUE_HEAD
    new_value = tl.load(new_value_ptr + across * NEW_VALUE_COLUMN, mask=is_across, other=0.0)
    if head % GROUP == 0:
        tl.store(keys_ptr + position * KEY_ROW + deep * KEY_COLUMN, new_key, mask=is_deep)
        tl.store(values_ptr + position * VALUE_ROW + across * VALUE_COLUMN, new_value, mask=is_across)

    highest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((BLOCK_V,), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        columns = step * BLOCK_N + within
        is_column = columns < KEYS
        if STEPS > 1:
            is_key = is_column[:, None]
            keys = tl.load(key_ptrs + step * (BLOCK_N * KEY_ROW), mask=is_key & is_deep[None, :], other=0.0)
            values = tl.load(value_ptrs + step * (BLOCK_N * VALUE_ROW), mask=is_key & is_across[None, :], other=0.0)
        is_new = (columns == position)[:, None]
        scores = tl.sum(tl.where(is_new, new_key[None, :], keys).to(tl.float32) * query[None, :], 1) * SCALE
        if mask_ptr is not None:
            mask_ptrs = mask_ptr + batch * MASK_BATCH + head * MASK_HEAD + columns * MASK_COLUMN
            mask = tl.load(mask_ptrs, mask=is_column, other=0)
            if mask_ptr.dtype.element_ty == tl.int1:
                scores = tl.where(mask, scores, float("-inf"))
            else:
                scores += mask.to(tl.float32)
        if KEYS % BLOCK_N:
            scores = tl.where(is_column, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 0))
        # A step without any key would subtract infinities.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2((scores - shift) * LOG2E)
        less = tl.exp2((highest - shift) * LOG2E)
        highest = higher
        total = total * less + tl.sum(weights, 0)
        chosen = tl.where(is_new, new_value[None, :], values).to(tl.float32)
        mixed = mixed * less + tl.sum(weights[:, None] * chosen, 0)

    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + tl.program_id(0) * VALUE_SIZE + across, (mixed / total).to(dtype), mask=is_across)


@triton.jit
def _rotated(
    x_ptr,
    X_COLUMN: tl.constexpr,
    cos_ptr,
    COS_COLUMN: tl.constexpr,
    sin_ptr,
    SIN_COLUMN: tl.constexpr,
    deep,
    SIZE: tl.constexpr,
):
    """Load a row, rotated if there are cosines: pairs are from both halves of the row."""
    exists = deep < SIZE
    x = tl.load(x_ptr + deep * X_COLUMN, mask=exists, other=0.0)
    if cos_ptr is not None:
        is_first = deep < SIZE // 2
        partner = tl.where(is_first, deep + SIZE // 2, deep - SIZE // 2)
        other = tl.load(x_ptr + partner * X_COLUMN, mask=exists, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + deep * COS_COLUMN, mask=exists, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + deep * SIN_COLUMN, mask=exists, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + tl.where(is_first, -other, other) * sin).to(x.dtype)
    return x
