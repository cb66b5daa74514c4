# ruff: noqa: ANN001, ANN201 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
"""The Triton kernel of the moments of groups of channels, channels last.

Several blocks share a group; the last to arrive combines their moments (Chan, Golub and LeVeque, "Updating Formulae and
a Pairwise Algorithm for Computing Sample Variances", 1979), in a fixed order.
"""

import triton
import triton.language as tl

from nimblec.kernels.device import wait


@triton.jit
def group_moments(
    x_ptr,
    mean_ptr,
    scale_ptr,
    partials_ptr,
    counters_ptr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIXEL_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Compute mean and 1 / sqrt(variance + EPS) of each group of CHANNELS channels of x (images, pixels, channels).

    PADDED is PARTS, rounded up to a power of two.
    """
    LENGTH: tl.constexpr = (PIXELS + PARTS - 1) // PARTS
    block = tl.program_id(0)
    row = block // PARTS
    part = block % PARTS
    x_ptr += row // GROUPS * (PIXELS * PIXEL_STRIDE) + row % GROUPS * CHANNELS + part * (LENGTH * PIXEL_STRIDE)
    length = tl.minimum(tl.maximum(PIXELS - part * LENGTH, 0), LENGTH)
    wait(TRIGGER)

    count = 0.0
    mean = 0.0
    square = 0.0  # of the differences from the mean
    for first in tl.range(0, LENGTH, BLOCK_P):
        pixels = first + tl.arange(0, BLOCK_P)
        for channel in tl.range(0, CHANNELS, BLOCK_C):
            channels = channel + tl.arange(0, BLOCK_C)
            mask = (pixels < length)[:, None] & (channels < CHANNELS)[None, :]
            x = tl.load(x_ptr + pixels[:, None] * PIXEL_STRIDE + channels[None, :], mask=mask, other=0.0).to(tl.float32)
            here = tl.minimum(tl.maximum(length - first, 0), BLOCK_P) * tl.minimum(CHANNELS - channel, BLOCK_C)
            own = tl.sum(tl.sum(x, 1), 0) / tl.maximum(here, 1)
            difference = tl.where(mask, x - own, 0.0)
            away = own - mean
            count += here
            share = here / tl.maximum(count, 1.0)
            mean += away * share
            square += tl.sum(tl.sum(difference * difference, 1), 0)
            square += away * away * ((count - here) * share)

    if PARTS == 1:
        tl.store(mean_ptr + row, mean)
        tl.store(scale_ptr + row, tl.rsqrt(square / (PIXELS * CHANNELS) + EPS))
    else:
        tl.store(partials_ptr + block * 2, mean, cache_modifier=".cg")
        tl.store(partials_ptr + block * 2 + 1, square, cache_modifier=".cg")
        tl.debug_barrier()  # both stores come before the one thread's release
        if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            tl.store(counters_ptr + row, 0)
            parts = tl.arange(0, PADDED)
            exists = parts < PARTS
            counts = tl.minimum(tl.maximum(PIXELS - parts * LENGTH, 0), LENGTH) * CHANNELS
            part_ptrs = partials_ptr + (row * PARTS + parts) * 2
            means = tl.load(part_ptrs, mask=exists, other=0.0, cache_modifier=".cg")
            squares = tl.load(part_ptrs + 1, mask=exists, other=0.0, cache_modifier=".cg")
            whole = tl.sum(counts * means, 0) / (PIXELS * CHANNELS)
            away = means - whole
            variance = tl.sum(squares + counts * away * away, 0) / (PIXELS * CHANNELS)
            tl.store(mean_ptr + row, whole)
            tl.store(scale_ptr + row, tl.rsqrt(variance + EPS))
