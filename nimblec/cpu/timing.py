"""Measure plans on this CPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from nimblec.machine import processor_count
from nimblert import golden
from nimblert.cpu.backend import CpuBackend
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
        with _loaded(plan) as backend:
            rows = [backend.profile() for _ in range(_WARM_UPS)]
            rows = [backend.profile() for _ in range(_count(sum(rows[-1]) / 1e9))]
        return [max(1, int(d)) for d in np.median(np.array(rows), axis=0)]

    def duration(self, plan: Plan) -> int:
        """Nanoseconds of one run, the median of several."""
        with _loaded(plan) as backend:
            first = [_time_once(backend) for _ in range(_WARM_UPS)]
            times = [_time_once(backend) for _ in range(_count(first[-1]))]
        return round(float(np.median(times)) * 1e9)


def _count(seconds: float) -> int:
    """Runs to measure: as many as fit into 0.2 s, from 5 to 100; fewer of a slow program, within 2 s."""
    most, least = (int(budget / max(seconds, 1e-6)) for budget in (_TARGET_S, _LIMIT_S))
    return max(1, min(least, 5), min(most, 100))


def _time_once(backend: CpuBackend) -> float:
    begin = time.perf_counter()
    backend.run()
    return time.perf_counter() - begin


@contextmanager
def _loaded(plan: Plan) -> Iterator[CpuBackend]:
    program = plan.programs[0]
    backend = CpuBackend(plan, program)
    try:
        drawn = golden.draw_inputs(program, 0)
        for tensor, view in zip(program.inputs, backend.inputs, strict=True):
            np.copyto(view, drawn[tensor.name])
        yield backend
    finally:
        backend.close()
