"""Requests that no generated kernel would compute together with a neighbour."""

import operator
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from torch import fx

from nimblec.graph.fusible import is_fusible
from nimblec.graph.rewriter import argument
from nimblec.graph.views import is_view


class HasNeighbours(Protocol):
    """A request for one launch."""

    @property
    def calls(self) -> tuple[fx.Node, ...]:
        """The calls that one launch computes."""

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The values that they read."""

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The values that others read."""


Request = TypeVar("Request", bound=HasNeighbours)


def alone(requests: Sequence[Request]) -> list[Request]:
    """Return the requests without a fusible neighbour outside such requests; needs the values of one `propagate`."""
    inside = {call for request in requests for call in request.calls}
    left = [request for request in requests if not any(_is_generated(n, inside) for n in _neighbours(request))]
    return left if len(left) == len(requests) else alone(left)


def _is_generated(node: fx.Node, inside: set[fx.Node]) -> bool:
    return node.op == "call_function" and node not in inside and is_fusible(node)


def _neighbours(request: HasNeighbours) -> Iterator[fx.Node]:
    """Yield the calls whose results are read, and those that read the results, through views."""
    for source in request.sources:
        yield _computed(source)
    for result in request.results:
        yield from _readers(result)


def _computed(node: fx.Node) -> fx.Node:
    while _is_part(node):
        node = argument(node, 0)
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if _is_part(user):
            yield from _readers(user)
        else:
            yield user


def _is_part(node: fx.Node) -> bool:
    """Return whether a node has the memory of its argument."""
    return node.op == "call_function" and (is_view(node) or node.target is operator.getitem)
