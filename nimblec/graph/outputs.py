"""Outputs keep their strides, and have memory of their own, whatever rewrites have merged, folded or laid out anew."""

from collections.abc import Sequence

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, fake, owner
from nimblec.graph.views import lies_as

aten = torch.ops.aten


Strides = tuple[tuple[int, ...], ...]


def keep_outputs(module: fx.GraphModule, strides: Strides) -> None:
    """Give outputs memory of their own and the strides that they had; infer all values again."""
    Rewriter(module).propagate()
    restore_strides(module, strides)
    separate_outputs(module)


def separate_outputs(module: fx.GraphModule) -> None:
    """Copy an output that would share memory with an input, a constant or an earlier output."""
    rewriter = Rewriter(module)
    output = module.graph.output_node()
    taken: set[fx.Node] = set()

    def own(node: fx.Node) -> fx.Node:
        first = owner(node)
        if first.op == "call_function" and first not in taken:
            taken.add(first)
            return node
        return rewriter.call(aten.clone.default, node, at=output)

    output.args = fx.map_arg(output.args, own)
    rewriter.finish()


def output_strides(module: fx.GraphModule) -> Strides:
    """Return the strides of each output."""
    return tuple(tuple(fake(node).stride()) for node in outputs_of(module))


def restore_strides(module: fx.GraphModule, strides: Strides) -> None:
    """Copy an output whose elements no longer lie in memory as ``strides`` say; strides with gaps are not restored."""
    rewriter = Rewriter(module)
    output = module.graph.output_node()
    for node, wanted in zip(outputs_of(module), strides, strict=True):
        if not lies_as(fake(node), wanted):
            copy = _copied(rewriter, node, wanted, at=output)
            if lies_as(fake(copy), wanted):
                output.replace_input_with(node, copy)
    rewriter.finish()


def _copied(rewriter: Rewriter, node: fx.Node, strides: Sequence[int], *, at: fx.Node) -> fx.Node:
    """Return a dense copy whose axes have the order in memory of these strides."""
    like = fake(node)
    formats = (torch.contiguous_format, *([torch.channels_last] if like.dim() == 4 else []))
    for memory_format in formats:
        if lies_as(torch.empty(like.shape, device="meta", memory_format=memory_format), strides):
            return rewriter.call(aten.clone.default, node, memory_format=memory_format, at=at)
    order = sorted(range(like.dim()), key=lambda axis: -strides[axis])
    permuted = rewriter.call(aten.permute.default, node, order, at=at)
    copy = rewriter.call(aten.clone.default, permuted, memory_format=torch.contiguous_format, at=at)
    return rewriter.call(aten.permute.default, copy, [order.index(axis) for axis in range(like.dim())], at=at)


def outputs_of(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """Return the values that a graph returns, in order."""
    return tuple(argument(module.graph.output_node(), 0))
