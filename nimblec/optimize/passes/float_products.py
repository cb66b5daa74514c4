"""Large products of float32 matrices that training changes, on tensor cores, with all bits."""

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, fake
from nimblec.kernels.gpu import GPU
from nimblec.kernels.products.gemm_match import arithmetic_of
from nimblec.kernels.products.split_op import split

aten = torch.ops.aten

_LEAST = 512
"""The shortest axis of a product that gains by it: the parts have to be written and read."""


def split_products(module: fx.GraphModule) -> None:
    """Multiply large float32 matrices, none of them constant, as parts in bfloat16, unless TF32 is allowed."""
    rewriter = Rewriter(module)
    known: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in rewriter.calls(aten.mm.default, aten.addmm.default):
        *added, left, right = (argument(node, n) for n in range(len(node.args)))
        if not node.kwargs and _is_split(rewriter, left, right):
            factors = (_factor(rewriter, each, side, known, at=node) for side, each in enumerate((left, right)))
            total = rewriter.call(aten.mm.dtype, *factors, torch.float32, at=node)
            rewriter.replace(node, rewriter.call(aten.add.Tensor, total, added[0], at=node) if added else total)
    rewriter.finish()


def is_fast(device: torch.device) -> bool:
    """Return whether split products are faster on a device."""
    return device.type == "cuda" and GPU.current().has_wide_tensor_cores


def _is_split(rewriter: Rewriter, left: fx.Node, right: fx.Node) -> bool:
    """Return whether a product is in float32, long along all axes, and of two matrices without gaps, none constant."""
    factors = (fake(left), fake(right))
    return (
        factors[0].dtype is torch.float32
        and is_fast(factors[0].device)
        and all(rewriter.value(factor) is None for factor in (left, right))
        and arithmetic_of(factors[0].dtype, torch.backends.cuda.matmul) == "tf32x3"
        and all(min(x.shape) >= _LEAST and (x.is_contiguous() or x.t().is_contiguous()) for x in factors)
    )


def _factor(
    rewriter: Rewriter, matrix: fx.Node, side: int, known: dict[tuple[fx.Node, int], fx.Node], *, at: fx.Node
) -> fx.Node:
    """Return the parts of the left (0) or right (1) factor, in the memory order of the factor."""
    is_transposed = not fake(matrix).is_contiguous()
    if (matrix, side) not in known:
        stored = rewriter.call(aten.t.default, matrix, at=at) if is_transposed else matrix
        axis = int(is_transposed == bool(side))
        known[matrix, side] = rewriter.call(split, stored, side, axis, "late", at=at)
    parts = known[matrix, side]
    return rewriter.call(aten.t.default, parts, at=at) if is_transposed else parts
