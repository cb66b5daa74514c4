# ruff: noqa: ANN001, ANN201 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
# ruff: noqa: C901, PLR0912, PLR0915 - one kernel; branches are taken while it is compiled
"""The Triton kernel of convolutions and small matrix products: an implicit matrix product with a split sum.

Rows are output pixels, columns output channels; the sum runs over (kernel height, kernel width, channels). Blocks that
share a tile leave float32 sums in a workspace; the last block to arrive adds them in a fixed order, so that the result
does not depend on the order of arrival.

Tensor cores ignore the lower 13 bits of float32 (``PRECISION`` "tf32"). For all bits ("tf32x3") each factor is split in
two and three of the four products are added (Ootomo and Yokota, "Recovering single precision accuracy from Tensor
Cores", 2022).

A prologue, ``activation(x * scale + shift) * gate``, is applied to what is read; padding stays zero. ``GATED`` columns
are pairs: the first of a pair passes the activation and is multiplied by the second. The kernel that computes the rows
may also leave ``moments`` of each tile's part of a row, its sum and sum of squares, for a norm that is never
materialised: ``((x - mean) / deviation) w`` is ``(x w - mean * sum(w)) / deviation``.

If the weights are e4m3, what is read is rounded to e4m3 too. Each instruction of Hopper's tensor cores cuts off bits of
such sums, so the sums of each step are added in float32. Tiles of fewer than 64 rows are multiplied as float16 there,
which is exact.
"""

import triton
import triton.language as tl

from nimblec.kernels.device import activate, add_parts, fetch_into_l2, leave_part, part_ptrs, prepare, store, wait


