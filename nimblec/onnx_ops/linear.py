"""Matrix products."""

from collections.abc import Callable

import torch
from torch import Tensor

from nimblec.onnx_ops.table import Refused, op
from nimblec.onnx_ops.unsigned import bitwise

LIMB_BITS = 16
"""Integers are multiplied in pieces of 16 bits: sums of 2**21 products are exact in double."""


@op("MatMul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    return float_matmul(a, b) if a.dtype.is_floating_point else integer_matmul(a, b)


def float_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply as numpy.matmul does, with one ``mm`` where ``b`` is a matrix."""
    if a.dim() > 1 and b.dim() == 2:
        rows = a.reshape(-1, a.shape[-1]) if a.numel() else a.reshape(a.shape[:-1].numel(), a.shape[-1])
        return torch.mm(rows, b).reshape([*a.shape[:-1], b.shape[1]])
    if a.dim() == b.dim() > 2 and a.shape[:-2] == b.shape[:-2] and a.numel() and b.numel():
        batches = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
        return torch.bmm(*batches).reshape([*a.shape[:-1], b.shape[-1]])
    return torch.matmul(a, b)


def integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply integers exactly, modulo the range of their dtype, by products in double precision.

    CUDA has no integer matrix product in torch. Each operand is cut into limbs of 16 bits.
    """
    if a.shape[-1] > 1 << 21:
        raise Refused(f"sums {a.shape[-1]} integer products; expected at most {1 << 21}")
    return sum_of_limb_products(a, b, torch.matmul, a.dtype)


def sum_of_limb_products(
    a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """Return ``multiply(a, b)`` of integers modulo 2**bits, for any bilinear ``multiply``."""
    bits = 8 * dtype.itemsize
    a_limbs, b_limbs = _limbs(a), _limbs(b)
    result = None
    for i, low in enumerate(a_limbs):
        for j, high in enumerate(b_limbs):
            if (i + j) * LIMB_BITS >= bits:
                continue
            product = multiply(low, high).to(torch.int64) << (i + j) * LIMB_BITS
            result = product if result is None else result + product
    assert result is not None
    return result.to(dtype)


def _limbs(x: Tensor) -> list[Tensor]:
    """Cut integers into doubles of 16 bits each, the lowest first; the last one is signed."""
    if x.element_size() <= 2:
        return [x.to(torch.float64)]
    word = x.view(torch.int64) if x.dtype == torch.uint64 else x.to(torch.int64)
    count = x.element_size() // 2
    low = [(word >> i * LIMB_BITS) & 0xFFFF for i in range(count - 1)]
    return [limb.to(torch.float64) for limb in (*low, word >> (count - 1) * LIMB_BITS)]


@op("MatMulInteger", since=10)
def matmul_integer(
    a: Tensor, b: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None
) -> Tensor:
    left = centered(a, a_zero_point, -2)
    right = centered(b, b_zero_point, -1)
    return torch.matmul(left, right).to(torch.int32)


def centered(x: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """Return 8 bit integers less their zero point as doubles, in which sums of products are exact."""
    x = x.to(torch.float64)
    if zero_point is None:
        return x
    zero = zero_point.to(torch.float64)
    if zero.dim() == 1 and zero.numel() > 1:
        zero = zero.unsqueeze(1 if axis == -2 else 0)
    return x - zero


@op("Gemm", since=7)
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    if a.dim() != 2 or b.dim() != 2:
        raise Refused(f"inputs have {a.dim()} and {b.dim()} dimensions; expected 2")
    left = a.t() if transA else a
    right = b.t() if transB else b
    if not a.dtype.is_floating_point:
        return _integer_gemm(left, right, c, alpha, beta)
    if c is None:
        product = torch.mm(left, right)
        return product if alpha == 1 else product * alpha
    return torch.addmm(c, left, right, beta=beta, alpha=alpha)


@bitwise
def _integer_gemm(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    if alpha != 1 or beta != 1:
        raise Refused(f"alpha {alpha} and beta {beta} on integers; expected 1")
    product = integer_matmul(a, b)
    return product if c is None else product + c


@op("Einsum", since=12)
def einsum(*inputs: Tensor, equation: str) -> Tensor:
    if not inputs[0].dtype.is_floating_point:
        if len(inputs) == 1:
            return torch.einsum(equation, *inputs).to(inputs[0].dtype)  # torch adds them up as int64
        if len(inputs) != 2:
            raise Refused(f"{len(inputs)} integer inputs; expected 1 or 2")
        return sum_of_limb_products(
            *inputs, lambda a, b: torch.einsum(equation, a, b), inputs[0].dtype
        )
    return torch.einsum(equation, *inputs)


@op("Det", since=11)
def determinant(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)  # torch decomposes no matrix of halves
    return torch.linalg.det(x.to(wide)).to(x.dtype)
