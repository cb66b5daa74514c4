# ruff: noqa: ANN001, ANN201 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
# ruff: noqa: PLR0124 - branches are taken while it is compiled; a NaN is no number, not itself
"""The Triton kernels of pooling: maxima and averages of windows, and means of whole images.

All that they read may come from the kernel before, so they wait first (`nimblec.kernels.device`).
"""

import triton
import triton.language as tl

from nimblec.kernels.device import activate, wait


@triton.jit
def pool(
    x_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXEL_STRIDE: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    KIND: tl.constexpr,
    DIVISOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Pool x (pixels, channels), ``PIXEL_STRIDE`` elements from pixel to pixel, to out (rows, channels).

    ``KIND`` is "max" or "average": of ``DIVISOR`` pixels where that is not 0, else of those of the window that lie
    in the images ("average"), or in the images and their padding ("padded average"). A maximum is NaN where one
    pixel is, the last one's; of equal ones it is the first; where no pixel is there it is -inf, an average 0.
    """
    TILES_C: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    TAPS: tl.constexpr = KERNEL_H * KERNEL_W
    UNROLLED: tl.constexpr = TAPS if TAPS <= 32 else KERNEL_W
    block = tl.program_id(0)
    channels = block % TILES_C * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = block // TILES_C * BLOCK_M + tl.arange(0, BLOCK_M)
    image = rows // (OUT_HEIGHT * OUT_WIDTH)
    top = (rows // OUT_WIDTH) % OUT_HEIGHT * STRIDE_H - PADDING_H
    left = rows % OUT_WIDTH * STRIDE_W - PADDING_W
    corner = ((image * HEIGHT + top) * WIDTH + left) * PIXEL_STRIDE
    exists = (rows < ROWS)[:, None] & (channels < CHANNELS)[None, :]
    wait(TRIGGER)

    if KIND == "max":
        result = tl.full((BLOCK_M, BLOCK_C), float("-inf"), tl.float32)
    else:
        result = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for begin in tl.range(0, TAPS, UNROLLED):
        for step in tl.static_range(UNROLLED):
            tap = begin + step
            down = tap // KERNEL_W * DILATION_H
            across = tap % KERNEL_W * DILATION_W
            inside = (top + down >= 0) & (top + down < HEIGHT) & (left + across >= 0) & (left + across < WIDTH)
            offsets = (corner + (down * WIDTH + across) * PIXEL_STRIDE)[:, None] + channels[None, :]
            if KIND == "max":
                x = tl.load(x_ptr + offsets, mask=exists & inside[:, None], other=float("-inf")).to(tl.float32)
                result = tl.where((x > result) | (x != x), x, result)
            else:
                result += tl.load(x_ptr + offsets, mask=exists & inside[:, None], other=0.0).to(tl.float32)

    if KIND != "max":
        if DIVISOR != 0:
            count = tl.full((BLOCK_M,), DIVISOR, tl.int32)
        elif KIND == "padded average":
            count = tl.minimum(KERNEL_H, HEIGHT + PADDING_H - top) * tl.minimum(KERNEL_W, WIDTH + PADDING_W - left)
        else:
            height = tl.minimum(top + KERNEL_H, HEIGHT) - tl.maximum(top, 0)
            width = tl.minimum(left + KERNEL_W, WIDTH) - tl.maximum(left, 0)
            count = tl.maximum(height, 0) * tl.maximum(width, 0)
        divisor = tl.zeros((BLOCK_M, BLOCK_C), tl.float32) + tl.maximum(count, 1).to(tl.float32)[:, None]
        result = tl.div_rn(result, divisor)
    out_offsets = rows[:, None] * CHANNELS + channels[None, :]
    tl.store(out_ptr + out_offsets, activate(result, ACTIVATION).to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def mean(
    x_ptr,
    out_ptr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    IMAGE_STRIDE: tl.constexpr,
    PIXEL_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Average the pixels of x (images, pixels, channels), by its strides, to out (images, channels) without gaps."""
    TILES_C: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    block = tl.program_id(0)
    image = block // TILES_C
    channels = block % TILES_C * BLOCK_C + tl.arange(0, BLOCK_C)
    within = tl.arange(0, BLOCK_P)
    exists = (channels < CHANNELS)[None, :]
    offsets = within[:, None] * PIXEL_STRIDE + channels[None, :] * CHANNEL_STRIDE
    x_ptr += image * IMAGE_STRIDE
    wait(TRIGGER)

    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for begin in tl.range(0, PIXELS, BLOCK_P):
        mask = exists
        if PIXELS % BLOCK_P:
            mask = exists & (within < PIXELS - begin)[:, None]
        total += tl.load(x_ptr + begin * PIXEL_STRIDE + offsets, mask=mask, other=0.0).to(tl.float32)
    result = activate(tl.sum(total, 0) * (1.0 / PIXELS), ACTIVATION)
    tl.store(out_ptr + image * CHANNELS + channels, result.to(out_ptr.dtype.element_ty), mask=channels < CHANNELS)
