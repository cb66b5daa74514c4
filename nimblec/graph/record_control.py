"""Record loops and branches: each body by a recorder of its own, and then one call in the graph around it."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.control import Loop, Switch, mark_slots
from nimblec.graph.recorder import Recorder, graph_module

Step: TypeAlias = Callable[[Recorder, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]
"""A trip under a recorder: from the values of the slots to the next bool and the next values."""

Branch: TypeAlias = Callable[[Recorder], Sequence[Tensor]]
"""The values of a branch under a recorder."""


def record_loop(
    recorder: Recorder, start: Tensor, first: Sequence[Tensor], step: Step, *, limit: int
) -> list[Tensor]:
    """Record a loop while a bool is true, and return the values after its last trip.

    ``start`` is the first bool, ``first`` the values before the first trip. Raises UnsupportedModelError where a trip
    changes a shape.
    """
    inner = recorder.inside()
    with _disable_current_modes(), inner:
        slots = [inner.receive(f"slot_{number}", _on_meta(value)) for number, value in enumerate(first)]
        going, values = step(inner, slots)
        inner.output([going.to(torch.bool), *_fitting(values, slots, "a trip of the loop")])
    loop = Loop(_body(inner), slots, limit, f"the loop in {recorder.source or 'the model'}")
    mark_slots(loop.bodies[0], loop)
    return recorder.record_call(loop, [start.to(torch.bool), *first, *inner.captured], slots)


def run_loop(
    start: Tensor, first: Sequence[Tensor], step: Step, *, limit: int, is_known: bool
) -> list[Tensor]:
    """Return what `record_loop` does, under the recorder of the calling code; at once if all values are known."""
    recorder = _get_current_dispatch_mode()
    assert isinstance(recorder, Recorder)
    if not is_known:
        return record_loop(recorder, start, first, step, limit=limit)
    values: Sequence[Tensor] = first
    while bool(start):
        start, values = step(recorder, values)
    return list(values)


def record_switch(recorder: Recorder, index: Tensor, branches: Sequence[Branch]) -> list[Tensor]:
    """Record a branch by a bool or a byte, and return its values.

    Raises UnsupportedModelError where branches differ in shapes.
    """
    inners = [recorder.inside() for _ in branches]
    slots: list[Tensor] = []
    for inner, branch in zip(inners, branches, strict=True):
        with _disable_current_modes(), inner:
            values = list(branch(inner))
            slots = slots or [_on_meta(value) for value in values]
            inner.output(_fitting(values, slots, "another branch"))
        with inner.graph.inserting_before(next(iter(inner.graph.nodes))):
            for number, slot in enumerate(slots):
                inner.receive(f"slot_{number}", slot)
    captured = {id(value): value for inner in inners for value in inner.captured}
    places = {key: place for place, key in enumerate(captured)}
    taken = [[places[id(value)] for value in inner.captured] for inner in inners]
    switch = Switch([_body(inner) for inner in inners], slots, taken)
    for body in switch.bodies:
        mark_slots(body, switch)
    return recorder.record_call(switch, [index, *captured.values()], slots)


Trip: TypeAlias = Callable[[Recorder, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""A trip over rows under a recorder: from the states and one row of each tensor to the next states and new rows."""


def record_rows(
    recorder: Recorder,
    first: Sequence[Tensor],
    scanned: Sequence[Tensor],
    stacked: Sequence[Tensor],
    trip: Trip,
    *,
    begin: int = 0,
) -> list[Tensor]:
    """Record a loop over the rows of ``scanned`` from ``begin`` on.

    Returns the last states and one tensor like each of ``stacked``, whose rows are the other results of the trips.
    """
    count, states = scanned[0].shape[0], len(first)

    def step(inner: Recorder, slots: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        number, state, stacks = slots[0], slots[1 : 1 + states], slots[1 + states :]
        place, following = number.reshape(1), number + 1
        rows = [value.index_select(0, place).squeeze(0) for value in scanned]
        results = trip(inner, state, rows)
        made = zip(stacks, results[states:], strict=True)
        copied = [stack.index_copy(0, place, row.unsqueeze(0)) for stack, row in made]
        return following < count, [following, *results[:states], *copied]

    empty = [torch.zeros(tuple(value.shape), dtype=value.dtype) for value in stacked]
    values = [torch.tensor(begin), *first, *empty]
    return record_loop(recorder, torch.tensor(begin < count), values, step, limit=count)[1:]


def _body(inner: Recorder) -> fx.GraphModule:
    """Return the module of a body; the recorder around it must not record how constants move to the device."""
    with _disable_current_modes():
        return graph_module(inner, "Body")


def _on_meta(value: Tensor) -> Tensor:
    """Return a dense tensor without memory, of the shape and type of a value."""
    with _disable_current_modes():
        return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _fitting(values: Sequence[Tensor], slots: Sequence[Tensor], what: str) -> list[Tensor]:
    fitting = []
    for value, slot in zip(values, slots, strict=True):
        if value.shape != slot.shape:
            raise UnsupportedModelError(
                f"{what} makes a value of shape {list(value.shape)} of one of shape {list(slot.shape)}: a CUDA plan "
                "holds fixed shapes"
            )
        fitting.append(value if value.dtype == slot.dtype else value.to(slot.dtype))
    return fitting
