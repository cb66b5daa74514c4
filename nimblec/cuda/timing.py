"""Measure plans on this GPU, in the process that captured them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from nimblec.base.gpu_lock import undisturbed
from nimblec.plan.planning import Measured
from nimblert import golden
from nimblert.cuda import graph
from nimblert.cuda.control import Control
from nimblert.cuda.crops import Crops
from nimblert.cuda.driver import Context, Handle, bindings, call
from nimblert.cuda.memory import Bases, DeviceMemory, Staging, allocate
from nimblert.cuda.movers import GatherKernels
from nimblert.cuda.uploader import Uploader, upload_region
from nimblert.plan import Plan, Program, Region, Weight

_REPEATS = 15
_EMPTY_INTERVALS = 16
_TARGET_US = 50_000.0
_MOST_RUNS = 200
_WARM_UPS = 5


class CudaTimer:
    """Times plans that share kernels and weights, which are loaded once."""

    max_streams = 1 << 16  # more than any graph has: the driver maps streams to its queues
    least_gain = 0.02

    def __init__(self) -> None:
        self._context = Context()
        self._stream = self._context.acquire(
            call("cuStreamCreate", bindings().CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamDestroy"
        )
        self._functions: list[Handle] = []
        self._weights: Bases | None = None
        self._state_copy: tuple[int, int, int] | None = None

    def command_durations(self, plan: Plan) -> Measured[Sequence[int]]:
        """Measure each launch, copy and fill, run one after another in the captured order.

        One graph has an event between any two commands, so caches are as warm as in a run of the network.
        """
        program = plan.programs[0]
        work = [command for _, command in program.work]
        with self._loaded(plan, program) as (scope, memory, control, crops):
            chain = scope.acquire(call("cuGraphCreate", 0), "cuGraphDestroy")
            events = [
                scope.acquire(call("cuEventCreate", 0), "cuEventDestroy")
                for _ in range(len(work) + 1 + _EMPTY_INTERVALS)
            ]
            last = call("cuGraphAddEventRecordNode", chain, None, 0, events[0])
            for position, event in enumerate(events[1:]):
                if position < len(work):
                    nodes = graph.add_command(chain, work[position], self._functions, memory, control, crops)
                    graph.add_edges(chain, [last], [nodes.first])
                    last = nodes.last
                last = call("cuGraphAddEventRecordNode", chain, [last], 1, event)
            executable = scope.acquire(call("cuGraphInstantiate", chain, 0), "cuGraphExecDestroy")
            samples: list[np.ndarray] = []

            def runs() -> list[float]:
                rows = [self._intervals(executable, events) for _ in range(_REPEATS + _WARM_UPS)][_WARM_UPS:]
                samples.append(np.array(rows))
                return [sum(row) for row in rows]

            _, is_noisy = undisturbed(runs)
        medians = np.median(min(samples, key=lambda rows: np.median(rows.sum(axis=1))), axis=0)
        overhead = float(np.median(medians[len(work) :]))
        return Measured([max(1, round((d - overhead) * 1e6)) for d in medians[: len(work)]], is_noisy)

    def _intervals(self, executable: Handle, events: list[Handle]) -> list[float]:
        """Return the milliseconds between each event and the next."""
        self._launch(executable)
        call("cuStreamSynchronize", self._stream)
        return [call("cuEventElapsedTime", a, b) for a, b in pairwise(events)]

    def _launch(self, executable: Handle) -> None:
        """Enqueue a run. A plan with loops begins with its initial state: a full cache would end a loop at once."""
        if self._state_copy is not None:
            call("cuMemcpyDtoDAsync", *self._state_copy, self._stream)
        call("cuGraphLaunch", executable, self._stream)

    def duration(self, plan: Plan) -> Measured[int]:
        """Measure one run: the median of GPU times between events around graph launches (`undisturbed`)."""
        program = plan.programs[0]
        with self._loaded(plan, program) as (scope, memory, control, crops):
            executable = scope.acquire(
                graph.instantiated(
                    lambda built: graph.add_program(built, program, self._functions, memory, control, crops)
                ),
                "cuGraphExecDestroy",
            )
            events = [scope.acquire(call("cuEventCreate", 0), "cuEventDestroy") for _ in range(_MOST_RUNS + 1)]

            def runs() -> list[float]:
                warm = self._runs(executable, events[: _WARM_UPS + 1])
                count = int(np.clip(_TARGET_US / max(warm[-1], 1.0), 10, _MOST_RUNS))
                return self._runs(executable, events[: count + 1])

            median, is_noisy = undisturbed(runs)
            return Measured(round(median * 1e3), is_noisy)

    def _runs(self, executable: Handle, events: list[Handle]) -> list[float]:
        """Return the microseconds between each event and the next, with a run between them.

        All are enqueued behind one more run, so the GPU does not wait for the CPU, which may be slow to launch.
        """
        self._launch(executable)
        call("cuEventRecord", events[0], self._stream)
        for event in events[1:]:
            self._launch(executable)
            call("cuEventRecord", event, self._stream)
        call("cuEventSynchronize", events[-1])
        return [call("cuEventElapsedTime", a, b) * 1e3 for a, b in pairwise(events)]

    @contextmanager
    def _loaded(self, plan: Plan, program: Program) -> Iterator[tuple[Context, DeviceMemory, Control | None, Crops]]:
        """Load one plan into memory that is released at the end; keep its kernels and weights for the next plan."""
        if self._weights is None:
            self._modules = plan.modules
            self._functions = graph.load_functions(self._context, plan.modules, plan.kernels)
            self._uploader = Uploader(self._context)
            self._weights = self._place(self._context, Region.WEIGHTS, plan.weights_nbytes, plan.weights)
        scope = Context()
        try:
            state = self._place(scope, Region.STATE, plan.state_nbytes, plan.state)
            if plan.bodies and plan.state_nbytes:
                pristine = self._place(scope, Region.STATE, plan.state_nbytes, plan.state)
                (written,), (kept,) = state.values(), pristine.values()
                self._state_copy = written, kept, plan.state_nbytes
            arena = {(Region.ARENA, 0): allocate(scope, plan.arena_nbytes)}
            memory = DeviceMemory(scope, program, {**self._weights, **arena, **state})
            self._fill_inputs(scope, program, memory)
            control = Control(program, plan.bodies, scope) if plan.bodies else None
            yield scope, memory, control, Crops(program, scope, GatherKernels(scope))
        finally:
            self._state_copy = None
            scope.close()

    def _place(self, scope: Context, region: Region, nbytes: int, contents: Iterable[Weight]) -> Bases:
        address = allocate(scope, nbytes)
        upload_region(self._uploader, address, contents)
        return {(region, 0): address}

    def _fill_inputs(self, scope: Context, program: Program, memory: DeviceMemory) -> None:
        staging = Staging(scope, program.inputs, memory)
        drawn = golden.draw_inputs(program, 0)
        for tensor, view in zip(program.inputs, staging.views, strict=True):
            np.copyto(view, drawn[tensor.name])
        staging.to_device(self._stream)
        call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Release everything."""
        self._context.close()
