"""State that regions write in place, instead of returning a next value to be copied.

An optimizer's step for a weight, and the running statistics of a batch norm, are then one kernel and no copy.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from nimblec.graph.fusible import is_pointwise
from nimblec.graph.outputs import outputs_of
from nimblec.graph.rewriter import bound, readers
from nimblec.graph.state import slots
from nimblec.graph.views import is_view, reached
from nimblec.graph.vocabulary import is_like
from nimblec.optimize.passes.partition import Region, makers, whole

aten = torch.ops.aten

_BATCH_NORM = aten._native_batch_norm_legit_functional.default

_BROADCASTS = (aten.unsqueeze.default, aten.expand.default)
"""Views that broadcast a weight for each channel."""

_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)
"""Calls for which Inductor (2.15) writes over their argument, even where another call still reads it."""

_ROUNDED = (aten.ceil, aten.floor, aten.round, aten.trunc, aten.nan_to_num)
"""Calls that return integers unchanged."""

_ARGUMENTS = (aten.copy, aten.clone, aten._to_copy, aten.pow, *_ROUNDED)
"""Calls for whose result Inductor may return an argument itself, which another write may have changed by then."""


def written_state(module: fx.GraphModule, regions: Sequence[Region]) -> list[dict[fx.Node, fx.Node]]:
    """Return, for each region, the state that it may write, with the result that is its next value.

    All other readers of each state can come before the region that writes it, for all states together.
    """
    order, outputs = _Order(module.graph, regions), outputs_of(module)
    found: list[dict[fx.Node, fx.Node]] = [{} for _ in regions]
    taken = set()
    for state, slot in slots(module).items():
        value = state if slot.output is None else outputs[slot.output]
        writer = order.region(value)
        if writer is None or value in taken or not is_like(value, state) or state in outputs:
            continue
        calls = frozenset(regions[writer])
        if not _computes(value) or not _is_read_in_place(state, value, calls):
            continue
        if any(call.target in _SCATTERS for call in calls):
            continue
        others = [node for node in readers(state) if not is_view(node)]
        if _is_apart(state, value, found[writer], calls) and order.put_before(others, writer):
            found[writer][state] = value
            taken.add(value)
    return found


def _is_apart(
    state: fx.Node, value: fx.Node, written: Mapping[fx.Node, fx.Node], calls: frozenset[fx.Node]
) -> bool:
    """Return False if the next values of this state and of one ``written`` each depend on the other's present value.

    In such a swap Inductor (2.11) may read what it has written. A weight depends on its momentum's next value alone.
    """
    of_state = _made_of(state, value, calls)
    return not any(other in of_state and value in _made_of(held, other, calls) for held, other in written.items())


def _made_of(state: fx.Node, value: fx.Node, calls: frozenset[fx.Node]) -> set[fx.Node]:
    """Return a state and what calls compute from it, other than from its next value."""

    def made(node: fx.Node) -> list[fx.Node]:
        return _among((user for user in node.users if user is not value and not _keeps_statistics(user)), calls)

    return reached(state, made)


def _is_read_in_place(state: fx.Node, value: fx.Node, calls: frozenset[fx.Node]) -> bool:
    """Return whether a region computes pointwise with a state, and only broadcasts it where that is for each channel.

    Torch 2.11 fuses a loop that writes state with one that reads it in another order, and reads a view of a value
    on the way to the next value after the state was written over.
    """
    on_the_way = reached(value, lambda node: _among(node.all_input_nodes, calls))

    def follows(node: fx.Node, *, alone: bool = True) -> bool:
        return all(reads(user, alone=alone and user not in on_the_way) for user in _among(node.users, calls))

    def reads(user: fx.Node, *, alone: bool) -> bool:
        if user.target in _BROADCASTS and alone:
            return follows(user)
        if is_view(user):
            return not any(whole(reader) in calls for reader in readers(user))
        return _keeps_statistics(user) or (is_pointwise(user) and follows(user, alone=alone))

    return follows(state)


def _among(nodes: Iterable[fx.Node], calls: frozenset[fx.Node]) -> list[fx.Node]:
    """Return the nodes that are views, or results of these calls."""
    return [node for node in nodes if is_view(node) or whole(node) in calls]


def _keeps_statistics(call: fx.Node) -> bool:
    """Return whether it is a batch norm in training: each statistic it reads is used for its own next value only."""
    return call.target is _BATCH_NORM and bool(bound(call)["training"])


def _computes(value: fx.Node) -> bool:
    """Return whether each element of a next value is computed, not copied from elsewhere."""
    target = whole(value).target
    assert isinstance(target, OpOverload)
    if target is _BATCH_NORM:
        return True
    return torch.Tag.pointwise in target.tags and target.overloadpacket not in _ARGUMENTS


class _Order:
    """The order of regions, numbered by their place in the list, and of the calls outside of them."""

    def __init__(self, graph: fx.Graph, regions: Sequence[Region]) -> None:
        self._regions = len(regions)
        self._numbers = {call: number for number, region in enumerate(regions) for call in region}
        calls = [node for node in graph.nodes if node.op == "call_function" and not is_view(node)]
        for node in calls:
            if whole(node) is node:
                self._numbers.setdefault(node, len(self._numbers) + self._regions)
        self._after: dict[int, set[int]] = {number: set() for number in self._numbers.values()}
        for node in calls:
            if whole(node) is node:
                for maker in makers(node):
                    self._add(maker, node)

    def _add(self, before: fx.Node, after: fx.Node) -> None:
        if before in self._numbers and self._numbers[before] != self._numbers[after]:
            self._after[self._numbers[before]].add(self._numbers[after])

    def region(self, value: fx.Node) -> int | None:
        """Return the number of the region that computes a value, if any; None for a view."""
        if is_view(value):
            return None
        number = self._numbers.get(whole(value), self._regions)
        return number if number < self._regions else None

    def put_before(self, nodes: Sequence[fx.Node], region: int) -> bool:
        """Put calls before a region; False, and nothing changes, where one of them depends on it."""
        numbers = {self._numbers[whole(node)] for node in nodes} - {region}
        later = reached(region, self._after.__getitem__)
        if numbers & later:
            return False
        for number in numbers:
            self._after[number].add(region)
        return True
