"""Measure plans on this CPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nimblec.base.installation import processor_count
from nimblec.plan.planning import Measured
from nimblert import golden
from nimblert.cpu.backend import CpuBackend, CpuLoaded
from nimblert.cpu.host_memory import HostWeights, HostWorking
from nimblert.cpu.onnx_session import SessionCache
from nimblert.plan import Plan
from nimblert.plan.records import Limits

_TARGET_S = 0.2
_LIMIT_S = 2.0
_WARM_UPS = 2
_TRIES = 4
_PAUSE_S = 0.25
_LIMITS = Limits(sessions=1 << 30)
"""A plan of single nodes may need more sessions than one that is loaded."""
_WAITED = 0.1
"""The part of the time from which on a measurement is noisy: on a machine that does nothing else, the threads of a run
wait for a processor for less than 0.03 of it."""


class CpuTimer:
    """Times plans in this process. Streams are threads: more of them than processors are not worth trying."""

    least_gain = 0.05

    def __init__(self) -> None:
        self.max_streams = processor_count()
        self._tries = _TRIES

    def command_durations(self, plan: Plan) -> Measured[Sequence[int]]:
        """Measure each command of a plan of one stream, by the median of several runs."""
        # What the sessions of all kernels keep may be many times the memory of a run.
        with _loaded(plan, keeps_memory=False) as loaded:
            found = self._undisturbed(loaded.profile)
        return Measured([max(1, int(d)) for d in found.ns], found.is_noisy)

    def duration(self, plan: Plan) -> Measured[int]:
        """Measure one run, by the median of several."""
        with _loaded(plan) as loaded:
            found = self._undisturbed(loaded.run)
        return Measured(round(float(found.ns[0])), found.is_noisy)

    def _undisturbed(self, run: Callable[[], list[int]]) -> Measured[np.ndarray]:
        """Return the medians of the nanoseconds of several runs.

        Other processes only add to times: where threads of this one have to wait for a processor, it measures again
        after a pause, up to four times in all and for about eight seconds. If none is undisturbed, the lowest medians
        count, and the next plan is measured once.
        """
        rows = [run() for _ in range(_WARM_UPS)]
        end_ns = time.perf_counter_ns() + _TRIES * _LIMIT_S * 1e9
        disturbed: list[np.ndarray] = []
        while len(disturbed) < self._tries and (not disturbed or time.perf_counter_ns() < end_ns):
            if disturbed:
                time.sleep(_PAUSE_S)
            begin_ns, waited_ns = time.perf_counter_ns(), _waited_ns()
            medians = np.median(np.array([run() for _ in range(_count(sum(rows[-1]) / 1e9))]), axis=0)
            if _waited_ns() - waited_ns <= _WAITED * (time.perf_counter_ns() - begin_ns):
                self._tries = _TRIES
                return Measured(medians)
            disturbed.append(medians)
        self._tries = 1
        return Measured(min(disturbed, key=np.sum), is_noisy=True)


def _waited_ns() -> int:
    """Return how long the threads of this process have been ready to run without a processor; 0 if that is not known.

    Linux counts it (proc(5), schedstat): the second number of each thread.
    """
    waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited += int(path.read_text().split()[1])
        except (OSError, IndexError):
            # The thread may have ended, and the kernel may not count.
            continue
    return waited


def _count(seconds: float) -> int:
    """Return how many runs to measure: 5 to 100, as many as fit into 0.2 s; fewer of a slow program, within 2 s."""
    most, least = (int(budget / max(seconds, 1e-6)) for budget in (_TARGET_S, _LIMIT_S))
    return max(1, min(least, 5), min(most, 100))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A program whose runs all begin with the first state: a counter that goes on would leave its cache."""

    backend: CpuBackend
    working: HostWorking

    def profile(self) -> list[int]:
        """Return the nanoseconds of each command of a run."""
        self.working.reset()
        return self.backend.profile()

    def run(self) -> list[int]:
        """Return the nanoseconds of a run, as a list of one."""
        self.working.reset()
        begin = time.perf_counter_ns()
        self.backend.run()
        return [time.perf_counter_ns() - begin]


@contextmanager
def _loaded(plan: Plan, *, keeps_memory: bool = True) -> Iterator[_Loaded]:
    program = plan.programs[0]
    weights, working = HostWeights(plan), HostWorking(plan)
    sessions = SessionCache(plan, weights, limits=_LIMITS, keeps_memory=keeps_memory)
    backend = CpuBackend(CpuLoaded(plan, weights, sessions), program, working)
    try:
        drawn = golden.draw_inputs(program, 0)
        for tensor, view in zip(program.inputs, backend.inputs, strict=True):
            np.copyto(view, drawn[tensor.name])
        yield _Loaded(backend, working)
    finally:
        backend.close()
