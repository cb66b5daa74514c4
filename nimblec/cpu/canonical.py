"""A canonical order and canonical names for a model that ONNX Runtime has optimised.

Its passes keep nodes in tables by address, so the nodes that it adds, and the numbers in their names, come in another
order in each process.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

from onnx import GraphProto, NodeProto

from nimblec.graph.topological_order import topological_order
from nimblec.onnx_import import model_nodes
from nimblec.onnx_import.model_nodes import first_output, read_names, subgraphs

_COUNTED = re.compile(r"(.+)_token_\d+")
"""ONNX Runtime's form of a name that is taken; the first of several has no number."""


def canonicalize(graph: GraphProto, original: GraphProto) -> None:
    """Sort the nodes of a graph and of the bodies in it, and renumber the names that ONNX Runtime has numbered.

    A node goes to the place, in the ``original``, of the first node that needs it, if the dependencies allow that.
    """
    _sort_bodies(graph, original)
    nodes = _sorted(graph, original)
    names = _numbered(graph, nodes)
    del graph.node[:]
    graph.node.extend(nodes)
    _rename(graph, names)


def _sort_bodies(graph: GraphProto, original: GraphProto) -> None:
    """Sort the nodes of all bodies, which ONNX Runtime's optimiser may leave in no topological order."""
    before = {first_output(node): subgraphs(node) for node in original.node}
    for node in graph.node:
        bodies = subgraphs(node)
        originals = before.get(first_output(node), ())
        for body, unchanged in zip(bodies, originals if len(originals) == len(bodies) else bodies, strict=True):
            _sort_bodies(body, unchanged)
            nodes = _sorted(body, unchanged)
            del body.node[:]
            body.node.extend(nodes)


def _rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    for value in (*graph.initializer, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.name = names.get(node.name, node.name)
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for body in subgraphs(node):
            _rename(body, names)


def _sorted(graph: GraphProto, original: GraphProto) -> list[NodeProto]:
    """Return the nodes in topological order."""
    nodes = list(graph.node)
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    after: list[set[int]] = [set() for _ in nodes]
    for index, node in enumerate(nodes):
        for name in read_names(node):
            if name in makers:
                after[makers[name]].add(index)
    known = {name: place for place, node in enumerate(original.node) for name in node.output}

    @cache
    def place(index: int) -> int:
        own = [known[name] for name in nodes[index].output if name in known]
        return min(own or map(place, after[index]), default=len(known))

    needed = list(_depth_first(graph, makers))
    found = dict.fromkeys(range(len(nodes)), len(nodes)) | {index: number for number, index in enumerate(needed)}
    # Readers come before their sources, so that no recursion is deep.
    for index in reversed(needed):
        place(index)
    order = sorted(range(len(nodes)), key=lambda index: (place(index), found[index], index))
    rank = {index: number for number, index in enumerate(order)}
    return [nodes[order[number]] for number in topological_order([[rank[n] for n in after[index]] for index in order])]


def _depth_first(graph: GraphProto, makers: Mapping[str, int]) -> Iterator[int]:
    """Yield the nodes that the outputs need, each after its sources, in an order that depends on the graph alone."""
    done: set[int] = set()
    names = [value.name for value in graph.output]
    read = {name for node in graph.node for name in read_names(node)}
    names += sorted(name for node in graph.node for name in node.output if name not in read)
    for name in names:
        waiting = [(makers[name], False)] if name in makers else []
        while waiting:
            index, is_ready = waiting.pop()
            if index in done:
                continue
            if is_ready:
                done.add(index)
                yield index
                continue
            sources = (makers[read] for read in reversed(read_names(graph.node[index])) if read in makers)
            waiting += [(index, True), *((source, False) for source in sources if source not in done)]


def _numbered(graph: GraphProto, nodes: Sequence[NodeProto]) -> dict[str, str]:
    """Return new names for the numbered ones, by old name, numbered in the order in which the nodes use them."""
    fixed = {value.name for value in (*graph.input, *graph.output)}
    every = [inner for node in nodes for inner in (node, *chain(*map(model_nodes.nodes, subgraphs(node))))]
    fixed |= {value.name for node in every for body in subgraphs(node) for value in (*body.input, *body.output)}
    used = dict.fromkeys(name for node in every for name in (node.name, *node.input, *node.output) if name)
    beginnings = {match[1] for name in used if (match := _COUNTED.fullmatch(name))}
    counted = [name for name in used if name not in fixed and _beginning(name) in beginnings]
    taken = fixed | (used.keys() - set(counted))
    numbers: defaultdict[str, int] = defaultdict(int)
    names = {}
    for name in counted:
        beginning = _beginning(name)
        new = beginning
        while new in taken:
            new = f"{beginning}_token_{numbers[beginning]}"
            numbers[beginning] += 1
        taken.add(new)
        names[name] = new
    return names


def _beginning(name: str) -> str:
    match = _COUNTED.fullmatch(name)
    return match[1] if match else name
