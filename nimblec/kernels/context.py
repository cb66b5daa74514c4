"""Choose between nearly equal tilings by the time of all kernels of a graph in their order.

A launch starts while the one before it ends (programmatic dependent launch), and shares multiprocessors with it. In a
chain of its own kind this shows for itself alone: of tilings that take equal times there, one may leave its neighbours
less room than another.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import constant_of, fake
from nimblec.kernels.call import Call, Pool, as_meta, example
from nimblec.kernels.choosing import Times, key_of
from nimblec.kernels.launch import ops

_MARGIN = 0.004
"""The share of the time of all kernels that another tiling must win; medians of equal graphs differ by less."""
_WORTH = 0.01
"""The share that all of them together must win."""
_LEAST = 0.01
"""The share of all kernels' time that the launches of a request take from which others than its fastest are tried."""
_STAY = 0.5
"""The share of the L2 cache that weights may take to stay there from run to run, beside activations."""


class ChainTimer(Protocol):
    """Times calls in one graph, as `nimblec.kernels.timing.GraphTimer` does."""

    def chain(self, calls: Sequence[Callable[[], object]], *, flush: bool) -> float:
        """Return the microseconds of all calls; ``flush`` empties the cache before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Tells times that ``timer`` measures once; ``times`` keeps them.

    The ``fingerprint`` tells what they depend on besides the launches.
    """

    timer: ChainTimer
    times: Times
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contest:
    """Calls that compute the same request, by the names of their tilings; the chosen one comes first.

    ``microseconds`` is the time of a launch of that one.
    """

    key: str
    calls: Mapping[str, Call]
    microseconds: float


def in_context(
    module: fx.GraphModule, contests: Iterable[Contest], clock: Clock, pool: Pool, *, l2: int
) -> dict[str, str]:
    """Return the tilings, by the keys of their contests, by which all kernels of a graph take less time than as chosen.

    The kernels run on random numbers, one after another. Contests are decided one by one, the one with the most time
    first, and equal requests have the same tiling. Weights are in the cache, of ``l2`` bytes, if all have room there.
    Empty where they win less than a hundredth: not worth another recording.
    """
    chain = _Chain(module, contests, clock, pool, l2)
    chosen: dict[str, str] = {}
    before = least = chain.time(chosen)
    for contest in chain.contests(least):
        for name in list(contest.calls)[1:]:
            time = chain.time({**chosen, contest.key: name})
            if time < least * (1 - _MARGIN):
                chosen[contest.key], least = name, time
    return chosen if least < before * (1 - _WORTH) else {}


class _Chain:
    """The kernels of a graph in their order; those that are no chosen call of a contest stay as they are."""

    def __init__(
        self, module: fx.GraphModule, contests: Iterable[Contest], clock: Clock, pool: Pool, l2: int
    ) -> None:
        self._clock = clock
        self._pool = pool
        of_launch = {_launch_of(_first(contest)): contest for contest in contests}
        self._nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target in ops()]
        self._launches = [_launch_at(node) for node in self._nodes]
        self._places = [of_launch.get(launch) for launch in self._launches]
        self._placed = {place.key: place for place in self._places if place}
        self._counts = Counter(place.key for place in self._places if place)
        self._fixed = cache(partial(_call, module))
        self._timed = cache(self._made)
        nbytes = sum(self._counts[key] * _first(contest).weights_nbytes for key, contest in self._placed.items())
        self._flush = nbytes > _STAY * l2

    def contests(self, microseconds: float) -> list[Contest]:
        """Return the contests whose launches take a visible share of all ``microseconds``, the largest first."""
        times = {key: self._counts[key] * contest.microseconds for key, contest in self._placed.items()}
        ranked = sorted(times, key=times.__getitem__, reverse=True)
        return [self._placed[key] for key in ranked if times[key] > _LEAST * microseconds]

    def time(self, chosen: Mapping[str, str]) -> float:
        """Return the microseconds of all kernels, with the ``chosen`` tilings by key; measure those not yet known."""
        clock = self._clock
        key = key_of((clock.fingerprint, self._launches, self._flush, sorted(chosen.items())))
        if key not in clock.times:
            clock.times[key] = round(1000 * clock.timer.chain(list(self._calls(chosen)), flush=self._flush))
            torch.cuda.empty_cache()
        return clock.times[key] / 1000

    def _calls(self, chosen: Mapping[str, str]) -> Iterator[Callable[[], object]]:
        passed: Counter[str] = Counter()
        for place, node in zip(self._places, self._nodes, strict=True):
            if place is None:
                yield self._fixed(node)
            else:
                yield partial(self._timed(place, chosen.get(place.key, "")), passed[place.key])
                passed[place.key] += 1

    def _made(self, contest: Contest, name: str) -> Callable[[int], object]:
        return contest.calls.get(name, _first(contest)).timed(self._pool, self._counts[contest.key])


def _first(contest: Contest) -> Call:
    return next(iter(contest.calls.values()))


def _call(module: fx.GraphModule, node: fx.Node) -> Callable[[], object]:
    """Return the call of a node, on its constants and on random numbers."""

    def value(source: fx.Node) -> Tensor:
        return constant_of(module, source) if source.op == "get_attr" else example(fake(source), fake(source).device)

    args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), value)
    op: Any = node.target
    return partial(op, *args, **kwargs)


def _launch_of(call: Call) -> str:
    """Return a text that is equal for calls of the same kernel on tensors alike."""
    args, kwargs = call.arguments(lambda leaf: _likeness(as_meta(leaf)))
    return f"{call.op} {args} {sorted(kwargs.items())}"


def _launch_at(node: fx.Node) -> str:
    """Return the same, of a node."""
    args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda source: _likeness(fake(source)))
    return f"{node.target} {args} {sorted(kwargs.items())}"


def _likeness(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()
