"""Constant folding: calls whose arguments are all constant are made at compile time."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from nimblec.graph.rewriter import Rewriter, called, constant_of, fake, is_call, is_pure
from nimblec.graph.vocabulary import ALLOCATIONS

aten = torch.ops.aten

GROWTH = 1 << 20
"""Bytes by which a folded constant may exceed its arguments: filling memory in each run is cheaper than loading more
weights."""


_FILLED = {aten.new_zeros.default: 0, aten.new_ones.default: 1}
"""Calls that take nothing but dtype and device from a tensor, and their values."""


def fill_empty(module: fx.GraphModule) -> None:
    """Replace uninitialised tensors by zeros, and small ones of one number by calls that depend on nothing.

    Nothing writes into either. Circular padding begins with an empty result, the masks of shifted windows with zeros.
    """
    rewriter = Rewriter(module)
    for node in list(module.graph.nodes):
        if is_call(node, *ALLOCATIONS) or (is_call(node, *_FILLED) and _nbytes([fake(node)]) <= GROWTH):
            made, value = fake(node), _FILLED.get(node.target, 0)
            how = {"dtype": made.dtype, "device": made.device}
            rewriter.replace(node, rewriter.call(aten.full.default, list(made.shape), value, at=node, **how))
    rewriter.finish()


def fold_constants(module: fx.GraphModule) -> None:
    """Replace calls that depend on constants alone by constants, where that does not enlarge the weights."""
    rewriter = Rewriter(module)
    known: dict[fx.Node, Any] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            known[node] = constant_of(module, node)
        elif node.op == "call_function" and is_pure(node) and all(n in known for n in node.all_input_nodes):
            result = called(node, known.__getitem__)
            if _is_small(result, [known[n] for n in node.all_input_nodes]):
                known[node] = result
    for node, value in known.items():
        if node.op == "call_function" and isinstance(value, Tensor) and any(user not in known for user in node.users):
            rewriter.replace(node, rewriter.constant(value, at=node))
    rewriter.finish()


def _is_small(result: Any, inputs: list[Any]) -> bool:
    results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    # An expanded view has more elements than memory: it stays a call, which costs nothing.
    if any(torch._debug_has_internal_overlap(t) == 1 for t in results):
        return False
    return _nbytes(results) <= _nbytes(tree_leaves(inputs)) + GROWTH


def _nbytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
