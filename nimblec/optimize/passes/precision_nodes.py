"""Predicates of calls that casting needs, and the dtypes and shapes of their results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from nimblec.graph.definitions import DEFINITIONS
from nimblec.graph.rewriter import argument, bound, fake, is_call, owner, views
from nimblec.graph.views import reached
from nimblec.optimize.passes import autocast

aten = torch.ops.aten


def is_copy(node: fx.Node) -> bool:
    """Return whether a call returns the numbers of its argument, possibly in another order or shape."""
    return node.op == "call_function" and (views(node) is not None or autocast.name(node) == "clone")


def is_square(node: fx.Node) -> bool:
    """Return whether a call multiplies a tensor by itself."""
    return is_call(node, aten.mul.Tensor) and argument(node, 0) is argument(node, 1)


def all_users(node: fx.Node, holds: Callable[[fx.Node], bool]) -> bool:
    """Return whether a node has users, and ``holds`` is true of each."""
    return bool(node.users) and all(holds(user) for user in node.users)


def is_integer(tensor: Tensor) -> bool:
    """Return whether a tensor holds integers; bools are none."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def _tensors(value: Any) -> list[Tensor]:
    return [part for part in tree_leaves(value) if isinstance(part, Tensor)]


def dtypes_of(value: Any) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the tensors that a call returned."""
    return tuple(tensor.dtype for tensor in _tensors(value))


def shapes_of(value: Any) -> list[torch.Size]:
    """Return the shapes of the tensors that a call returned."""
    return [tensor.shape for tensor in _tensors(value)]


def rank_of(node: fx.Node) -> int:
    """Return the highest rank of the tensors that a call returned."""
    return max((tensor.dim() for tensor in _tensors(node.meta["val"])), default=0)


def is_widened(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether ``node`` only casts from ``dtype`` to float32."""
    if not is_call(node, aten._to_copy.default) or fake(node).dtype != torch.float32:
        return False
    source = fake(argument(node, 0))
    return source.dtype == dtype and source.stride() == fake(node).stride()


class Kernels:
    """Support for one half precision, ``dtype``; each call is tried once for its dtypes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._half = dtype
        self._served: dict[tuple[Any, ...], bool] = {}

    def serve(self, node: fx.Node) -> bool:
        """Return whether the device computes a call in the dtypes of its arguments, tried on zeros."""
        key = node.target, tuple(dtypes_of(n.meta["val"]) for n in node.all_input_nodes)
        if all(self._half not in dtypes for dtypes in key[1]):
            return True
        if key not in self._served:
            self._served[key] = _can_be_called(node)
        return self._served[key]


def _can_be_called(node: fx.Node) -> bool:
    function: Any = DEFINITIONS.get(node.target, node.target)
    args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda n: _zeros(n.meta["val"]))
    try:
        with torch.no_grad():
            function(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # mostly "not implemented for 'Half'"
        return False
    return True


def _zeros(value: Any) -> Any:
    """Return a real tensor of zeros like a fake one."""
    if isinstance(value, (list, tuple)):
        return [_zeros(part) for part in value]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()


_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.div.Tensor)


def added_to_scores(graph: fx.Graph) -> set[fx.Node]:
    """Return the terms of sums that a softmax is taken of, and the masks of attention calls, through views."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if autocast.name(node) in autocast.SOFTMAXES and is_call(scores := owner(node.args[0]), aten.add.Tensor):
            found |= reached(scores, _terms)
        elif autocast.name(node) in autocast.ATTENTIONS and isinstance(mask := bound(node)["attn_mask"], fx.Node):
            found |= reached(mask, _terms)
    return found


def _terms(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of a sum or product, and of a view."""
    terms: tuple[Any, ...] = node.args[:2] if is_call(node, *_ARITHMETIC) else (views(node),)
    return [term for term in terms if isinstance(term, fx.Node)]
