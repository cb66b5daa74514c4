"""Times of a peer's synchronous calls: by the wall clock, and in a profiler's trace.

They serve for peers whose kernels can be put neither in a CUDA graph of ours nor between two events.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._C._autograd import DeviceType

from bench import clocks
from bench.clocks import REPEATS, WARM_UPS

Span: TypeAlias = tuple[float, float]
"""Start and end of a kernel, in microseconds of one clock."""

Call: TypeAlias = Callable[[], Any]

CALLS = 50
"""Calls in a trace."""
_PAUSE_S = 0.002
_LONGEST_GAP_US = 1000.0
"""Between two kernels of one call. Those of two calls are at least `_PAUSE_S` apart."""


def wall_us(call: Call) -> list[float]:
    """Return the microseconds of each of many calls."""
    for _ in range(WARM_UPS):
        call()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def quietest_calls(call: Call, call_from_host: Call) -> dict[str, Any]:
    """Return the spreads of call_us and numpy_us: see `bench.clocks.quietest`."""
    return clocks.quietest(
        {"call": lambda: {"call_us": wall_us(call)}, "numpy": lambda: {"numpy_us": wall_us(call_from_host)}}
    )


def apart(call: Call) -> None:
    """Make many calls, with pauses by which `figures` tells them apart."""
    for _ in range(CALLS):
        call()
        time.sleep(_PAUSE_S)


def figures(spans: Iterable[Span]) -> dict[str, Any]:
    """Return the spreads of `CALLS` calls made by `apart`, and the number of kernels of a call.

    kernels_us: from the start of a call's first kernel to the end of its last; busy_us: the part of that time in which
    a kernel runs. If the trace shows another number of calls, "untraced" says so in place of figures.
    """
    calls: list[list[Span]] = []
    end = -float("inf")
    for span in sorted(spans):
        if span[0] - end > _LONGEST_GAP_US:
            calls.append([])
        calls[-1].append(span)
        end = max(end, span[1])
    if len(calls) != CALLS:
        return {"untraced": f"the profiler's trace shows {len(calls)} calls, {CALLS} were made"}
    return {
        "kernels_us": clocks.spread([max(end for _, end in call) - call[0][0] for call in calls]),
        "busy_us": clocks.spread([_covered(call) for call in calls]),
        "kernels": len(calls[-1]),
    }


def _covered(spans: Iterable[Span]) -> float:
    """Return the time that the union of spans takes; they are sorted by their start."""
    total, until = 0.0, -float("inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def by_torch(call: Call) -> list[Span]:
    """Return the kernels of `apart` calls, by torch's profiler, which sees all libraries of this process."""
    return traced(lambda: apart(call))


def traced(work: Call) -> list[Span]:
    """Return the kernels that ``work`` runs until it returns, by torch's profiler, without copies and fills."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        work()
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA
        and not (event.is_user_annotation or event.name.startswith(("Memcpy", "Memset")))
    ]
