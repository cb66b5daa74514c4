"""Outputs in memory of their own, whatever rewrites have merged or folded."""

import torch
from torch import fx

from nimblec.optimize.rewriter import Rewriter, views

aten = torch.ops.aten


def separate_outputs(module: fx.GraphModule) -> None:
    """Copy an output that would share memory with an input, a constant or an earlier output."""
    rewriter = Rewriter(module)
    output = module.graph.output_node()
    taken: set[fx.Node] = set()

    def own(node: fx.Node) -> fx.Node:
        owner = _owner(node)
        if owner.op == "call_function" and owner not in taken:
            taken.add(owner)
            return node
        return rewriter.call(aten.clone.default, node, at=output)

    output.args = fx.map_arg(output.args, own)
    rewriter.finish()


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` may share."""
    while (viewed := views(node)) is not None:
        node = viewed
    return node
