"""Where the state of a model lies: which values are written straight into its memory, and in which order.

The model takes a tensor of the state as an input and gives its next value as an output (`ModelState`). The
node that makes the next value writes it where the tensor lies, and so do those before it that change a few
rows of it in place, if whoever reads the older values can run before them. Otherwise the next value is
copied there at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from nimblec.cpu.constants import TensorType
from nimblec.frontend.model_state import ModelState
from nimblec.frontend.onnx import model_nodes
from nimblec.graph.topological_order import topological_order
from nimblert.embedded import in_place

_ROWS = frozenset({"ScatterElements", "ScatterND"})
"""Operators that change a part of a tensor: out of place they copy all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes of a model in an order in which state can be written.

    ``places`` are values that lie in the memory of a state, by the value with which it came in; ``copies`` the
    values that are copied at the end, each with the state that it goes to.
    """

    nodes: tuple[NodeProto, ...]
    places: Mapping[str, str]
    copies: tuple[tuple[str, str], ...]


def place_state(
    nodes: Sequence[NodeProto], state: Sequence[ModelState], types: Mapping[str, TensorType], returned: Sequence[str]
) -> Placement:
    """The placement of the ``state`` in a model of these nodes; ``returned`` are outputs that are not state."""
    graph = _Order(nodes)
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
    return Placement(nodes=tuple(nodes[i] for i in graph.order()), places=places, copies=tuple(copies))


def _chains(
    tensor: ModelState, graph: "_Order", types: Mapping[str, TensorType], taken: set[str]
) -> Iterator[list[str]]:
    """The values that may be written into the state's memory one after the other, the longest list first."""
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
        if _may_overlap(before, tensor.input):
            yield rest


def _changed(node: NodeProto) -> str:
    """The value of which a node changes a part in place, or ""."""
    return node.input[0] if not node.domain and node.op_type in _ROWS else ""


def _may_overlap(node: NodeProto, value: str) -> bool:
    """Whether a node may write where ``value`` lies: it does not read it, or only as it does what it overwrites."""
    positions = {i for i, name in enumerate(node.input) if name == value}
    return value not in model_nodes.read_names(node) or (
        bool(positions) and positions <= set(in_place.operands(node.domain, node.op_type))
    )


def _earlier(old: str, chain: Sequence[str], graph: "_Order", returned: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The (before, after) of nodes that must keep that order for each value to be read before the next replaces it.

    A value that the model returns is read when all is done: it comes after everything, itself too.
    """
    for value, following in zip((old, *chain), chain, strict=False):
        writer = graph.maker[following]
        yield from ((reader, writer) for reader in graph.readers.get(value, ()) if reader != writer)
        if value in returned:
            yield writer, writer


class _Order:
    """The nodes of a model, and what must come before what."""

    def __init__(self, nodes: Sequence[NodeProto]) -> None:
        self.nodes = nodes
        self.maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
        self.readers: dict[str, list[int]] = {}
        self._after: list[set[int]] = [set() for _ in nodes]
        for i, node in enumerate(nodes):
            for name in model_nodes.read_names(node):
                self.readers.setdefault(name, []).append(i)
                if name in self.maker:
                    self._after[self.maker[name]].add(i)

    def add(self, edges: Sequence[tuple[int, int]]) -> bool:
        """Have the first node of each pair before the second; False, and nothing changes, where that is no order."""
        known = [after.copy() for after in self._after]
        for before, after in edges:
            self._after[before].add(after)
        if len(self.order()) == len(self.nodes):
            return True
        self._after = known
        return False

    def order(self) -> list[int]:
        """All nodes in order, as they were where nothing else is demanded; fewer in a circle."""
        return topological_order(self._after)
