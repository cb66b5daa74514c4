"""Batched products whose constant holds one matrix many times: one product of all rows."""

import torch
from torch import Tensor, fx

from nimblec.optimize.rewriter import Rewriter, bound, fake, is_call

aten = torch.ops.aten

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
"""The integers to compare numbers as, so that 0 and -0 differ and a NaN is like itself."""


def join_batches(module: fx.GraphModule) -> None:
    """``bmm`` of a batch and a constant (batch, k, n) of equal matrices becomes ``mm`` of all rows and one of them.

    So torch writes ``linear`` of what is not contiguous, with a sum for the bias, which folds into
    ``mm`` as those of other linears do. No copy is made that ``bmm`` did without.
    """
    rewriter = Rewriter(module)
    found = [node for node in rewriter.calls(aten.bmm.default) if _matrix(rewriter, node) is not None]
    if found:
        rewriter.propagate()
    matrices: dict[fx.Node, fx.Node] = {}
    for node in found:
        if _has_joint_rows(fake(bound(node)["self"])):
            rewriter.replace(node, _product(rewriter, node, matrices))
    rewriter.finish()


def _matrix(rewriter: Rewriter, node: fx.Node) -> Tensor | None:
    """The one matrix (k, n) that the constant on the right holds for all of the batch."""
    value = rewriter.value(bound(node)["mat2"])
    if value is None or value.dtype not in _BITS or not fake(node).numel() or not value.numel():
        return None
    bits = value.view(_BITS[value.dtype])
    return value[0] if bool((bits == bits[0]).all()) else None


def _has_joint_rows(x: Tensor) -> bool:
    """Whether rows (batch, m, k) are a matrix (batch * m, k) as they lie, or ``bmm`` would copy them too.

    cuBLAS reads matrices whose rows or columns have no gaps between their elements.
    """
    batch, rows, _ = x.shape
    return batch == 1 or rows == 1 or x.stride(0) == rows * x.stride(1) or 1 not in x.stride()[1:]


def _product(rewriter: Rewriter, node: fx.Node, matrices: dict[fx.Node, fx.Node]) -> fx.Node:
    """The product by one matrix; ``matrices`` are those made for constants that several calls read."""
    x, constant = bound(node)["self"], bound(node)["mat2"]
    if constant not in matrices:
        matrix = _matrix(rewriter, node)
        assert matrix is not None
        # A part of the constant would keep all of it in memory.
        matrices[constant] = rewriter.constant(matrix.clone() if len(fake(constant)) > 1 else matrix, at=node)
    rows = rewriter.call(aten.reshape.default, x, [-1, fake(x).shape[2]], at=node)
    product = rewriter.call(aten.mm.default, rows, matrices[constant], at=node)
    return rewriter.call(aten.reshape.default, product, list(fake(node).shape), at=node)
