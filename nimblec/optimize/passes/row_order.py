"""Rows that are transposed before a product, whose result is transposed back."""

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.views import fixed_strides, is_view, permutation
from nimblec.graph.vocabulary import LINEARS, RESHAPES, TRANSPOSES

aten = torch.ops.aten


def undo_row_orders(module: fx.GraphModule) -> None:
    """Multiply rows in the order in which their product is read, and leave out both transposes.

    `torch.nn.MultiheadAttention` with its batch first transposes the results of attention to (length, batch, ...)
    before its last product, and the product back. Rows that lie in memory as they are transposed stay so.
    """
    rewriter = Rewriter(module)
    rewriter.propagate()
    fixed = fixed_strides(module.graph)
    for result in rewriter.calls(*TRANSPOSES):
        shaped = argument(result, 0)
        if permutation(result) == [1, 0, 2] and is_call(shaped, *RESHAPES) and result not in fixed:
            product = argument(shaped, 0)
            if is_call(product, *LINEARS) and only_user(shaped) is result and only_user(product) is shaped:
                _swap_rows(rewriter, product, result)
    rewriter.finish()


def _swap_rows(rewriter: Rewriter, product: fx.Node, result: fx.Node) -> None:
    """Compute ``result`` (a, b, n) by a product of the rows (b, a, ...) behind their transpose, if there is one."""
    given = bound(product)
    rows, bias = (given["self"], None) if "mat1" not in given else (given["mat1"], given["self"])
    x = argument(rows, 0) if is_call(rows, *RESHAPES) and not is_view(rows) else rows
    is_same = bias is None or fake(bias).dim() == 1  # for all rows
    if is_call(x, *TRANSPOSES) and fake(x).shape[:2][::-1] == fake(result).shape[:2] and is_same:
        swapped = rewriter.call(aten.permute.default, x, [1, 0, *range(2, fake(x).dim())], at=product)
        joined = rewriter.call(aten.reshape.default, swapped, list(fake(rows).shape), at=product)
        product.replace_input_with(rows, joined)
        rewriter.replace(result, rewriter.call(aten.reshape.default, product, list(fake(result).shape), at=result))
