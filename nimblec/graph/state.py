"""State in a graph of pure calls: an argument is its value before a run, an output its value after it.

Scratch memory of a kernel is none: a constant that the kernel writes, and leaves as it was.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlot:
    """A tensor that outlives a run, whose value is an argument of the graph.

    ``output`` is the number of the output that is its next value; None where the graph only reads it. One that no
    module holds (``is_held``) is memory of the loop or branch around the graph, and ``tensor`` stands for it.
    """

    name: str
    tensor: Tensor
    output: int | None
    is_held: bool = True


def slots(module: fx.GraphModule) -> dict[fx.Node, StateSlot]:
    """Return the state among the arguments of a graph."""
    arguments = (node for node in module.graph.nodes if node.op == "placeholder")
    return {node: node.meta[_KEY] for node in arguments if _KEY in node.meta}


def set_slot(argument: fx.Node, slot: StateSlot) -> None:
    """Mark an argument as state."""
    argument.meta[_KEY] = slot


def set_scratch(constant: fx.Node) -> None:
    """Mark a constant as scratch memory."""
    constant.meta[_SCRATCH] = True


def scratch(module: nn.Module) -> Iterator[Tensor]:
    """Yield the scratch memory of the graphs in a module."""
    for graph_module in module.modules():
        if isinstance(graph_module, fx.GraphModule):
            for node in graph_module.graph.nodes:
                if node.op == "get_attr" and node.meta.get(_SCRATCH):
                    yield graph_module.get_buffer(node.target)


_KEY = "state"
_SCRATCH = "nimblec.scratch"
WRITES_STATE = "writes_state"
"""The key in a node's ``meta`` that marks a call which will write over the value that it changes. All readers of that
value come before it, and must stay there."""
