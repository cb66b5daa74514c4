"""How long calls of a peer take that come back when the GPU is done: by the wall clock, and in a profiler's trace.

A peer whose kernels cannot be put in one CUDA graph of ours, nor between two events, is measured so.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._C._autograd import DeviceType

from bench import clocks
from bench.clocks import REPEATS, WARM_UPS

Span: TypeAlias = tuple[float, float]
"""Begin and end of a kernel, in microseconds of one clock."""

Call: TypeAlias = Callable[[], Any]

CALLS = 50
"""That are traced."""
_PAUSE_S = 0.002
_LONGEST_GAP_US = 1000.0
"""Between two kernels of a call. Those of two calls are `_PAUSE_S` apart at least."""


def wall_us(call: Call) -> list[float]:
    """Microseconds of each of many calls."""
    for _ in range(WARM_UPS):
        call()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def apart(call: Call) -> None:
    """Many calls, so far apart that `figures` can tell them from each other."""
    for _ in range(CALLS):
        call()
        time.sleep(_PAUSE_S)


def figures(spans: Iterable[Span]) -> dict[str, Any]:
    """Of `CALLS` calls that were made by `apart`: spreads, and the number of kernels of a call.

    kernels_us: from the begin of a call's first kernel to the end of its last; busy_us: the time of that in which a
    kernel runs. Where the trace is not one of so many calls, "untraced" says what it shows instead.
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
    """How long at least one of some spans lasts; they are in the order of their begins."""
    total, until = 0.0, -float("inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def by_torch(call: Call) -> list[Span]:
    """The kernels of `apart` calls of anything in this process."""
    return traced(lambda: apart(call))


def traced(work: Call) -> list[Span]:
    """The kernels that ``work`` runs until it returns, by torch's profiler; copies and fills are none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        work()
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA
        and not (event.is_user_annotation or event.name.startswith(("Memcpy", "Memset")))
    ]
