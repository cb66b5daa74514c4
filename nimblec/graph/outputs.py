"""Outputs in memory of their own and in the order they had, whatever rewrites have merged, folded or laid anew."""

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, fake, owner
from nimblec.graph.views import lies_as

aten = torch.ops.aten


Strides = tuple[tuple[int, ...], ...]


def keep_outputs(module: fx.GraphModule, strides: Strides) -> None:
    """Outputs lie in memory of their own, with the strides that they had; all values are inferred anew."""
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
    """The strides of each output."""
    return tuple(tuple(fake(node).stride()) for node in outputs_of(module))


def restore_strides(module: fx.GraphModule, strides: Strides) -> None:
    """Copy an output whose elements no longer lie in memory as ``strides`` say, contiguous or channels last."""
    rewriter = Rewriter(module)
    output = module.graph.output_node()
    for node, wanted in zip(outputs_of(module), strides, strict=True):
        if lies_as(fake(node), wanted):
            continue
        for memory_format in (torch.contiguous_format, torch.channels_last):
            if memory_format is torch.channels_last and fake(node).dim() != 4:
                continue
            copy = rewriter.call(aten.clone.default, node, memory_format=memory_format, at=output)
            if lies_as(fake(copy), wanted):
                output.replace_input_with(node, copy)
                break
            rewriter.graph.erase_node(copy)
    rewriter.finish()


def outputs_of(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """The values that a graph returns, in order."""
    return tuple(argument(module.graph.output_node(), 0))
