"""Copies that only change the memory order of values, where nothing needs that order."""

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, fake, is_call, views
from nimblec.graph.views import fixed_strides, is_view
from nimblec.graph.vocabulary import ATTENTION, POOLS, is_tagged_pointwise

aten = torch.ops.aten


def drop_copies(module: fx.GraphModule) -> None:
    """Drop a ``clone`` that only attention and pointwise calls read, directly or through views.

    Joined queries, keys and values are then read from their product in place, as where a module keeps its
    batch second. All views of the clone must be views of its argument too.
    """
    rewriter = Rewriter(module)
    rewriter.propagate()
    fixed = fixed_strides(module.graph)
    for node in rewriter.calls(aten.clone.default):
        seen = None if node in fixed else _seen(node)
        if seen is not None:
            _try_without(rewriter, node, seen)
    rewriter.finish()


def _seen(node: fx.Node) -> list[fx.Node] | None:
    """Return the views of a copy in order, views of views too; None where another call may depend on its strides."""
    found: list[fx.Node] = []
    todo = [node]
    while todo:
        for user in todo.pop(0).users:
            if user.op == "call_function" and views(user) is not None and is_view(user):
                found.append(user)
                todo.append(user)
            elif not _reads_any_order(user):
                return None
    return found


def _reads_any_order(node: fx.Node) -> bool:
    return is_call(node, ATTENTION, *POOLS) or is_tagged_pointwise(node)


def _try_without(rewriter: Rewriter, node: fx.Node, seen: list[fx.Node]) -> None:
    """Drop the copy, unless one of its views would need a copy itself, or rows of attention would have gaps."""
    source = argument(node, 0)
    users = list(node.users)
    if any(source in user.all_input_nodes for user in users):
        return
    node.replace_all_uses_with(source)
    for view in seen:
        view.meta["val"] = rewriter.infer(view)
    attended = [read for view in (source, *seen) for read in view.users if is_call(read, ATTENTION)]
    rows = {q for read in attended for q in read.args[:3] if isinstance(q, fx.Node)}
    if all(is_view(view) for view in seen) and all(fake(q).stride(-1) == 1 for q in rows):
        rewriter.graph.erase_node(node)
        return
    for user in users:
        user.replace_input_with(source, node)
    for view in seen:
        view.meta["val"] = rewriter.infer(view)
