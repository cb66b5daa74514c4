# ruff: noqa: ANN001, ANN201 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
# ruff: noqa: C901, PLR0912, PLR0915 - one kernel; branches are taken while it is compiled
"""The Triton kernel of convolutions of 8 bit integers: an implicit matrix product with exact sums of 32 bits.

It divides the work as `nimblec.kernels.products.gemm_template` does. Tensor cores multiply int8 only, so uint8 loses
128 by the flip of its first bit. The bias holds what the zero point of x contributes to each sum.
"""

import triton
import triton.language as tl

from nimblec.kernels.device import add_parts, fetch_into_l2, leave_part, part_ptrs, wait

EXACT = tl.constexpr(12582912.0)
"""1.5 * 2**23: numbers of this size are whole, so adding it rounds a small number, to even."""


@triton.jit
def quantized_convolution(
    x_ptr,
    weight_ptr,
    factors_ptr,
    bias_ptr,
    residual_ptr,
    levels_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXEL_STRIDE: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_REQUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Convolve x (pixels, channels) with weight in tiles, and round the sums times factors (out channels,) to out.

    Levels are those of `nimblec.kernels.products.quantized_op.Levels`: padding reads the zero point of x if
    ``HAS_ZERO``, and the rounded numbers are rounded once more, with the residual, if ``IS_REQUANTIZED``.
    """
    TILES_M: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (OUT_CHANNELS + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (KERNEL_H * KERNEL_W * CHANNELS + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
    STEP_NBYTES: tl.constexpr = BLOCK_N * BLOCK_K
    IS_POINTWISE: tl.constexpr = KERNEL_H * KERNEL_W == 1 and PADDING_H + PADDING_W == 0
    block = tl.program_id(0)
    tile_m = block % TILES_M
    tile_n = (block // TILES_M) % TILES_N
    part = block // (TILES_M * TILES_N)
    begin = part * PART
    tile_weight_ptr = weight_ptr + tile_n * (STEPS * STEP_NBYTES)
    if TRIGGER != "none":
        # The blocks that read the same weights fetch a share each.
        SHARE: tl.constexpr = (PART * STEP_NBYTES + TILES_M * 128 - 1) // (TILES_M * 128) * 128
        first = tile_m * SHARE
        count = tl.minimum(tl.minimum(PART, STEPS - begin) * STEP_NBYTES - first, SHARE)
        if count > 0:
            fetch_into_l2((tile_weight_ptr + begin * STEP_NBYTES).to(tl.int64) + first, count)

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    deep = tl.arange(0, BLOCK_K)
    factors = tl.load(factors_ptr + columns, mask=columns < OUT_CHANNELS, other=0.0)
    bias = tl.load(bias_ptr + columns, mask=columns < OUT_CHANNELS, other=0)
    outside = tl.load(levels_ptr).to(tl.int32).to(x_ptr.dtype.element_ty) if HAS_ZERO else 0
    top = (rows // OUT_WIDTH) % OUT_HEIGHT * STRIDE_H - PADDING_H
    left = rows % OUT_WIDTH * STRIDE_W - PADDING_W
    corner = ((rows // (OUT_HEIGHT * OUT_WIDTH) * HEIGHT + top) * WIDTH + left) * PIXEL_STRIDE
    weight_offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_K + deep[None, :]

    wait(TRIGGER)
    exists = (rows < ROWS)[:, None] & (columns < OUT_CHANNELS)[None, :]
    out_offsets = rows[:, None] * OUT_CHANNELS + columns[None, :]
    # The load runs while the sum is computed.
    if residual_ptr is not None and SPLIT_K == 1:
        residual = tl.load(residual_ptr + out_offsets, mask=exists, other=0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for n in tl.range(0, PART, num_stages=STAGES):
        step = begin + n
        # Channels and taps past the end meet weights that are zero, so that any pixel may be read for them.
        if CHANNELS % BLOCK_K == 0:
            tap = step // (CHANNELS // BLOCK_K)
            channel = step % (CHANNELS // BLOCK_K) * BLOCK_K + deep
        else:
            k = step * BLOCK_K + deep
            tap = (k // CHANNELS)[None, :]
            channel = k % CHANNELS
        if IS_POINTWISE:
            tap = 0
        down = tap // KERNEL_W * DILATION_H
        across = tap % KERNEL_W * DILATION_W
        inside = (rows < ROWS)[:, None]
        if not IS_POINTWISE:
            y = top[:, None] + down
            x = left[:, None] + across
            inside = inside & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        offsets = corner[:, None] + (down * WIDTH + across) * PIXEL_STRIDE + channel[None, :]
        pixels = tl.load(x_ptr + offsets, mask=inside, other=outside)
        if x_ptr.dtype.element_ty == tl.uint8:
            pixels = (pixels ^ 128).to(tl.int8, bitcast=True)
        weight_ptrs = tile_weight_ptr + step * STEP_NBYTES + weight_offsets
        if PART * SPLIT_K > STEPS:  # the last part is shorter
            weights = tl.load(weight_ptrs, mask=(weight_offsets >= 0) & (step < STEPS), other=0)
        else:
            weights = tl.load(weight_ptrs)
        total = tl.dot(pixels, weights.T, total, out_dtype=tl.int32)

    is_last = True
    if SPLIT_K > 1:
        tile = tile_n * TILES_M + tile_m
        partial_ptrs = part_ptrs(total, partials_ptr, tile, SPLIT_K)
        is_last = leave_part(total, partial_ptrs, part, counters_ptr + tile, SPLIT_K)
    if is_last:
        if SPLIT_K > 1:
            total = add_parts(partial_ptrs, counters_ptr + tile, SPLIT_K)
        result = rounded((total + bias[None, :]).to(tl.float32) * factors[None, :], levels_ptr + 1)
        if IS_REQUANTIZED:
            result = (result - tl.load(levels_ptr + 1)) * tl.load(levels_ptr + 4)
            if residual_ptr is not None:
                if SPLIT_K > 1:
                    residual = tl.load(residual_ptr + out_offsets, mask=exists, other=0)
                result += (residual.to(tl.float32) - tl.load(levels_ptr + 5)) * tl.load(levels_ptr + 6)
            result = rounded(tl.div_rn(result, tl.zeros_like(result) + tl.load(levels_ptr + 7)), levels_ptr + 8)
        tl.store(out_ptr + out_offsets, result.to(tl.int32).to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def rounded(values, levels_ptr):
    """Round values, add the first of three levels, and limit the result to the other two, which are whole numbers."""
    zero, low, high = tl.load(levels_ptr), tl.load(levels_ptr + 1), tl.load(levels_ptr + 2)
    small = tl.minimum(tl.maximum(values, low - zero), high - zero)
    return (small + EXACT) - EXACT + zero
