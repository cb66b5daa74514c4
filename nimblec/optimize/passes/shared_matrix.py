"""Batched products by a constant that repeats one matrix become one product of all rows."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, bound, fake, is_call
from nimblec.graph.views import fixed_strides

aten = torch.ops.aten

_BITS: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""The integers by which numbers are compared, so that 0 and -0 differ."""


def join_batches(module: fx.GraphModule) -> None:
    """Replace ``bmm`` by a constant (batch, k, n) of equal matrices by ``mm`` of all rows by one of them.

    Torch decomposes ``linear`` over three axes or more that are not contiguous into this ``bmm``, and adds
    the bias by another call, which then folds into ``mm`` as for other linears. A product stays where
    ``mm`` would have to copy rows that ``bmm`` reads in place. Rows that lie in memory with the batch second
    (of `torch.nn.MultiheadAttention` with its batch first) are multiplied in their order there.
    """
    rewriter = Rewriter(module)
    if rewriter.calls(aten.bmm.default):
        rewriter.propagate()
    fixed = fixed_strides(module.graph)
    for constant in [node for node in module.graph.nodes if node.op == "get_attr"]:
        orders = {user: _row_order(user, constant, is_fixed=user in fixed) for user in constant.users}
        calls = {user: order for user, order in orders.items() if order is not None}
        matrix = _matrix(rewriter, constant) if calls else None
        if matrix is not None:
            shared = rewriter.constant(matrix, at=constant)
            for call, order in calls.items():
                rewriter.replace(call, _product(rewriter, call, shared, order))
    rewriter.finish()


def _row_order(call: fx.Node, constant: fx.Node, *, is_fixed: bool) -> tuple[int, int] | None:
    """Return the order of batch (0) and rows (1) in which one matrix of all rows costs no further copy, else None.

    None too where ``call`` does not multiply rows by ``constant``. Either the rows lie in memory as one matrix, or
    neither of their last two axes has stride 1, so that ``bmm`` copies them too (aten/src/ATen/native/cuda/Blas.cpp
    of PyTorch). Another order than (0, 1) changes the strides of the result, which must not be ``is_fixed``.
    """
    if not is_call(call, aten.bmm.default) or bound(call)["mat2"] is not constant or not fake(call).numel():
        return None
    x = fake(bound(call)["self"])
    if not _are_in_order(x) and _are_in_order(x.transpose(0, 1)) and not is_fixed:
        return 1, 0
    return (0, 1) if _are_in_order(x) or 1 not in x.stride()[1:] else None


def _are_in_order(x: Tensor) -> bool:
    """Return whether the rows of ``x`` (batch, rows, depth) lie in memory as one matrix."""
    batch, rows, _ = x.shape
    return batch == 1 or rows == 1 or x.stride(0) == rows * x.stride(1)


def _matrix(rewriter: Rewriter, constant: fx.Node) -> Tensor | None:
    """Return the matrix (k, n) that a constant (batch, k, n) repeats bit for bit, in memory of its own; else None."""
    value = rewriter.value(constant)
    if value is None or value.dtype not in _BITS or not value.numel():
        return None
    bits = value.view(_BITS[value.dtype])
    if not bool((bits == bits[0]).all()):
        return None
    return value[0] if len(value) == 1 else value[0].clone()


def _product(rewriter: Rewriter, call: fx.Node, matrix: fx.Node, order: tuple[int, int]) -> fx.Node:
    """Return all rows times ``matrix``, as the batch that ``call`` returns, computed in an order of batch and rows."""
    x = rewriter.call(aten.permute.default, bound(call)["self"], [*order, 2], at=call)
    *batch, depth = fake(x).shape
    joined = rewriter.call(aten.reshape.default, x, [math.prod(batch), depth], at=call)
    product = rewriter.call(aten.mm.default, joined, matrix, at=call)
    result = rewriter.call(aten.reshape.default, product, [*batch, fake(call).shape[2]], at=call)
    return rewriter.call(aten.permute.default, result, [*order, 2], at=call)
