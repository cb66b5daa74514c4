# ruff: noqa: ANN001, ANN201 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803 - constants known to the compiler in capitals, as in Triton's own kernels
"""The Triton kernel of layer norm and RMS norm over the last axis, with a residual added before it.

A block holds some whole rows in registers, so that the mean comes before the differences from it. It loads weight, bias
and factor, which nothing ever writes, while the kernel before it still runs, and waits as `nimblec.kernels.device`
says.
"""

import triton
import triton.language as tl

from nimblec.kernels.device import store, wait


@triton.jit
def norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    rounded_ptr,
    factor_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    RMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Normalise rows of x or, with a residual, of sum = x + residual; arrays are (rows, columns) without gaps.

    With a factor, the result times the factor is also stored in e4m3.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_C)
    is_column = columns < COLUMNS
    offsets = rows[:, None] * COLUMNS + columns[None, :]
    mask = (rows < ROWS)[:, None] & is_column[None, :]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    factor = None if factor_ptr is None else tl.load(factor_ptr)
    wait(TRIGGER)

    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, rounded, mask=mask)
        # Readers of the sum see it rounded, and so does the norm.
        x = rounded.to(tl.float32)
    if not RMS:
        mean = tl.sum(x, 1) / COLUMNS
        x = tl.where(is_column[None, :], x - mean[:, None], 0.0)
    square = tl.sum(x * x, 1) / COLUMNS
    result = x * tl.rsqrt(square + EPS)[:, None]
    if weight_ptr is not None:
        result *= weight[None, :]
    if bias_ptr is not None:
        result += bias[None, :]
    tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
    if factor_ptr is not None:
        store(rounded_ptr + offsets, result, mask, factor)
