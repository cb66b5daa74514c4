# ruff: noqa: ANN001, ANN201 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
# ruff: noqa: PLR0915 - branches are taken while they are compiled
"""Triton kernels of convolutions whose weights change from step to step, and of their gradients.

Images lie channels last. All but depthwise ones are implicit matrix products with a split sum as in
`nimblec.kernels.products.gemm_template`, but on weights as torch has them, read after the wait, since the kernel before
may write them. The gradient of weights sums over all pixels of a batch, and is split until it fills the GPU. ``SCALE``
compensates for the bits of float32 factors that tensor cores cut off.
"""

import triton
import triton.language as tl

from nimblec.kernels.device import leave_part, part_ptrs, wait


@triton.jit
def images(
    source_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    SOURCE_HEIGHT: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXEL_STRIDE: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Compute images (rows, out channels) from source (pixels, channels): a convolution, or its images' gradient.

    Rows are pixels of the result, columns its channels, bias (out channels,); the sum runs over (kernel height, kernel
    width, channels of the source). The strides of weight are of its tap, of the source's channel and of the column.
    """
    TILES_M: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (OUT_CHANNELS + BLOCK_N - 1) // BLOCK_N
    DEPTH: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
    IS_WHOLE: tl.constexpr = CHANNELS % BLOCK_K == 0

    block = tl.program_id(0)
    tile_m = block % TILES_M
    tile_n = (block // TILES_M) % TILES_N
    part = block // (TILES_M * TILES_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    deep = tl.arange(0, BLOCK_K)
    SIGN: tl.constexpr = -1 if IS_GRADIENT else 1
    APART_H: tl.constexpr = STRIDE_H if IS_GRADIENT else 1
    APART_W: tl.constexpr = STRIDE_W if IS_GRADIENT else 1
    image = rows // (HEIGHT * WIDTH)
    top = first_tap((rows // WIDTH) % HEIGHT, STRIDE_H, PADDING_H, IS_GRADIENT)
    left = first_tap(rows % WIDTH, STRIDE_W, PADDING_W, IS_GRADIENT)
    is_row, is_column = rows < ROWS, columns < OUT_CHANNELS

    wait(TRIGGER)

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    else:
        bias = 0.0
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for n in tl.range(0, PART):
        step = part * PART + n
        k = step * BLOCK_K + deep
        if IS_WHOLE:  # one position of the kernel in each step
            tap = step // (CHANNELS // BLOCK_K)
            channel = step % (CHANNELS // BLOCK_K) * BLOCK_K + deep
            y, x = top + SIGN * (tap // KERNEL_W * DILATION_H), left + SIGN * (tap % KERNEL_W * DILATION_W)
            at, is_inside = pixel(image, y, x, SOURCE_HEIGHT, SOURCE_WIDTH, APART_H, APART_W)
            last_row = tl.where(step < STEPS, ROWS, 0)  # the last part may be shorter
            mask = (is_inside & (rows < last_row))[:, None]
            sources = (at * PIXEL_STRIDE)[:, None] + channel[None, :]
            weights = (tap * TAP_STRIDE + channel * CHANNEL_STRIDE)[:, None] + (columns * COLUMN_STRIDE)[None, :]
            is_weight = (columns < tl.where(step < STEPS, OUT_CHANNELS, 0))[None, :]
        else:
            tap = k // CHANNELS
            channel = k % CHANNELS
            y = top[:, None] + SIGN * (tap // KERNEL_W * DILATION_H)[None, :]
            x = left[:, None] + SIGN * (tap % KERNEL_W * DILATION_W)[None, :]
            at, is_inside = pixel(image[:, None], y, x, SOURCE_HEIGHT, SOURCE_WIDTH, APART_H, APART_W)
            mask = is_inside & is_row[:, None] & (k < DEPTH)[None, :]
            sources = at * PIXEL_STRIDE + channel[None, :]
            weights = (tap * TAP_STRIDE + channel * CHANNEL_STRIDE)[:, None] + (columns * COLUMN_STRIDE)[None, :]
            is_weight = (k < DEPTH)[:, None] & is_column[None, :]
        a = tl.load(source_ptr + sources, mask=mask, other=0.0)
        b = tl.load(weight_ptr + weights, mask=is_weight, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)

    tile = tile_n * TILES_M + tile_m
    out_ptrs = out_ptr + rows[:, None] * OUT_CHANNELS + columns[None, :]
    exists = is_row[:, None] & is_column[None, :]
    total *= SCALE
    store_sum(total, bias, out_ptrs, exists, partials_ptr, counters_ptr, tile, part, BLOCK_M, BLOCK_N, SPLIT_K)


@triton.jit
def weights(
    grad_ptr,
    x_ptr,
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
    OUT_STRIDE: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Compute the gradient of weights (out channels, kernel height, kernel width, channels).

    Of x (pixels, channels) and the gradient (rows, out channels) of what the convolution made of it; the sum runs
    over the gradient's rows.
    """
    COLUMNS: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    TILES_M: tl.constexpr = (OUT_CHANNELS + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (ROWS + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K

    block = tl.program_id(0)
    tile_m = block % TILES_M
    tile_n = (block // TILES_M) % TILES_N
    part = block // (TILES_M * TILES_N)
    made = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    deep = tl.arange(0, BLOCK_K)
    tap = columns // CHANNELS
    channel = columns % CHANNELS
    if CHANNELS % BLOCK_N == 0:  # a tile of columns has one position of the kernel
        tap = tl.full((1,), tile_n * BLOCK_N // CHANNELS, tl.int32)
    down = (tap // KERNEL_W * DILATION_H)[None, :]
    across = (tap % KERNEL_W * DILATION_W)[None, :]
    is_made, is_column = made < OUT_CHANNELS, columns < COLUMNS

    wait(TRIGGER)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for n in tl.range(0, PART):
        rows = (part * PART + n) * BLOCK_K + deep
        image = rows // (OUT_HEIGHT * OUT_WIDTH)
        top = (rows // OUT_WIDTH) % OUT_HEIGHT * STRIDE_H - PADDING_H
        left = rows % OUT_WIDTH * STRIDE_W - PADDING_W
        at, is_inside = pixel(image[:, None], top[:, None] + down, left[:, None] + across, HEIGHT, WIDTH, 1, 1)
        is_row = rows < ROWS
        grads = (rows * OUT_STRIDE)[None, :] + made[:, None]
        a = tl.load(grad_ptr + grads, mask=is_row[None, :] & is_made[:, None], other=0.0)
        mask = is_inside & is_row[:, None] & is_column[None, :]
        b = tl.load(x_ptr + at * PIXEL_STRIDE + channel[None, :], mask=mask, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)

    tile = tile_n * TILES_M + tile_m
    out_ptrs = out_ptr + made[:, None] * COLUMNS + columns[None, :]
    exists = is_made[:, None] & is_column[None, :]
    total *= SCALE
    store_sum(total, 0.0, out_ptrs, exists, partials_ptr, counters_ptr, tile, part, BLOCK_M, BLOCK_N, SPLIT_K)


@triton.jit
def depthwise_images(
    source_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    SOURCE_HEIGHT: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr,
    PIXEL_STRIDE: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Compute images (rows, channels), each channel from the same channel of source (pixels, channels).

    Weights are (channels, kernel height, kernel width); otherwise as `images`, without tensor cores.
    """
    SIGN: tl.constexpr = -1 if IS_GRADIENT else 1
    APART_H: tl.constexpr = STRIDE_H if IS_GRADIENT else 1
    APART_W: tl.constexpr = STRIDE_W if IS_GRADIENT else 1
    TILES: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    TAPS: tl.constexpr = KERNEL_H * KERNEL_W
    UNROLLED: tl.constexpr = TAPS if TAPS <= 64 else KERNEL_W
    channel = tl.program_id(0) % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.program_id(0) // TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    image = rows // (HEIGHT * WIDTH)
    top = first_tap((rows // WIDTH) % HEIGHT, STRIDE_H, PADDING_H, IS_GRADIENT)
    left = first_tap(rows % WIDTH, STRIDE_W, PADDING_W, IS_GRADIENT)
    is_channel = channel < CHANNELS
    exists = (rows < ROWS)[:, None] & is_channel[None, :]

    wait(TRIGGER)

    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for begin in tl.range(0, TAPS, UNROLLED):
        for step in tl.static_range(UNROLLED):
            tap = begin + step
            y, x = top + SIGN * (tap // KERNEL_W * DILATION_H), left + SIGN * (tap % KERNEL_W * DILATION_W)
            at, is_inside = pixel(image, y, x, SOURCE_HEIGHT, SOURCE_WIDTH, APART_H, APART_W)
            sources = (at * PIXEL_STRIDE)[:, None] + channel[None, :]
            pixels = tl.load(source_ptr + sources, mask=exists & is_inside[:, None], other=0.0)
            weight = tl.load(weight_ptr + channel * TAPS + tap, mask=is_channel, other=0.0)
            total += pixels.to(tl.float32) * weight.to(tl.float32)[None, :]

    out_ptrs = out_ptr + rows[:, None] * CHANNELS + channel[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def depthwise_weights(
    grad_ptr,
    x_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PIXEL_STRIDE: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT_K: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Compute the gradient of depthwise weights (channels, kernel height, kernel width).

    Otherwise as `weights`; a block sums some channels over a part of the rows, ``BLOCK_M`` at a time.
    """
    TAPS: tl.constexpr = KERNEL_H * KERNEL_W
    PLACES: tl.constexpr = triton.next_power_of_2(TAPS)
    TILES: tl.constexpr = (OUT_CHANNELS + BLOCK_C - 1) // BLOCK_C
    STEPS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    PART: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K

    tile = tl.program_id(0) % TILES
    part = tl.program_id(0) // TILES
    channel = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.arange(0, PLACES)
    is_channel, is_tap = channel < OUT_CHANNELS, tap < TAPS
    down = (tap // KERNEL_W * DILATION_H)[:, None]
    across = (tap % KERNEL_W * DILATION_W)[:, None]

    wait(TRIGGER)

    sums = tl.zeros((PLACES, BLOCK_M, BLOCK_C), tl.float32)
    for n in tl.range(0, PART):
        rows = (part * PART + n) * BLOCK_M + tl.arange(0, BLOCK_M)
        image = rows // (OUT_HEIGHT * OUT_WIDTH)
        top = (rows // OUT_WIDTH) % OUT_HEIGHT * STRIDE_H - PADDING_H
        left = rows % OUT_WIDTH * STRIDE_W - PADDING_W
        at, is_inside = pixel(image[None, :], top[None, :] + down, left[None, :] + across, HEIGHT, WIDTH, 1, 1)
        is_row = rows < ROWS
        mask = is_row[:, None] & is_channel[None, :]
        grads = tl.load(grad_ptr + (rows * OUT_STRIDE)[:, None] + channel[None, :], mask=mask, other=0.0)
        is_read = (is_inside & is_tap[:, None] & is_row[None, :])[:, :, None] & is_channel[None, None, :]
        sources = (at * PIXEL_STRIDE)[:, :, None] + channel[None, None, :]
        x = tl.load(x_ptr + sources, mask=is_read, other=0.0)
        sums += x.to(tl.float32) * grads.to(tl.float32)[None, :, :]

    out_ptrs = out_ptr + (channel * TAPS)[None, :] + tap[:, None]
    exists = is_tap[:, None] & is_channel[None, :]
    total = tl.sum(sums, 1)
    store_sum(total, 0.0, out_ptrs, exists, partials_ptr, counters_ptr, tile, part, PLACES, BLOCK_C, SPLIT_K)


@triton.jit
def first_tap(place, STRIDE: tl.constexpr, PADDING: tl.constexpr, IS_GRADIENT: tl.constexpr):
    """Return where a result's window has its first tap; for a gradient, where the window begins that has it here."""
    return place + PADDING if IS_GRADIENT else place * STRIDE - PADDING


@triton.jit
def pixel(image, y, x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, APART_H: tl.constexpr, APART_W: tl.constexpr):
    """Return the number of a pixel and whether it exists: images have pixels only at multiples of the distances."""
    is_inside = (y >= 0) & (x >= 0)
    if APART_H > 1:
        is_inside = is_inside & (y % APART_H == 0)
        y = y // APART_H
    if APART_W > 1:
        is_inside = is_inside & (x % APART_W == 0)
        x = x // APART_W
    return (image * HEIGHT + y) * WIDTH + x, is_inside & (y < HEIGHT) & (x < WIDTH)


@triton.jit
def store_sum(
    total,
    bias,
    out_ptrs,
    exists,
    partials_ptr,
    counters_ptr,
    tile,
    part,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Store a tile (block_m, block_n) with its bias.

    The last of ``SPLIT_K`` blocks to arrive adds up the sums of all, in their fixed order.
    """
    if SPLIT_K == 1:
        tl.store(out_ptrs, (total + bias).to(out_ptrs.dtype.element_ty), mask=exists)
    else:
        partial_ptrs = part_ptrs(total, partials_ptr, tile, SPLIT_K)
        if leave_part(total, partial_ptrs, part, counters_ptr + tile, SPLIT_K):
            tl.store(counters_ptr + tile, 0)
            total = tl.load(partial_ptrs, cache_modifier=".cg")
            # There may be too many parts to unroll them all.
            for other in tl.range(1, SPLIT_K, loop_unroll_factor=4):
                total += tl.load(partial_ptrs + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(out_ptrs, (total + bias).to(out_ptrs.dtype.element_ty), mask=exists)
