# ruff: noqa: ANN001, ANN201, ANN202 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
# ruff: noqa: PLR0915, SIM108 - one kernel; branches are taken while it is compiled
"""The Triton kernel of attention for short sequences: softmax(queries keys^T scale + mask) values.

A block computes some queries of one head and walks over the keys with a running maximum and sum (Dao et al.,
FlashAttention, 2022), or in one step with a plain softmax. Queries, keys and values are read through any strides. All
that a block reads, except the factor, may come from the kernel before, so it waits first (`nimblec.kernels.device`).
"""

import triton
import triton.language as tl

from nimblec.kernels.device import store, wait


@triton.jit
def attention(
    query_ptr,
    key_ptr,
    value_ptr,
    mask_ptr,
    out_factor_ptr,
    out_ptr,
    OUT_BATCH: tl.constexpr,
    OUT_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    QUERY_BATCH: tl.constexpr,
    QUERY_HEAD: tl.constexpr,
    QUERY_ROW: tl.constexpr,
    QUERY_COLUMN: tl.constexpr,
    KEY_BATCH: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    KEY_ROW: tl.constexpr,
    KEY_COLUMN: tl.constexpr,
    VALUE_BATCH: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    VALUE_COLUMN: tl.constexpr,
    MASK_BATCH: tl.constexpr,
    MASK_HEAD: tl.constexpr,
    MASK_ROW: tl.constexpr,
    MASK_COLUMN: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Attend with query (batch, heads, queries, size); write out (batch, queries, heads, value size).

    Key and value have a head for each ``GROUP`` heads of the query. A mask of bits says which keys are
    read, any other is added to the scores; ``CAUSAL`` leaves each query the keys up to its own number.
    Where all keys of a query are hidden its result is zero.
    """
    TILES: tl.constexpr = (QUERIES + BLOCK_M - 1) // BLOCK_M
    STEPS: tl.constexpr = (KEYS + BLOCK_N - 1) // BLOCK_N
    LOG2E: tl.constexpr = 1.4426950408889634
    PRECISION: tl.constexpr = "tf32x3" if query_ptr.dtype.element_ty == tl.float32 else "tf32"

    block = tl.program_id(0)
    tile = block % TILES
    head = block // TILES % HEADS
    batch = block // (TILES * HEADS)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    within = tl.arange(0, BLOCK_N)
    deep = tl.arange(0, BLOCK_D)
    across = tl.arange(0, BLOCK_V)
    query_offsets = rows[:, None] * QUERY_ROW + deep[None, :] * QUERY_COLUMN
    key_offsets = within[:, None] * KEY_ROW + deep[None, :] * KEY_COLUMN
    value_offsets = within[:, None] * VALUE_ROW + across[None, :] * VALUE_COLUMN
    query_ptr += batch * QUERY_BATCH + head * QUERY_HEAD
    key_ptr += batch * KEY_BATCH + head // GROUP * KEY_HEAD
    value_ptr += batch * VALUE_BATCH + head // GROUP * VALUE_HEAD
    is_row = (rows < QUERIES)[:, None]
    out_factor = None if out_factor_ptr is None else tl.load(out_factor_ptr)
    wait(TRIGGER)

    queries = _load(query_ptr + query_offsets, is_row, (deep < SIZE)[None, :], QUERIES % BLOCK_M, SIZE % BLOCK_D)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    end = STEPS
    if CAUSAL and STEPS > 1:
        end = tl.minimum(STEPS, (tile * BLOCK_M + BLOCK_M - 1) // BLOCK_N + 1)
    for step in tl.range(0, end, num_stages=STAGES):
        columns = step * BLOCK_N + within
        is_column = columns < KEYS
        # Both are on their way before the first product.
        keys = _load(
            key_ptr + step * (BLOCK_N * KEY_ROW) + key_offsets,
            is_column[:, None],
            (deep < SIZE)[None, :],
            KEYS % BLOCK_N,
            SIZE % BLOCK_D,
        )
        values = _load(
            value_ptr + step * (BLOCK_N * VALUE_ROW) + value_offsets,
            is_column[:, None],
            (across < VALUE_SIZE)[None, :],
            KEYS % BLOCK_N,
            VALUE_SIZE % BLOCK_V,
        )
        scores = tl.dot(queries, keys.T, input_precision=PRECISION) * SCALE
        if mask_ptr is not None:
            mask_offsets = batch * MASK_BATCH + head * MASK_HEAD + rows[:, None] * MASK_ROW
            mask_ptrs = mask_ptr + mask_offsets + columns[None, :] * MASK_COLUMN
            mask = tl.load(mask_ptrs, mask=is_row & is_column[None, :], other=0)
            if mask_ptr.dtype.element_ty == tl.int1:
                scores = tl.where(mask, scores, float("-inf"))
            else:
                scores += mask.to(tl.float32)
        if KEYS % BLOCK_N:
            scores = tl.where(is_column[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(columns[None, :] <= rows[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A step or a row without any key would subtract infinities.
        if mask_ptr is not None:
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            shift = higher
        weights = tl.exp2((scores - shift[:, None]) * LOG2E)
        if STEPS > 1:
            less = tl.exp2((highest - shift) * LOG2E)
            total *= less
            mixed *= less[:, None]
        highest = higher
        total += tl.sum(weights, 1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)

    if mask_ptr is not None:
        total = tl.where(total == 0.0, 1.0, total)
    out_offsets = batch * OUT_BATCH + rows[:, None] * OUT_ROW + head * VALUE_SIZE + across[None, :]
    is_out = is_row & (across < VALUE_SIZE)[None, :]
    store(out_ptr + out_offsets, mixed / total[:, None], is_out, out_factor)


@triton.jit
def _load(pointers, is_row, is_column, ROWS_LEFT: tl.constexpr, COLUMNS_LEFT: tl.constexpr):
    """Load a tile with zeros past the edges, if it has any."""
    if ROWS_LEFT and COLUMNS_LEFT:
        tile = tl.load(pointers, mask=is_row & is_column, other=0.0)
    elif ROWS_LEFT:
        tile = tl.load(pointers, mask=is_row, other=0.0)
    elif COLUMNS_LEFT:
        tile = tl.load(pointers, mask=is_column, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile
