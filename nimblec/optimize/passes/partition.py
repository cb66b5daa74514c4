"""Regions: maximal groups of calls that generated kernels compute, each of which can be one op.

A region can run as a whole: its inputs exist before its first call, and no call outside lies on a
path between two of its calls. It is connected, or makes the same calls on several parts of one
result, as rotary embeddings do. Pooling and the like may only begin a region. A single call is a
region where ATen's own kernels for it are slow. Views belong to no region: each region makes those
that it reads, which costs nothing. In a training step a region of a layer's forward pass takes in
no call of the backward pass: it would have to keep values that the backward pass can compute.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from nimblec.base.places import LOSS, Phase, joined, places
from nimblec.graph.fusible import is_fusible, is_slow_alone, is_stencil
from nimblec.graph.node_order import reorder
from nimblec.graph.outputs import outputs_of
from nimblec.graph.rewriter import Rewriter, argument, readers
from nimblec.graph.state import WRITES_STATE, slots
from nimblec.graph.views import is_view

aten = torch.ops.aten


Region: TypeAlias = tuple[fx.Node, ...]
"""Calls in the order of the graph: at least two, or one that ATen computes slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extract:
    """A region as a graph of its own.

    ``module`` takes the values of ``inputs`` and returns a tuple of the values of ``outputs``; these and ``calls``
    are nodes of the original graph. ``written`` maps inputs that are state to their next values, which the region
    writes over them.
    """

    module: fx.GraphModule
    calls: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    written: Mapping[fx.Node, fx.Node]


def partition(module: fx.GraphModule, may_join: Callable[[fx.Node], bool] = is_fusible) -> tuple[Region, ...]:
    """Return the regions of a graph, disjoint; contracting them all leaves the graph without a cycle."""
    Rewriter(module).propagate()
    units = _units(module.graph, may_join)
    groups = _Groups(units)
    for number, unit in enumerate(units.producers):
        if units.fusible[number] and not is_stencil(units.nodes[number]):
            for producer in sorted(unit, reverse=True):
                if units.fusible[producer] and not is_kept(units.nodes[producer], units.nodes[number]):
                    groups.merge(producer, number)
    for first, second in list(_alike(units, groups)):
        if not is_kept(units.nodes[first], units.nodes[second]):
            groups.merge(first, second)
    found = ([units.nodes[n] for n in group] for group in groups.all() if units.fusible[group[0]])
    return tuple(tuple(calls) for calls in found if len(calls) > 1 or is_slow_alone(calls[0]))


def _alike(units: "_Units", groups: "_Groups") -> Iterator[tuple[int, int]]:
    """Yield a call each of two groups that make the same calls on the same results: one kernel computes both."""
    known: dict[object, int] = {}
    for group in groups.all():
        read = frozenset[int]().union(*(units.producers[number] for number in group)).difference(group)
        if units.fusible[group[0]] and read:
            values = pytree.tree_leaves([units.nodes[number].meta["val"] for number in group])
            key = read, tuple(value.shape for value in values), tuple(units.nodes[number].target for number in group)
            if (first := known.setdefault(key, group[0])) != group[0]:
                yield first, group[0]


def is_kept(call: fx.Node, later: fx.Node) -> bool:
    """Return whether a call is of the forward pass, and a later one of the backward pass or the update."""
    (kept, *_), (read, *_) = (places(node.meta.get("source", "")) for node in (call, later))
    return kept.phase is Phase.FORWARD and kept.layer != LOSS and read.phase is not Phase.FORWARD


def extract(region: Region, written: Mapping[fx.Node, fx.Node] = MappingProxyType({})) -> Extract:
    """Copy a region, with the views that it reads and the parts of its results, into a graph of its own.

    ``written`` maps the state that it may write to the result that is its next value.
    """
    inside = frozenset(region)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node in inside or is_view(node) or whole(node) in inside:
                copies[node] = graph.node_copy(node, copy)
            else:
                with graph.inserting_after(copies[inputs[-1]] if inputs else graph._root):
                    copies[node] = graph.placeholder(f"input_{len(inputs)}")
                copies[node].meta = dict(node.meta)
                inputs.append(node)
        return copies[node]

    for call in region:
        copy(call)
    outputs = tuple(node for node in _read_outside(region) if node not in written.values() or _is_read(node, inside))
    results = tuple(copy(node) for node in outputs)
    for state, value in written.items():
        graph.call_function(aten.copy_.default, (copy(state), copy(value)))
    graph.output(results)
    return Extract(
        module=fx.GraphModule({}, graph), calls=region, inputs=tuple(inputs), outputs=outputs, written=written
    )


def replace(module: fx.GraphModule, replacements: Mapping[OpOverload, Sequence[Extract]]) -> None:
    """Replace regions by calls of the ops that compute them, which take and return lists of tensors.

    A call stands where the first call of its region stood. An op that writes state also takes a list of it, and comes
    after all other readers of it.
    """
    graph = module.graph
    parts: dict[fx.Node, fx.Node] = {}
    written: dict[fx.Node, fx.Node] = {}
    for target, extracts in replacements.items():
        for extracted in extracts:
            lists = (extracted.inputs, extracted.written) if extracted.written else (extracted.inputs,)
            # At the end of the graph, regions would run after all other calls, whose results would be kept for long.
            with graph.inserting_before(extracted.calls[0]):
                call = graph.call_function(target, tuple(map(list, lists)))
                call.meta["val"] = [node.meta["val"] for node in extracted.outputs]
                own = (*extracted.outputs, *extracted.written.values())[0].meta.get("source", "")
                call.meta["source"] = joined((node.meta.get("source", "") for node in extracted.calls), own)
                for i, node in enumerate(extracted.outputs):
                    parts[node] = graph.call_function(operator.getitem, (call, i))
                    parts[node].meta = dict(node.meta)
            written |= dict.fromkeys(extracted.written, call)
    _return_state(module, written)
    for node, part in parts.items():
        node.replace_all_uses_with(part)
    _sort(graph, {})
    graph.eliminate_dead_code()
    # There may be no such order until dead calls are gone.
    if written:
        _sort(graph, written)
    graph.lint()


