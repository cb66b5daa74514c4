"""Loops and branches of torch.export, its higher-order operators, as calls of one graph (`nimblec.graph.control`)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.control import trip_limit
from nimblec.graph.record_control import record_loop, record_rows, record_switch
from nimblec.graph.recorder import Recorder


class Trace(Protocol):
    """Runs the graph of a body under a recorder."""

    def __call__(self, body: fx.GraphModule, recorder: Recorder, given: Sequence[Any], /) -> Any:
        """Return the results of the body for these arguments."""


def _tensors(values: Any) -> list[Tensor]:
    leaves: list[Any] = pytree.tree_leaves(values)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise UnsupportedModelError(f"a loop or branch carries {leaf!r}: expected tensors alone")
    return leaves


def _branch(trace: Trace, recorder: Recorder, args: Sequence[Any], _results: Any) -> list[Tensor]:
    condition, if_true, if_false, operands = args
    if not isinstance(condition, Tensor):
        return _tensors(trace(if_true if condition else if_false, recorder, operands))
    branches = [lambda inner, body=body: _tensors(trace(body, inner, operands)) for body in (if_false, if_true)]
    return record_switch(recorder, condition.to(torch.bool), branches)


def _while(trace: Trace, recorder: Recorder, args: Sequence[Any], _results: Any) -> list[Tensor]:
    condition, body, carried, others = args

    def goes_on(inner: Recorder, values: Sequence[Tensor]) -> Tensor:
        return _tensors(trace(condition, inner, (*values, *others)))[0]

    def step(inner: Recorder, slots: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        values = _tensors(trace(body, inner, (*slots, *others)))
        return goes_on(inner, values), values

    first = _tensors(carried)
    return record_loop(recorder, goes_on(recorder, first), first, step, limit=trip_limit.get())


def _scan(trace: Trace, recorder: Recorder, args: Sequence[Any], results: Any) -> list[Tensor]:
    combine, first, scanned, others = args

    def step(inner: Recorder, state: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        return _tensors(trace(combine, inner, (*state, *rows, *others)))

    return record_rows(recorder, _tensors(first), _tensors(scanned), results[len(first) :], step)


def _map(trace: Trace, recorder: Recorder, args: Sequence[Any], results: Any) -> list[Tensor]:
    body, mapped, others = args

    def step(inner: Recorder, _state: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        return _tensors(trace(body, inner, (*rows, *others)))

    return record_rows(recorder, [], _tensors(mapped), results, step)


def _associative_scan(trace: Trace, recorder: Recorder, args: Sequence[Any], results: Any) -> list[Tensor]:
    combine, scanned, *others = args
    given = _tensors(scanned)
    first = [value.select(0, 0) for value in given]

    def step(inner: Recorder, state: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        sums = _tensors(trace(combine, inner, (*state, *rows, *(others[0] if others else ()))))
        return [*sums, *(value.clone() for value in sums)]

    stacks = record_rows(recorder, first, given, results, step, begin=1)[len(first) :]
    with recorder:
        return [torch.cat([value[:1], stack[1:]]) for value, stack in zip(given, stacks, strict=True)]


def has_control(module: Any) -> bool:
    """Return whether an exported graph calls one of these operators."""
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return any(isinstance(n.target, HigherOrderOperator) and n.target.name() in CONTROL for n in nodes)


CONTROL: dict[str, Callable[[Trace, Recorder, Sequence[Any], Any], list[Tensor]]] = {
    "cond": _branch,
    "while_loop": _while,
    "scan": _scan,
    "map_impl": _map,
    "associative_scan": _associative_scan,
}
"""The function that records each operator, from its arguments and its results as torch.export has them."""
