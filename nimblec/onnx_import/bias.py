"""A matrix product and the bias that is added to it become one `addmm`.

ONNX has no linear layer for more than two dimensions: exporters write MatMul and Add.
"""

import torch
from torch import fx

aten = torch.ops.aten


def fuse_bias(graph: fx.Graph) -> None:
    """Rewrite ``add(mm(x, w), bias)`` as ``addmm(bias, x, w)``, also across a reshape of the product.

    The bias is a constant with one element for each column; nothing else reads the product.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
            continue
        for product, bias in (node.args, reversed(node.args)):
            if _fuse(graph, node, product, bias):
                break


def _fuse(graph: fx.Graph, add: fx.Node, product: fx.Node, bias: fx.Node) -> bool:
    """Whether ``add`` was rewritten as the bias of ``product``."""
    shaped = product.target is aten.reshape.default and len(product.users) == 1
    mm = product.args[0] if shaped else product
    if not isinstance(mm, fx.Node) or mm.target is not aten.mm.default or len(mm.users) != 1:
        return False
    result, columns = mm.meta["val"], mm.meta["val"].shape[1]
    vector = bias.meta["val"]
    if bias.op != "get_attr" or vector.shape not in ((columns,), (1, columns)) or vector.dtype != result.dtype:
        return False
    if add.meta["val"].shape != product.meta["val"].shape or add.meta["val"].shape[-1] != columns:
        return False
    with graph.inserting_before(add):
        fused = graph.call_function(aten.addmm.default, (bias, *mm.args))
        fused.meta = {**mm.meta, "source": f"{mm.meta['source']} + {add.meta['source']}"}
        replacement = fused
        if shaped:
            replacement = graph.call_function(aten.reshape.default, (fused, product.args[1]))
            replacement.meta = {**product.meta, "source": fused.meta["source"]}
    add.replace_all_uses_with(replacement)
    for dead in (add, product, mm) if shaped else (add, mm):
        graph.erase_node(dead)
    return True
