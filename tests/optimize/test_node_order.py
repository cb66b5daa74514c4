"""Nodes of a graph in an order, and walks from one to the next."""

import torch
from torch import fx

from nimblec.graph.node_order import reorder
from nimblec.graph.views import reached


def _graph() -> tuple[fx.Graph, list[fx.Node]]:
    """Return two calls of one input, of which the output reads the first."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = graph.call_function(torch.sin, (x,)), graph.call_function(torch.cos, (x,))
    return graph, [x, first, second, graph.output(first)]


def test_the_first_of_a_pair_comes_before_the_second() -> None:
    graph, (x, first, second, output) = _graph()
    assert reorder(graph, [(second, first)])
    assert list(graph.nodes) == [x, second, first, output]


def test_nodes_that_need_no_other_order_stay() -> None:
    graph, nodes = _graph()
    assert reorder(graph)
    assert list(graph.nodes) == nodes


def test_what_is_read_comes_first() -> None:
    graph, (x, first, second, output) = _graph()
    first.args = (second,)
    assert reorder(graph)
    assert list(graph.nodes) == [x, second, first, output]


def test_without_an_order_nothing_changes() -> None:
    graph, nodes = _graph()
    _, first, second, output = nodes
    assert not reorder(graph, [(first, second), (second, first)])
    assert not reorder(graph, [(output, second)])
    assert list(graph.nodes) == nodes


def test_a_walk_finds_its_start_and_ends_in_a_circle() -> None:
    assert reached(1, {1: [2, 3], 2: [4], 3: [4], 4: [2], 5: [1]}.__getitem__) == {1, 2, 3, 4}
