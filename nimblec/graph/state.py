"""State in a graph of pure calls: an argument is its value before a run, an output its value after it."""

from dataclasses import dataclass

from torch import Tensor, fx


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlot:
    """A tensor that outlives a run, whose value is an argument of the graph.

    ``output`` is the number of the output that is its next value; None where the graph only reads it.
    """

    name: str
    tensor: Tensor
    output: int | None


def slots(module: fx.GraphModule) -> dict[fx.Node, StateSlot]:
    """The state among the arguments of a graph."""
    arguments = (node for node in module.graph.nodes if node.op == "placeholder")
    return {node: node.meta[_KEY] for node in arguments if _KEY in node.meta}


def set_slot(argument: fx.Node, slot: StateSlot) -> None:
    """Mark an argument as state."""
    argument.meta[_KEY] = slot


_KEY = "state"
WRITES_STATE = "writes_state"
"""The key in a node's ``meta`` that marks a call which will write over the value that it changes. All readers of that
value come before it, and must stay there."""
