"""The order of a graph's nodes."""

from collections.abc import Iterable
from itertools import chain, pairwise

from torch import fx

from nimblec.graph.topological_order import topological_order


def reorder(graph: fx.Graph, pairs: Iterable[tuple[fx.Node, fx.Node]] = ()) -> bool:
    """Sort nodes topologically, with the first of each pair before the second and the output last; stable otherwise.

    False, and nothing changes, where there is no such order.
    """
    nodes = list(graph.nodes)
    place = {node: n for n, node in enumerate(nodes)}
    after = [{place[user] for user in node.users} for node in nodes]
    for before, behind in chain(pairs, ((node, nodes[-1]) for node in nodes[:-1])):
        after[place[before]].add(place[behind])
    order = topological_order(after)
    if len(order) < len(nodes):
        return False
    for first, second in pairwise(nodes[n] for n in order):
        first.append(second)
    return True