def _is_read(value: fx.Node, inside: frozenset[fx.Node]) -> bool:
    """Return whether a reader outside its region reads a state's next value, except the output that returns it."""
    output = value.graph.output_node()
    others = (user for user in value.users if user is not output)
    return list(argument(output, 0)).count(value) > 1 or any(_is_outside(user, inside) for user in others)


def _return_state(module: fx.GraphModule, written: Collection[fx.Node]) -> None:
    """Return written state itself as its next value."""
    outputs = list(outputs_of(module))
    for state, slot in slots(module).items():
        if state in written:
            assert slot.output is not None
            outputs[slot.output] = state
    module.graph.output_node().args = (tuple(outputs),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """The calls that run, by number, and for each the numbers of the calls whose results it reads.

    Views and parts of a result are no units: they belong to the call whose result they show.
    """

    nodes: tuple[fx.Node, ...]
    producers: tuple[frozenset[int], ...]
    fusible: tuple[bool, ...]


def _units(graph: fx.Graph, may_join: Callable[[fx.Node], bool]) -> _Units:
    numbers: dict[fx.Node, int] = {}
    nodes: list[fx.Node] = []
    producers: list[frozenset[int]] = []
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node) or whole(node) is not node:
            continue
        numbers[node] = len(nodes)
        nodes.append(node)
        before = [*makers(node)]
        # A writer comes after all readers of the value that it overwrites.
        if WRITES_STATE in node.meta:
            before += (reader for reader in readers(argument(node, 0)) if reader is not node)
        producers.append(frozenset(numbers[n] for n in before if n in numbers))
    return _Units(nodes=tuple(nodes), producers=tuple(producers), fusible=tuple(map(may_join, nodes)))


def makers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls, inputs and constants in whose memory the arguments of ``node`` lie."""
    for source in node.all_input_nodes:
        if is_view(source):
            yield from makers(source)
        else:
            yield whole(source)


def whole(node: fx.Node) -> fx.Node:
    """Return the call of several results of which ``node`` is one; any other node itself."""
    if node.target is operator.getitem and not is_view(node):
        call: fx.Node = argument(node, 0)
        return call
    return node


class _Groups:
    """Disjoint groups of units, merged as long as the graph of groups has no cycle.

    For each group, ``_before`` is the set of groups that it depends on, as bits, and ``_reads`` the set of
    those that it depends on directly.
    """

    def __init__(self, units: _Units) -> None:
        self._members: dict[int, list[int]] = {n: [n] for n in range(len(units.nodes))}
        self._group = list(range(len(units.nodes)))
        self._reads = [sum(1 << p for p in producers) for producers in units.producers]
        self._before: list[int] = []
        for reads in self._reads:
            self._before.append(reads | _union(self._before, reads))

    def merge(self, first: int, second: int) -> None:
        """Merge the groups of two units, unless a third group lies on a path between them."""
        a, b = self._group[first], self._group[second]
        if a == b or self._between(a, b) or self._between(b, a):
            return
        both = (1 << a) | (1 << b)
        self._before[a] = (self._before[a] | self._before[b]) & ~both
        self._reads[a] = (self._reads[a] | self._reads[b]) & ~both
        for unit in self._members[b]:
            self._group[unit] = a
        self._members[a] = sorted(self._members[a] + self._members.pop(b))
        for group in self._members:
            if group != a and self._before[group] & both:
                self._before[group] = (self._before[group] & ~(1 << b)) | (1 << a) | self._before[a]
                if self._reads[group] >> b & 1:
                    self._reads[group] = (self._reads[group] & ~(1 << b)) | (1 << a)

    def all(self) -> Iterable[list[int]]:
        """Return the units of each group in order, groups by their first unit."""
        return sorted(self._members.values())

    def _between(self, a: int, b: int) -> bool:
        """Return whether ``b`` depends on ``a`` through a third group."""
        through = _union(self._before, self._reads[b] & ~(1 << a))
        return bool(through >> a & 1)


def _union(sets: list[int], chosen: int) -> int:
    """Return the union of the sets whose bits are set in ``chosen``."""
    union = 0
    while chosen:
        low = chosen & -chosen
        union |= sets[low.bit_length() - 1]
        chosen ^= low
    return union


def _read_outside(region: Region) -> Iterator[fx.Node]:
    """Yield the results of a region, or parts of them, that are read outside, directly or through a view."""
    inside = frozenset(region)
    for call in region:
        parts = [user for user in call.users if user.target is operator.getitem] or [call]
        yield from (part for part in parts if _leaves(part, inside))


def _leaves(node: fx.Node, inside: frozenset[fx.Node]) -> bool:
    return any(_is_outside(user, inside) for user in node.users)


def _is_outside(user: fx.Node, inside: frozenset[fx.Node]) -> bool:
    return _leaves(user, inside) if is_view(user) else user not in inside


def _sort(graph: fx.Graph, written: Mapping[fx.Node, fx.Node]) -> None:
    """Sort nodes topologically, writers of state after all its other readers."""
    pairs = (
        (reader, writer)
        for state, writer in written.items()
        for reader in readers(state)
        if reader is not writer and reader.op != "output"
    )
    is_sorted = reorder(graph, pairs)
    assert is_sorted, "regions depend on each other"
