"""Measure plans on this CPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from nimblec.machine import processor_count
from nimblert import golden
from nimblert.cpu.backend import CpuBackend
from nimblert.cpu.host_memory import HostWorking
from nimblert.plan import Plan

_TARGET_S = 0.2
_LIMIT_S = 2.0
_WARM_UPS = 2


class CpuTimer:
    """Times plans in this process. Streams are threads: more of them than processors are not worth trying."""

    def __init__(self) -> None:
        self.max_streams = processor_count()

    def command_durations(self, plan: Plan) -> list[int]:
        """Nanoseconds of each command of a plan of one stream, the median of several runs."""
        with _loaded(plan, singly=True) as loaded:
            rows = [loaded.profile() for _ in range(_WARM_UPS)]
            rows = [loaded.profile() for _ in range(_count(sum(rows[-1]) / 1e9))]
        return [max(1, int(d)) for d in np.median(np.array(rows), axis=0)]

    def duration(self, plan: Plan) -> int:
        """Nanoseconds of one run, the median of several."""
        with _loaded(plan) as loaded:
            first = [loaded.seconds() for _ in range(_WARM_UPS)]
            times = [loaded.seconds() for _ in range(_count(first[-1]))]
        return round(float(np.median(times)) * 1e9)


def _count(seconds: float) -> int:
    """Runs to measure: as many as fit into 0.2 s, from 5 to 100; fewer of a slow program, within 2 s."""
    most, least = (int(budget / max(seconds, 1e-6)) for budget in (_TARGET_S, _LIMIT_S))
    return max(1, min(least, 5), min(most, 100))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A program whose runs all begin with the first state: a counter that goes on would leave its cache."""

    backend: CpuBackend
    working: HostWorking

    def profile(self) -> list[int]:
        """Nanoseconds of each command of a run."""
        self.working.kept.reset()
        return self.backend.profile()

    def seconds(self) -> float:
        """Of a run."""
        self.working.kept.reset()
        begin = time.perf_counter()
        self.backend.run()
        return time.perf_counter() - begin


@contextmanager
def _loaded(plan: Plan, *, singly: bool = False) -> Iterator[_Loaded]:
    program = plan.programs[0]
    working = HostWorking(plan)
    backend = CpuBackend(plan, program, working=working, singly=singly)
    try:
        drawn = golden.draw_inputs(program, 0)
        for tensor, view in zip(program.inputs, backend.inputs, strict=True):
            np.copyto(view, drawn[tensor.name])
        yield _Loaded(backend, working)
    finally:
        backend.close()
