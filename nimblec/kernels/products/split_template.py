# ruff: noqa: ANN001, ANN201 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803 - constants known to the compiler in capitals, as in Triton's own kernels
"""The Triton kernel that writes float32 numbers as sums of three of bfloat16."""

import triton
import triton.language as tl

from nimblec.kernels.device import wait


@triton.jit
def split(
    x_ptr,
    out_ptr,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    IS_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Write the parts of each number of x (rows, columns), as `split_op.PAIRS` has them, ``PART_STRIDE`` apart."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < COUNT
    places = out_ptr + at // COLUMNS * ROW_STRIDE + at % COLUMNS
    wait(TRIGGER)
    x = tl.load(x_ptr + at, mask=exists)
    large = leading(x)
    middle = leading(x - large)
    small = leading(x - large - middle)
    parts = (small, large, middle, middle, large, large) if IS_RIGHT else (large, small, middle, large, middle, large)
    for n in tl.static_range(6):
        tl.store(places + n * PART_STRIDE, parts[n].to(tl.bfloat16), mask=exists)


@triton.jit
def leading(x):
    """Keep the bits of float32 numbers that bfloat16 has."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
