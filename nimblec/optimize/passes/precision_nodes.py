"""Predicates of calls that casting needs, and the dtypes and shapes of their results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from nimblec.graph.rewriter import argument, fake, is_call, views
from nimblec.optimize.passes import autocast

aten = torch.ops.aten


def is_copy(node: fx.Node) -> bool:
    """Whether a call returns the numbers of its argument, possibly in another order or shape."""
    return node.op == "call_function" and (views(node) is not None or autocast.name(node) == "clone")


def is_square(node: fx.Node) -> bool:
    """Whether a call multiplies a tensor by itself."""
    return is_call(node, aten.mul.Tensor) and argument(node, 0) is argument(node, 1)


def all_users(node: fx.Node, holds: Callable[[fx.Node], bool]) -> bool:
    """Whether a node has users, and ``holds`` is true of each."""
    return bool(node.users) and all(holds(user) for user in node.users)


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor holds integers; bools are none."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def _tensors(value: Any) -> list[Tensor]:
    return [part for part in tree_leaves(value) if isinstance(part, Tensor)]


def dtypes_of(value: Any) -> tuple[torch.dtype, ...]:
    """The dtypes of the tensors that a call returned."""
    return tuple(tensor.dtype for tensor in _tensors(value))


def shapes_of(value: Any) -> list[torch.Size]:
    """The shapes of the tensors that a call returned."""
    return [tensor.shape for tensor in _tensors(value)]


def rank_of(node: fx.Node) -> int:
    """The highest rank of the tensors that a call returned."""
    return max((tensor.dim() for tensor in _tensors(node.meta["val"])), default=0)


def is_widened(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether ``node`` only casts from ``dtype`` to float32."""
    if not is_call(node, aten._to_copy.default) or fake(node).dtype != torch.float32:
        return False
    source = fake(argument(node, 0))
    return source.dtype == dtype and source.stride() == fake(node).stride()
