"""Batched products by a constant that repeats one matrix become one product of all rows."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call
from nimblec.graph.views import fixed_strides, permutation
from nimblec.graph.vocabulary import TRANSPOSES

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
        calls = [user for user in constant.users if _multiplies_rows(user, constant, is_fixed=user in fixed)]
        matrix = _matrix(rewriter, constant) if calls else None
        if matrix is not None:
            shared = rewriter.constant(matrix, at=constant)
            for call in calls:
                rewriter.replace(call, _product(rewriter, call, shared))
    rewriter.finish()


def _multiplies_rows(call: fx.Node, constant: fx.Node, *, is_fixed: bool) -> bool:
    """Return whether ``call`` multiplies rows by ``constant``, and one matrix of all rows costs no further copy.

    Either the rows lie in memory as one matrix, or neither of their last two axes has stride 1, so that
    ``bmm`` copies them too (aten/src/ATen/native/cuda/Blas.cpp of PyTorch).
    """
    if not is_call(call, aten.bmm.default) or bound(call)["mat2"] is not constant or not fake(call).numel():
        return False
    x = fake(bound(call)["self"])
    return _are_in_order(x) or 1 not in x.stride()[1:] or (_are_in_order(x.transpose(0, 1)) and not is_fixed)


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


def _product(rewriter: Rewriter, call: fx.Node, matrix: fx.Node) -> fx.Node:
    """Return all rows times ``matrix``, as the batch that ``call`` returns."""
    x = bound(call)["self"]
    is_swapped = not _are_in_order(fake(x)) and _are_in_order(fake(x).transpose(0, 1))
    if is_swapped:
        is_undone = is_call(x, *TRANSPOSES) and permutation(x) == [1, 0, 2]
        x = argument(x, 0) if is_undone else rewriter.call(aten.transpose.int, x, 0, 1, at=call)
    *batch, depth = fake(x).shape
    joined = rewriter.call(aten.reshape.default, x, [math.prod(batch), depth], at=call)
    product = rewriter.call(aten.mm.default, joined, matrix, at=call)
    result = rewriter.call(aten.reshape.default, product, [*batch, fake(call).shape[2]], at=call)
    return rewriter.call(aten.transpose.int, result, 0, 1, at=call) if is_swapped else result
