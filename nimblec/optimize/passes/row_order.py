"""Products of rows in an order that a transpose of their result undoes."""

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.views import permutation
from nimblec.graph.vocabulary import LINEARS, RESHAPES, TRANSPOSES

aten = torch.ops.aten


def undo_row_orders(module: fx.GraphModule) -> None:
    """Multiply rows in the order in which the product is read.

    `torch.nn.MultiheadAttention` with its batch first transposes what attention returns to (length, batch, ...), as
    rows of its last product, and transposes the result back.
    """
    rewriter = Rewriter(module)
    for result in rewriter.calls(*TRANSPOSES):
        shaped = argument(result, 0)
        if permutation(result) != [1, 0, 2] or not is_call(shaped, *RESHAPES) or only_user(shaped) is not result:
            continue
        product = argument(shaped, 0)
        if is_call(product, *LINEARS) and only_user(product) is shaped:
            _swap_rows(rewriter, product, result)
    rewriter.finish()


def _swap_rows(rewriter: Rewriter, product: fx.Node, result: fx.Node) -> None:
    """Compute ``result`` (a, b, n) by a product of the rows (b, a, ...) behind their transpose, if there is one."""
    given = bound(product)
    rows = given["mat1"] if "mat1" in given else given["self"]
    x = argument(rows, 0) if is_call(rows, *RESHAPES) else rows
    has_bias_alone = "mat1" not in given or fake(given["self"]).dim() == 1
    if is_call(x, *TRANSPOSES) and fake(x).shape[:2][::-1] == fake(result).shape[:2] and has_bias_alone:
        swapped = rewriter.call(aten.permute.default, x, [1, 0, *range(2, fake(x).dim())], at=product)
        joined = rewriter.call(aten.reshape.default, swapped, list(fake(rows).shape), at=product)
        product.replace_input_with(rows, joined)
        rewriter.replace(result, rewriter.call(aten.reshape.default, product, list(fake(result).shape), at=result))
