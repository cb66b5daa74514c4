"""Placement of state: which values are written straight into its memory, and in which order.

The model takes a tensor of the state as an input and returns its next value as an output (`ModelState`); so does the
body of a loop what it carries (`nimblec.cpu.control`). The node that computes the next value writes it into the
tensor's memory, and so do the nodes before it that change some rows in place, if all readers of the older values can
run before them. Otherwise the next value is copied there at the end.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from onnx import NodeProto

from nimblec.cpu.constants import TensorType
from nimblec.graph.topological_order import topological_order
from nimblec.onnx_import import model_nodes
from nimblert.check import onnx_operators

_ROWS = frozenset({"ScatterElements", "ScatterND"})
"""Operators that change a part of a tensor; out of place they copy all of it."""


class Kept(Protocol):
    """What is found in some memory before a run, and left there by it: two values of a model; "" leaves the first."""

    @property
    def input(self) -> str:
        """The value before."""

    @property
    def output(self) -> str:
        """The value after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes of a model in an order in which state can be written.

    ``places`` maps each value that is written into the memory of a state to the input with its first value;
    ``copies`` are (value, input) pairs to be copied at the end.
    """

    nodes: tuple[NodeProto, ...]
    places: Mapping[str, str]
    copies: tuple[tuple[str, str], ...]


def place_state(
    nodes: Sequence[NodeProto],
    state: Sequence[Kept],
    types: Mapping[str, TensorType],
    returned: Sequence[str],
    carried: Mapping[str, str] = MappingProxyType({}),
) -> Placement:
    """Return the placement of ``state`` in a model of these nodes; ``returned`` are the outputs that are not state.

    ``carried`` are the last values that loops carry, each with the first one, in whose place a loop may keep it.
    """
    graph = _Order(nodes, carried)
    places: dict[str, str] = {}
    copies = []
    for tensor in state:
        if not tensor.output:
            continue
        taken = {*returned, *places, *(other.output for other in state if other is not tensor)}
        for chain in _chains(tensor, graph, types, taken):
            if graph.add(list(_earlier(tensor.input, chain, graph, returned))):
                places |= dict.fromkeys(chain, tensor.input)
                break
        else:
            copies.append((tensor.output, tensor.input))
    # A node that works in place divides a stretch; what can come before it does.
    order = graph.order({graph.maker[value] for value in places})
    return Placement(nodes=tuple(nodes[i] for i in order), places=places, copies=tuple(copies))


def _chains(
    tensor: Kept, graph: "_Order", types: Mapping[str, TensorType], taken: set[str]
) -> Iterator[list[str]]:
    """Yield lists of values that may be written into the state's memory one after the other, the longest first."""
    if tensor.output not in graph.maker or tensor.output in taken:
        return
    chain = [tensor.output]
    while (value := _changed(graph.nodes[graph.maker[chain[0]]])) in graph.maker:
        if value in taken or types[value] != types[tensor.output]:
            break
        chain.insert(0, value)
    for length in dict.fromkeys((len(chain), 1)):
        rest = chain[-length:]
        before = graph.nodes[graph.maker[rest[0]]]
        if graph.carried.get(rest[0]) == tensor.input or _may_overlap(before, tensor.input):
            yield rest


def _changed(node: NodeProto) -> str:
    """Return the value that a node updates in part, or ""."""
    return node.input[0] if not node.domain and node.op_type in _ROWS else ""


def _may_overlap(node: NodeProto, value: str) -> bool:
    """Return whether a node may write over ``value``: it does not read it, or only as an operand it may overwrite."""
    positions = {i for i, name in enumerate(node.input) if name == value}
    return value not in model_nodes.read_names(node) or (
        bool(positions) and positions <= set(onnx_operators.overwritable(node.domain, node.op_type))
    )


def _earlier(old: str, chain: Sequence[str], graph: "_Order", returned: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield (before, after) pairs of nodes, so that each value is read before the next one replaces it.

    A value that the model returns is read last of all: its pair is a cycle, which no order satisfies.
    """
    for value, following in zip((old, *chain), chain, strict=False):
        writer = graph.maker[following]
        yield from ((reader, writer) for reader in graph.readers.get(value, ()) if reader != writer)
        if value in returned:
            yield writer, writer


class _Order:
    """The nodes of a model and the order in which they may run."""

    def __init__(self, nodes: Sequence[NodeProto], carried: Mapping[str, str]) -> None:
        self.nodes = nodes
        self.carried = carried
        self.maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
        self.readers: dict[str, list[int]] = {}
        self._after: list[set[int]] = [set() for _ in nodes]
        for i, node in enumerate(nodes):
            for name in model_nodes.read_names(node):
                self.readers.setdefault(name, []).append(i)
                if name in self.maker:
                    self._after[self.maker[name]].add(i)

    def add(self, edges: Sequence[tuple[int, int]]) -> bool:
        """Put the first node of each pair before the second; False, and no change, if that makes a cycle."""
        known = [after.copy() for after in self._after]
        for before, after in edges:
            self._after[before].add(after)
        if len(self.order()) == len(self.nodes):
            return True
        self._after = known
        return False

    def order(self, late: Collection[int] = ()) -> list[int]:
        """Return all nodes in a topological order, ``late`` ones as late as they may; fewer if there is a cycle."""
        return topological_order(self._after, late)
