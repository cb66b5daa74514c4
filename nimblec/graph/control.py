"""Loops and branches in a graph: one call each, whose target holds the bodies as graphs of their own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.base.options import DEFAULT_TRIP_LIMIT
from nimblec.graph.outputs import outputs_of
from nimblec.graph.state import StateSlot, set_slot
from nimblec.graph.views import with_strides
from nimblert.errors import endless


class Control(ABC):
    """The target of a call that runs ``bodies`` over *slots*, memory in which they hand values on.

    Each body takes the values in the slots before it and the ``captured`` values of the graph around it. It returns,
    after ``extra`` values, what it has not written there itself (`nimblec.graph.state`). The call returns the slots.
    """

    extra = 0
    """The number of results of a body before those for slots."""

    def __init__(self, bodies: Sequence[fx.GraphModule], slots: Sequence[Tensor]) -> None:
        self.bodies, self.slots = tuple(bodies), tuple(slots)
        # The code of a graph calls the operator by this name.
        self.__name__ = self.__qualname__ = type(self).__name__.lower()
        self.__module__ = __name__

    @abstractmethod
    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Run it, and return the slots."""

    @abstractmethod
    def with_bodies(self, rewrite: Callable[[fx.GraphModule], fx.GraphModule]) -> "Control":
        """Return the same target with its bodies rewritten."""

    def _results(self, given: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
        """Return new slots on a device, with the values ``given`` where there are any."""
        new = tuple(torch.empty_strided(s.shape, s.stride(), dtype=s.dtype, device=device) for s in self.slots)
        for slot, value in zip(new, given, strict=False):
            slot.copy_(value)
        return new


class Runner(Protocol):
    """Runs loops and branches: in eager mode, or by recording their bodies."""

    def loop(self, loop: "Loop", going: Tensor, slots: Sequence[Tensor], captured: Sequence[Tensor]) -> None:
        """Run a loop over its slots; ``going`` is the bool that is tested before each trip."""

    def switch(
        self, switch: "Switch", index: Tensor, slots: Sequence[Tensor], captured: Sequence[Sequence[Tensor]]
    ) -> None:
        """Run one body of a branch; ``captured`` are the values that each takes."""


class Loop(Control):
    """A loop while a bool is true, at most ``limit`` trips.

    The call takes the bool, the first values of the slots, and the captured values. The body returns the next bool.
    """

    extra = 1

    def __init__(self, body: fx.GraphModule, slots: Sequence[Tensor], limit: int, name: str) -> None:
        super().__init__([body], slots)
        self.limit, self.name = limit, name

    def with_bodies(self, rewrite: Callable[[fx.GraphModule], fx.GraphModule]) -> "Loop":
        """Return the same loop with its body rewritten."""
        return Loop(rewrite(self.bodies[0]), self.slots, self.limit, self.name)

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the values of the slots after the last trip."""
        start, *given = values
        count = len(self.slots)
        if isinstance(start, FakeTensor):
            return self._results((), start.device)
        slots, going = self._results(given[:count], start.device), start.clone()
        _runner.get().loop(self, going, slots, _as_taken(self.bodies[0], count, given[count:]))
        return slots


class Switch(Control):
    """A branch: the byte ``index``, which may be a bool, is the place of a body; a larger one stands for the last.

    The call takes the index and the captured values, of which body n takes those of the places ``taken[n]``. No body
    reads a slot.
    """

    def __init__(
        self, bodies: Sequence[fx.GraphModule], slots: Sequence[Tensor], taken: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(bodies, slots)
        self.taken = taken

    def with_bodies(self, rewrite: Callable[[fx.GraphModule], fx.GraphModule]) -> "Switch":
        """Return the same branch with its bodies rewritten."""
        return Switch([rewrite(body) for body in self.bodies], self.slots, self.taken)

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the values of the slots after the body that ran."""
        index, *captured = values
        if isinstance(index, FakeTensor):
            return self._results((), index.device)
        slots = self._results((), index.device)
        given = [
            _as_taken(body, len(slots), [captured[place] for place in places])
            for body, places in zip(self.bodies, self.taken, strict=True)
        ]
        _runner.get().switch(self, index, slots, given)
        return slots


def _as_taken(body: fx.GraphModule, before: int, captured: Sequence[Tensor]) -> list[Tensor]:
    """Return captured values in the layouts that the body's kernels expect: rewrites around it may have changed them.

    ``before`` is the number of the body's arguments before these.
    """
    expected = [node.meta["val"] for node in body.graph.nodes if node.op == "placeholder"][before:]
    return [
        with_strides(value.to(like.dtype), like.stride()) for value, like in zip(captured, expected, strict=True)
    ]


def run_body(
    control: Control,
    body: fx.GraphModule,
    slots: Sequence[Tensor],
    captured: Sequence[Tensor],
    call: Callable[[fx.GraphModule, Sequence[Tensor]], Any],
) -> tuple[Tensor, ...]:
    """Run a body once, put its results into the slots, and return those before them; ``call`` runs a graph."""
    results = call(body, [*slots, *captured])
    # A body that wrote its slots itself returns no values for them.
    for slot, value in zip(slots, results[control.extra :], strict=False):
        slot.copy_(value)
    return tuple(results[: control.extra])


class _Eager:
    """Decides by values."""

    def loop(self, loop: Loop, going: Tensor, slots: Sequence[Tensor], captured: Sequence[Tensor]) -> None:
        trips = 0
        while bool(going):
            if trips == loop.limit:
                raise endless(loop.name, loop.limit)
            trips += 1
            (going,) = run_body(loop, loop.bodies[0], slots, captured, _interpreted)

    def switch(
        self, switch: Switch, index: Tensor, slots: Sequence[Tensor], captured: Sequence[Sequence[Tensor]]
    ) -> None:
        number = min(int(index), len(switch.bodies) - 1)
        run_body(switch, switch.bodies[number], slots, captured[number], _interpreted)


def _interpreted(body: fx.GraphModule, args: Sequence[Tensor]) -> Any:
    return fx.Interpreter(body).run(*args)


trip_limit: ContextVar[int] = ContextVar("trip_limit", default=DEFAULT_TRIP_LIMIT)
"""The limit of loops whose number of trips is not a constant."""

_EAGER = _Eager()
_runner: ContextVar[Runner] = ContextVar("runner", default=_EAGER)


@contextmanager
def run_by(runner: Runner) -> Iterator[None]:
    """Have ``runner`` run the loops and branches inside the block."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


def calls(module: fx.GraphModule) -> Iterator[tuple[fx.Node, Control]]:
    """Yield the calls of loops and branches in a graph, with their targets, without those in bodies."""
    yield from ((node, node.target) for node in module.graph.nodes if isinstance(node.target, Control))


def graphs(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph and all bodies in it."""
    yield module
    for _, target in calls(module):
        for body in target.bodies:
            yield from graphs(body)


def mark_slots(body: fx.GraphModule, control: Control) -> None:
    """Mark the body's first arguments as state, which a body that writes in place writes itself."""
    arguments = [node for node in body.graph.nodes if node.op == "placeholder"]
    assert len(outputs_of(body)) == control.extra + len(control.slots)
    for number, (argument, slot) in enumerate(zip(arguments, control.slots, strict=False)):
        set_slot(argument, StateSlot(name=f"slot {number}", tensor=slot, output=control.extra + number, is_held=False))