@triton.jit
def convolution(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    scale_ptr,
    shift_ptr,
    gate_ptr,
    moments_ptr,
    sums_ptr,
    factors_ptr,
    out_factor_ptr,
    out_ptr,
    copy_ptr,
    out_moments_ptr,
    partials_ptr,
    counters_ptr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIXEL_STRIDE: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BEFORE: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Convolve x (pixels, channels) with weight in tiles; add bias (out channels,) and residual (rows, out channels).

    Pixels of x are ``PIXEL_STRIDE`` elements apart, rows of the residual ``RESIDUAL_STRIDE``, those of out
    ``OUT_STRIDE``; all else is dense. x has ``GROUPS`` times ``CHANNELS`` channels; the columns of a tile are of
    one group, and with several there is no prologue. The prologue has scale and shift (channels,) in float32, gate
    (images, channels). ``NORM`` is "none", "layer" or "rms", of rows whose moments are (parts, 2, rows) of equal
    parts of a row; sums (out channels,) are of each channel's weights. The moments of out, where they are asked
    for, are (tiles across, 2, rows). A ``GATED`` out has half the channels; its sum is not split, and it has no
    residual. The factors (1 + out channels,) of e4m3 are what pixels are multiplied by, a power of two, unless they
    are e4m3 already, and what the sums of each channel are. With an out factor (1,), the copy of out is e4m3;
    without a copy, out is.
    """
    TILES_M: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (OUT_CHANNELS + BLOCK_N - 1) // BLOCK_N
    DEPTH: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
    IS_POINTWISE: tl.constexpr = KERNEL_H * KERNEL_W == 1 and PADDING_H == 0 and PADDING_W == 0
    IS_WHOLE: tl.constexpr = CHANNELS % BLOCK_K == 0
    IS_FP8: tl.constexpr = factors_ptr is not None
    IS_ROUNDED: tl.constexpr = IS_FP8 and x_ptr.dtype.element_ty == tl.uint8
    IS_SCALED: tl.constexpr = scale_ptr is not None or shift_ptr is not None
    HAS_PROLOGUE: tl.constexpr = (IS_SCALED or gate_ptr is not None) or BEFORE != "none"

    block = tl.program_id(0)
    tile_m = block % TILES_M
    tile_n = (block // TILES_M) % TILES_N
    part = block // (TILES_M * TILES_N)
    begin = part * PART
    if IS_FP8:
        weight_ptr = weight_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        if IS_ROUNDED:
            x_ptr = x_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    tile_weight_ptr = weight_ptr + tile_n * (STEPS * BLOCK_N * BLOCK_K)

    if TRIGGER != "none":
        # The blocks that read the same weights fetch a share each.
        STEP_NBYTES: tl.constexpr = BLOCK_N * BLOCK_K * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        NBYTES: tl.constexpr = PART * STEP_NBYTES
        SHARE: tl.constexpr = (NBYTES + TILES_M * 128 - 1) // (TILES_M * 128) * 128
        first = tile_m * SHARE
        here = tl.minimum(PART, STEPS - begin)
        count = tl.minimum(here * STEP_NBYTES - first, SHARE)
        if count > 0:
            fetch_into_l2((tile_weight_ptr + begin * (BLOCK_N * BLOCK_K)).to(tl.int64) + first, count)

    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < OUT_CHANNELS, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros((BLOCK_N,), tl.float32)
    if IS_FP8:
        pixel_factor = tl.load(factors_ptr).to(tl.float16)
        factors = tl.load(factors_ptr + 1 + columns, mask=columns < OUT_CHANNELS, other=0.0)
    out_factor = None if out_factor_ptr is None else tl.load(out_factor_ptr)
    if NORM != "none":
        weight_sums = tl.load(sums_ptr + columns, mask=columns < OUT_CHANNELS, other=0.0)

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    image = rows // (OUT_HEIGHT * OUT_WIDTH)
    top = (rows // OUT_WIDTH) % OUT_HEIGHT * STRIDE_H - PADDING_H
    left = rows % OUT_WIDTH * STRIDE_W - PADDING_W
    corner = ((image * HEIGHT + top) * WIDTH + left) * PIXEL_STRIDE
    if GROUPS > 1:
        corner += tile_n // (TILES_N // GROUPS) * CHANNELS
    deep = tl.arange(0, BLOCK_K)
    weight_offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_K + deep[None, :]
    residual_offsets = rows[:, None] * RESIDUAL_STRIDE + columns[None, :]
    out_offsets = rows[:, None] * OUT_STRIDE + columns[None, :]
    exists = (rows < ROWS)[:, None] & (columns < OUT_CHANNELS)[None, :]

    wait(TRIGGER)

    # The load runs while the sum is computed.
    if residual_ptr is not None and SPLIT_K == 1:
        residual = tl.load(residual_ptr + residual_offsets, mask=exists, other=0.0)
    if NORM != "none":
        parts = tl.arange(0, triton.next_power_of_2(PARTS))
        moment_ptrs = moments_ptr + parts[None, :] * (2 * ROWS) + rows[:, None]
        is_moment = (rows < ROWS)[:, None] & (parts < PARTS)[None, :]
        sums = tl.load(moment_ptrs, mask=is_moment, other=0.0)
        squares = tl.load(moment_ptrs + ROWS, mask=is_moment, other=0.0)
    total = tl.zeros((BLOCK_N if BLOCK_M == 1 else BLOCK_M, BLOCK_K if BLOCK_M == 1 else BLOCK_N), tl.float32)
    for n in tl.range(0, PART, num_stages=STAGES):
        step = begin + n
        k = step * BLOCK_K + deep
        if IS_POINTWISE:
            channel = k
            x_offsets = corner[:, None] + k[None, :]
            mask = (rows < ROWS)[:, None]
            if not IS_WHOLE:
                mask = mask & (k < CHANNELS)[None, :]
        elif IS_WHOLE:  # one position of the kernel in each step
            tap = step // (CHANNELS // BLOCK_K)
            down = tap // KERNEL_W * DILATION_H
            across = tap % KERNEL_W * DILATION_W
            channel = step % (CHANNELS // BLOCK_K) * BLOCK_K + deep
            x_offsets = (corner + (down * WIDTH + across) * PIXEL_STRIDE)[:, None] + channel[None, :]
            inside = (top + down >= 0) & (top + down < HEIGHT) & (left + across >= 0) & (left + across < WIDTH)
            mask = ((rows < ROWS) & inside)[:, None]
        else:
            tap = k // CHANNELS
            channel = k % CHANNELS
            down = (tap // KERNEL_W * DILATION_H)[None, :]
            across = (tap % KERNEL_W * DILATION_W)[None, :]
            x_offsets = corner[:, None] + (down * WIDTH + across) * PIXEL_STRIDE + channel[None, :]
            y = top[:, None] + down
            x = left[:, None] + across
            mask = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
            mask = mask & (rows < ROWS)[:, None] & (k < DEPTH)[None, :]
        if PART * SPLIT_K > STEPS:  # the last part is shorter: zeros times any weights
            mask = mask & (rows < tl.where(step < STEPS, ROWS, 0))[:, None]
            step = tl.minimum(step, STEPS - 1)
        pixels = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
        if HAS_PROLOGUE:
            whose = image if ROWS > OUT_HEIGHT * OUT_WIDTH else None
            pixels = prepare(pixels, mask, whose, channel, scale_ptr, shift_ptr, gate_ptr, CHANNELS, BEFORE)
            pixels = pixels.to(x_ptr.dtype.element_ty)
        if IS_FP8 and not IS_ROUNDED:
            # The conversion saturates.
            pixels = (pixels * pixel_factor).to(tl.float8e4nv)
        weights = tl.load(tile_weight_ptr + step * (BLOCK_N * BLOCK_K) + weight_offsets)
        if BLOCK_M == 1:  # tensor cores would multiply 15 rows of nothing
            total += weights.to(tl.float32) * pixels.to(tl.float32)
        elif IS_FP8:
            total += tl.dot(pixels, weights.T)
        else:
            total = tl.dot(pixels, weights.T, total, input_precision=PRECISION)
    if BLOCK_M == 1:
        total = tl.sum(total, 1)[None, :]

    is_last = True
    if SPLIT_K > 1:
        tile = tile_n * TILES_M + tile_m
        partial_ptrs = part_ptrs(total, partials_ptr, tile, SPLIT_K)
        is_last = leave_part(total, partial_ptrs, part, counters_ptr + tile, SPLIT_K)
    if is_last:
        if SPLIT_K > 1:
            total = add_parts(partial_ptrs, counters_ptr + tile, SPLIT_K)
        if IS_FP8:
            total *= factors[None, :]
        if NORM != "none":
            total = correct(total, sums, squares, weight_sums, CHANNELS, EPS, NORM)
        if residual_ptr is not None:
            if SPLIT_K > 1:
                residual = tl.load(residual_ptr + residual_offsets, mask=exists, other=0.0)
            total += residual.to(tl.float32)
        total += bias[None, :]
        if GATED:
            rounded = total.to(out_ptr.dtype.element_ty).to(tl.float32)
            passed, other = tl.split(tl.reshape(rounded, (BLOCK_M, BLOCK_N // 2, 2)))
            result = (activate(passed, ACTIVATION) * other).to(out_ptr.dtype.element_ty)
            pairs = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            pair_offsets = rows[:, None] * OUT_STRIDE + pairs[None, :]
            tl.store(out_ptr + pair_offsets, result, mask=(rows < ROWS)[:, None] & (pairs * 2 < OUT_CHANNELS)[None, :])
        else:
            result = activate(total, ACTIVATION)
            if copy_ptr is None:
                store(out_ptr + out_offsets, result, exists, out_factor)
            else:
                store(copy_ptr + out_offsets, result, exists, out_factor)
                store(out_ptr + out_offsets, result, exists, None)
            if out_moments_ptr is not None:
                result = result.to(out_ptr.dtype.element_ty)
                store_moments(out_moments_ptr + tile_n * (2 * ROWS), result, rows, ROWS)


@triton.jit
def correct(total, sums, squares, weight_sums, COLUMNS: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr):
    """Derive the product of normalised rows from the rows' product and their moments ``sums`` and ``squares``."""
    mean = tl.sum(sums, 1) * (1.0 / COLUMNS)
    if NORM == "rms":
        mean = tl.zeros_like(mean)
    variance = tl.sum(squares, 1) * (1.0 / COLUMNS) - mean * mean
    scale = tl.rsqrt(tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL) + EPS)
    return (total - mean[:, None] * weight_sums[None, :]) * scale[:, None]


@triton.jit
def store_moments(moments_ptr, values, rows, ROWS: tl.constexpr):
    """Store the sum of each row of ``values``, then the sum of its squares."""
    values = values.to(tl.float32)
    tl.store(moments_ptr + rows, tl.sum(values, 1), mask=rows < ROWS)
    tl.store(moments_ptr + ROWS + rows, tl.sum(values * values, 1), mask=rows < ROWS)
