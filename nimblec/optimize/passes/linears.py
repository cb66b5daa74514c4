"""Linears on one input joined into one matrix product, mostly queries, keys and values."""

from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, bound, fake, is_call, only_user
from nimblec.graph.views import fixed_strides, replace_by_slices
from nimblec.graph.vocabulary import LINEARS

aten = torch.ops.aten


def join_linears(module: fx.GraphModule) -> None:
    """Join linears with constant weights that read the same matrix into one, and slice its columns."""
    rewriter = Rewriter(module)
    fixed = fixed_strides(module.graph)  # rows of a slice have gaps
    groups: dict[object, list[fx.Node]] = {}
    for node in rewriter.calls(*LINEARS):
        if node not in fixed and _has_own_weights(rewriter, node):
            given = bound(node)
            left = given["mat1"] if "mat1" in given else given["self"]
            groups.setdefault((node.target, left, fake(node).dtype), []).append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            _join(rewriter, nodes)
    rewriter.finish()


def _has_own_weights(rewriter: Rewriter, node: fx.Node) -> bool:
    """Return whether only this linear reads its weights: others would keep them, and store them twice."""
    given = bound(node)
    weights = [given["mat2"]]
    if is_call(node, aten.addmm.default):
        if given["alpha"] != 1 or given["beta"] != 1 or fake(given["self"]).shape != fake(node).shape[1:]:
            return False
        weights.append(given["self"])
    return all(rewriter.value(weight) is not None and only_user(weight) is node for weight in weights)


def _join(rewriter: Rewriter, nodes: list[fx.Node]) -> None:
    first = nodes[0]
    given = [bound(node) for node in nodes]
    weight = rewriter.constant(_beside(_constants(rewriter, given, "mat2")), at=first)
    if is_call(first, aten.addmm.default):
        bias = rewriter.constant(torch.cat(_constants(rewriter, given, "self")), at=first)
        joined = rewriter.call(aten.addmm.default, bias, given[0]["mat1"], weight, at=first)
    else:
        joined = rewriter.call(aten.mm.default, given[0]["self"], weight, at=first)
    replace_by_slices(rewriter, nodes, joined)


def _constants(rewriter: Rewriter, given: list[dict[str, Any]], name: str) -> list[Tensor]:
    values = (rewriter.value(arguments[name]) for arguments in given)
    return [value for value in values if value is not None]


def _beside(weights: list[Tensor]) -> Tensor:
    """Concatenate matrices (K, N) by their columns, with the memory order of the first one."""
    if weights[0].stride(0) == 1:
        return torch.cat([w.t() for w in weights]).t()
    return torch.cat(weights, 1)
