"""The arguments that calls of ATen write."""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from nimblec.graph.rewriter import owner, readers

_RUNNING_STATISTICS = {
    "aten.native_batch_norm.default": (3, 4, 5),
    "aten.cudnn_batch_norm.default": (3, 4, 5),
}
"""Operators whose schemas do not declare that they write running statistics: positions of (mean, var, training)."""


def written_positions(func: OpOverload, args: Sequence[Any]) -> Collection[int]:
    """Return the positions of the arguments that a call with these positional ``args`` writes."""
    formals = enumerate(func._schema.arguments)
    declared = [at for at, formal in formals if formal.alias_info is not None and formal.alias_info.is_write]
    mean, var, training = _RUNNING_STATISTICS.get(str(func), (0, 0, 0))
    return [*declared, mean, var] if training and args[training] else declared


def written_values(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that a call writes; of a list its items."""
    for at in written_positions(func, args):
        yield from tree_leaves(args[at] if at < len(args) else kwargs.get(func._schema.arguments[at].name))


def written_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that a node writes."""
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        values = written_values(node.target, node.args, node.kwargs)
        yield from (value for value in values if isinstance(value, fx.Node))


def writers(value: fx.Node) -> list[fx.Node]:
    """Return the calls that write a value, itself no view, or one of its views."""
    return [node for node in readers(value) if any(owner(written) is value for written in written_nodes(node))]


def may_be_written(value: fx.Node) -> bool:
    """Return whether a call writes a value or one of its views, or may: a call of something other than ATen."""
    return bool(writers(value)) or any(map(_is_foreign, readers(value)))


def _is_foreign(node: fx.Node) -> bool:
    return node.op != "output" and node.target is not operator.getitem and not isinstance(node.target, OpOverload)
