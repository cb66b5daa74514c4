"""State that regions write where it lies, instead of returning a next value that is copied there.

An optimizer's step for a weight, and the running statistics of a batch norm, are then one kernel and no copy.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from nimblec.graph.outputs import outputs_of
from nimblec.graph.rewriter import readers
from nimblec.graph.state import slots
from nimblec.graph.views import is_view
from nimblec.graph.vocabulary import is_like
from nimblec.optimize.regions.partition import Region, makers, whole

aten = torch.ops.aten

_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)
"""Inductor (2.15) writes over what they change, even where another call still reads it."""

_ROUNDED = (aten.ceil, aten.floor, aten.round, aten.trunc, aten.nan_to_num)
"""Calls that give integers back as they are."""

_ARGUMENTS = (aten.copy, aten.clone, aten._to_copy, aten.pow, *_ROUNDED)
"""Calls for whose result Inductor may take an argument as it is, after another write has changed it."""


def written_state(module: fx.GraphModule, regions: Sequence[Region]) -> list[dict[fx.Node, fx.Node]]:
    """For each region the state that it may write, and the result that is its next value.

    All others that read the state can come before, whatever else is written.
    """
    order, outputs = _Order(module.graph, regions), outputs_of(module)
    found: list[dict[fx.Node, fx.Node]] = [{} for _ in regions]
    taken = set()
    for state, slot in slots(module).items():
        value = state if slot.output is None else outputs[slot.output]
        writer = order.region(value)
        if writer is None or value in taken or not is_like(value, state) or state in outputs:
            continue
        if not _computes(value) or any(call.target in _SCATTERS for call in regions[writer].calls):
            continue
        others = [node for node in readers(state) if not is_view(node)]
        if order.put_before(others, writer):
            found[writer][state] = value
            taken.add(value)
    return found


def _computes(value: fx.Node) -> bool:
    """Whether each element of a next value is computed, and not taken from elsewhere."""
    target = whole(value).target
    assert isinstance(target, OpOverload)
    if target is aten._native_batch_norm_legit_functional.default:
        return True
    return torch.Tag.pointwise in target.tags and target.overloadpacket not in _ARGUMENTS


class _Order:
    """Which regions, and calls outside of them, come after which; each region has its place in the list as number."""

    def __init__(self, graph: fx.Graph, regions: Sequence[Region]) -> None:
        self._regions = len(regions)
        self._numbers = {call: number for number, region in enumerate(regions) for call in region.calls}
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
        """The number of the region that a value is a result of, if any; a view is none."""
        if is_view(value):
            return None
        number = self._numbers.get(whole(value), self._regions)
        return number if number < self._regions else None

    def put_before(self, nodes: Sequence[fx.Node], region: int) -> bool:
        """Have calls come before a region; False, and nothing changes, where one of them comes after it."""
        numbers = {self._numbers[whole(node)] for node in nodes} - {region}
        if numbers & _reached(self._after, region):
            return False
        for number in numbers:
            self._after[number].add(region)
        return True


def _reached(after: Mapping[int, set[int]], start: int) -> set[int]:
    """What comes after ``start``."""
    found: set[int] = set()
    waiting = deque([start])
    while waiting:
        for number in after[waiting.popleft()] - found:
            found.add(number)
            waiting.append(number)
    return found
