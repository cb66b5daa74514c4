# ruff: noqa: ANN001, ANN201 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
"""The Triton kernel of depthwise convolutions, channels last: each result reads one channel, bound by memory.

A block computes some pixels of some channels. Its prologue, and how it starts early and waits:
`nimblec.kernels.device`.
"""

import triton
import triton.language as tl

from nimblec.kernels.device import activate, fetch_into_l2, prepare, wait


@triton.jit
def depthwise(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    scale_ptr,
    shift_ptr,
    gate_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
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
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Convolve x (pixels, channels) by weight (channel tiles, taps, block_c), add residual; out is (rows, channels).

    Rows of residual and out are RESIDUAL_STRIDE and OUT_STRIDE elements apart.
    """
    TILES_C: tl.constexpr = (OUT_CHANNELS + BLOCK_C - 1) // BLOCK_C
    TAPS: tl.constexpr = KERNEL_H * KERNEL_W
    UNROLLED: tl.constexpr = TAPS if TAPS <= 64 else KERNEL_W
    IS_SCALED: tl.constexpr = scale_ptr is not None or shift_ptr is not None
    HAS_PROLOGUE: tl.constexpr = (IS_SCALED or gate_ptr is not None) or BEFORE != "none"
    block = tl.program_id(0)
    tile_c = block % TILES_C
    tile_m = block // TILES_C
    tile_weight_ptr = weight_ptr + tile_c * (TAPS * BLOCK_C)
    if TRIGGER != "none":
        NBYTES: tl.constexpr = TAPS * BLOCK_C * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        fetch_into_l2(tile_weight_ptr.to(tl.int64), NBYTES)
    within = tl.arange(0, BLOCK_C)
    columns = tile_c * BLOCK_C + within
    channels = columns // (OUT_CHANNELS // CHANNELS)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < OUT_CHANNELS, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros((BLOCK_C,), tl.float32)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    image = rows // (OUT_HEIGHT * OUT_WIDTH)
    top = (rows // OUT_WIDTH) % OUT_HEIGHT * STRIDE_H - PADDING_H
    left = rows % OUT_WIDTH * STRIDE_W - PADDING_W
    corner = ((image * HEIGHT + top) * WIDTH + left) * PIXEL_STRIDE
    exists = (rows < ROWS)[:, None] & (columns < OUT_CHANNELS)[None, :]
    wait(TRIGGER)

    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32) + bias[None, :]
    for begin in tl.range(0, TAPS, UNROLLED):
        for step in tl.static_range(UNROLLED):
            tap = begin + step
            down = tap // KERNEL_W * DILATION_H
            across = tap % KERNEL_W * DILATION_W
            inside = (top + down >= 0) & (top + down < HEIGHT) & (left + across >= 0) & (left + across < WIDTH)
            offsets = (corner + (down * WIDTH + across) * PIXEL_STRIDE)[:, None] + channels[None, :]
            mask = exists & inside[:, None]
            pixels = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            if HAS_PROLOGUE:
                whose = image if ROWS > OUT_HEIGHT * OUT_WIDTH else None
                pixels = prepare(pixels, mask, whose, channels, scale_ptr, shift_ptr, gate_ptr, CHANNELS, BEFORE)
            weights = tl.load(tile_weight_ptr + tap * BLOCK_C + within)
            total += pixels * weights.to(tl.float32)[None, :]

    if residual_ptr is not None:
        residual_offsets = rows[:, None] * RESIDUAL_STRIDE + columns[None, :]
        total += tl.load(residual_ptr + residual_offsets, mask=exists, other=0.0).to(tl.float32)
    out_offsets = rows[:, None] * OUT_STRIDE + columns[None, :]
    tl.store(out_ptr + out_offsets, activate(total, ACTIVATION).to(out_ptr.dtype.element_ty), mask=exists)
