"""The CPU backend: every launch is a small ONNX model that ONNX Runtime runs on memory of the plan.

One session for each (kernel, initializers), one IO binding for each launch, made once at load; a
run only walks over them. Streams are threads that run side by side, events are locks (see `streams`).

What is trusted: `verify` has bounded the plan, this file bounds every address that it hands over
and compares the dtypes of parameters with the model's. The models themselves are parsed by ONNX
Runtime, which finds no file (see `sessions`) and knows no operators but its own.
"""

import threading
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from functools import partial

import numpy as np

from nimblert.errors import PlanInvalidError
from nimblert.host_memory import HostMemory, HostWeights, HostWorking
from nimblert.onnx_session import SessionCache, run_options, runtime_errors
from nimblert.plan import Command, Launch, Memcpy, Memset, Plan, Pointer, Program, Record, Wait, Work
from nimblert.streams import Bound, Step, Streams, interruptible, pass_gate, unlock


class CpuResident:
    """What all contexts of a CPU plan share: the weights, and the sessions over them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.weights = HostWeights(plan)
        self.sessions = SessionCache(plan, self.weights)

    def working(self, arena: np.ndarray | None = None, *, poison: bool = False) -> HostWorking:
        """Arena and state for one context."""
        return HostWorking(self._plan, arena, poison=poison)

    def backend(self, program: Program, working: HostWorking, *, poison: bool = False) -> "CpuBackend":
        """A program in the memory of a context."""
        return CpuBackend(self._plan, program, poison=poison, resident=self, working=working)

    def close(self) -> None:
        """Sessions and weights go with the last who has them."""


class CpuBackend:
    """A program in host memory. ``inputs`` and ``outputs`` are strided views of it, in program order.

    ``poison`` fills the arena and the outputs with 0xFF bytes first. Programs of one ``working`` memory
    run one at a time.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        *,
        poison: bool = False,
        resident: CpuResident | None = None,
        working: HostWorking | None = None,
    ) -> None:
        resident = resident or CpuResident(plan)
        self._program = program
        self.memory: HostMemory = HostMemory(plan, program, poison=poison, weights=resident.weights, working=working)
        self.inputs: tuple[np.ndarray, ...] = tuple(map(self.memory.tensor, program.inputs))
        self.outputs: tuple[np.ndarray, ...] = tuple(map(self.memory.tensor, program.outputs))
        self._gates = [threading.Lock() for _ in range(program.event_count)]
        self._options = run_options()
        with resident.sessions as sessions:
            self._issued = self._bind(plan, program, sessions)
        streams = _by_stream(self._issued, program.stream_count)
        self._streams = Streams(streams, self._gates, self._options, runtime_errors(), partial(_origin, program))
        # The threads know the streams, not this object: they end when nobody has it any more.
        self._dropped = weakref.finalize(self, self._streams.end)
        self._dropped.atexit = False  # a daemon thread may run on to the very end

    def place(self, arrays: Sequence[np.ndarray]) -> None:
        """Have ``inputs`` hold these arrays."""
        for view, array in zip(self.inputs, arrays, strict=True):
            np.copyto(view, array)

    def call(
        self, arrays: Sequence[np.ndarray], out: Mapping[str, np.ndarray], *, reuse_outputs: bool
    ) -> dict[str, np.ndarray]:
        """Run on these inputs: the outputs by name. Raises InputError where an op fails."""
        self.place(arrays)
        self._streams.run()
        results = {}
        for tensor, view in zip(self._program.outputs, self.outputs, strict=True):
            if tensor.name in out:
                np.copyto(out[tensor.name], view)
                results[tensor.name] = out[tensor.name]
            else:
                results[tensor.name] = view if reuse_outputs else view.copy()
        return results

    def run(self) -> None:
        """Compute the outputs of what stands in ``inputs``. Raises InputError where an op fails."""
        self._streams.run()

    def replay(self) -> None:
        """Compute again on the same inputs; in host memory nothing needs moving."""
        self._streams.run()

    def steps(self) -> Generator[Work, None, None]:
        """Compute in issue order on the calling thread: each launch, copy or fill when it is done.

        Raises InputError as `run` does.
        """
        for command, step in self._issued:
            if not isinstance(command, Record | Wait):
                self._streams.run_alone([(command, step)])
                yield command

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes of the program's memory, as uint8."""
        return self.memory.range(pointer, nbytes).copy()

    def profile(self) -> list[int]:
        """Run in issue order on the calling thread: nanoseconds of each command. Raises InputError as `run` does."""
        durations: list[int] = []
        self._streams.run_alone([(command, partial(_time, step, durations)) for command, step in self._issued])
        return durations

    def close(self) -> None:
        """End the threads and drop sessions and memory."""
        self._streams.close()
        self._dropped.detach()
        self._issued = []
        self.inputs = self.outputs = ()
        del self._streams, self.memory

    def _bind(self, plan: Plan, program: Program, sessions: SessionCache) -> list[Bound]:
        """The step of each command, in issue order."""
        issued: list[Bound] = []
        recorded: set[int] = set()
        for index, command in enumerate(program.commands):
            if isinstance(command, Record):
                recorded.add(command.event)
            elif isinstance(command, Wait) and command.event not in recorded:
                raise PlanInvalidError([f"commands[{index}]: waits for event {command.event} before its record"])
            issued.append((command, self._step(plan, sessions, command, index)))
        return issued

    def _step(self, plan: Plan, sessions: SessionCache, command: Command, index: int) -> Step:
        match command:
            case Launch():
                bound = sessions.bind(command, self.memory, self._options, f"commands[{index}]")
                if _may_loop(plan, command):
                    return partial(interruptible, bound, self._options)
                return bound
            case Memcpy():
                target = self.memory.range(command.dst, command.nbytes, written=True)
                return partial(np.copyto, target, self.memory.range(command.src, command.nbytes))
            case Memset():
                nbytes = command.count * command.element_nbytes
                elements = self.memory.range(command.dst, nbytes, written=True).view(f"u{command.element_nbytes}")
                return partial(elements.fill, command.value)
            case Record():
                return partial(unlock, self._gates[command.event])
            case Wait():
                return partial(pass_gate, self._gates[command.event])


def _may_loop(plan: Plan, launch: Launch) -> bool:
    """Whether the launch's model holds a Loop, which data may keep from ending, at any depth."""
    return b"Loop" in bytes(plan.modules[plan.kernels[launch.kernel].module].code)


def _origin(program: Program, command: Command) -> str:
    if isinstance(command, Record | Wait):
        return f"event {command.event}"
    op = program.ops[command.op]
    return f"op {op.name} ({op.source})"


def _by_stream(issued: Sequence[Bound], stream_count: int) -> list[list[Bound]]:
    """The steps of each stream that has any; one stream at least."""
    streams: list[list[Bound]] = [[] for _ in range(stream_count)]
    for command, step in issued:
        streams[command.stream].append((command, step))
    return [steps for steps in streams if steps] or [[]]


def _time(step: Step, durations: list[int]) -> None:
    """Run a step and append its nanoseconds."""
    begin = time.perf_counter_ns()
    step()
    durations.append(time.perf_counter_ns() - begin)
