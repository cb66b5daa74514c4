"""Integers of a batch that a step does not use, as the targets that a loss ignores."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx


def ignored(graph: fx.Graph) -> frozenset[int]:
    """Return the integers c that the graph puts another number in place of: where(x != c, x, other)."""
    found = set()
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.where.self):
        kept, value, _ = node.args
        if kept.target is torch.ops.aten.ne.Scalar and kept.args[0] is value and isinstance(kept.args[1], int):
            found.add(kept.args[1])
    return frozenset(found)


def without(batch: Sequence[Tensor], integers: Iterable[int]) -> tuple[Tensor, ...]:
    """Replace these numbers by another of the same tensor: inputs are later drawn from each tensor's range."""
    return tuple(_without(tensor, integers) for tensor in batch)


def _without(tensor: Tensor, integers: Iterable[int]) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        return tensor
    # Few operators take uint16.
    values = tensor.to(torch.int64)
    is_kept = torch.isin(values, torch.tensor([*integers], dtype=torch.int64, device=tensor.device), invert=True)
    return torch.where(is_kept, values, values[is_kept][0]).to(tensor.dtype) if is_kept.any() else tensor
