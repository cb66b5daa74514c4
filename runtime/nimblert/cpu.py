"""The CPU backend: every launch is a small ONNX model that ONNX Runtime runs on memory of the plan.

One session for each (kernel, initializers), one IO binding for each launch, made once at load; a
run only walks over them. Streams are threads that run side by side, events are locks.

What is trusted: `verify` has bounded the plan, this file bounds every address that it hands over
and compares the dtypes of parameters with the model's. The models themselves are parsed by ONNX
Runtime, which finds no file (see `sessions`) and knows no operators but its own.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np

from nimblert.errors import InputError, PlanInvalidError
from nimblert.host_memory import HostMemory
from nimblert.onnx_session import SessionCache, runtime_errors
from nimblert.plan import Command, Launch, Memcpy, Memset, Plan, Pointer, Program, Record, Wait, Work

Step = Callable[[], object]
Bound = tuple[Command, Step]


class CpuBackend:
    """A program in host memory. ``inputs`` and ``outputs`` are strided views of it, in program order.

    ``poison`` fills the arena and the outputs with 0xFF bytes first.
    """

    def __init__(self, plan: Plan, program: Program, *, poison: bool = False) -> None:
        self.memory = HostMemory(plan, program, poison=poison)
        self.inputs: tuple[np.ndarray, ...] = tuple(map(self.memory.tensor, program.inputs))
        self.outputs: tuple[np.ndarray, ...] = tuple(map(self.memory.tensor, program.outputs))
        self._program = program
        self._gates = [threading.Lock() for _ in range(program.event_count)]
        self._issued = self._bind(plan, program)
        self._streams = _by_stream(self._issued, program.stream_count)
        self._resources = ExitStack()
        self._pool: ThreadPoolExecutor | None = None
        if len(self._streams) > 1:
            self._pool = ThreadPoolExecutor(len(self._streams) - 1, thread_name_prefix="nimblert-stream")
            self._resources.enter_context(self._pool)

    def run(self) -> None:
        """Compute the outputs of what stands in ``inputs``. Raises InputError where an op fails."""
        if self._pool is None:
            for stream in self._streams:
                self._walk(stream)
            return
        for gate in self._gates:
            gate.acquire(blocking=False)
        others = [self._pool.submit(self._walk, stream) for stream in self._streams[1:]]
        try:
            self._walk(self._streams[0])
        finally:
            failures = [future.exception() for future in others]
        for failure in failures:
            if failure is not None:
                raise failure

    def replay(self) -> None:
        """Compute again on the same inputs; in host memory nothing needs moving."""
        self.run()

    def steps(self) -> Generator[Work, None, None]:
        """Compute in issue order on the calling thread: each launch, copy or fill when it is done.

        Raises InputError as `run` does.
        """
        for command, step in self._issued:
            if not isinstance(command, Record | Wait):
                self._walk([(command, step)])
                yield command

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes of the program's memory, as uint8."""
        return self.memory.range(pointer, nbytes).copy()

    def profile(self) -> list[int]:
        """Run the only stream: nanoseconds of each command, in issue order. Raises InputError as `run` does."""
        (stream,) = self._streams
        durations: list[int] = []
        self._walk([(command, partial(_time, step, durations)) for command, step in stream])
        return durations

    def close(self) -> None:
        """End the threads and drop sessions and memory."""
        self._resources.close()
        self._issued = []
        self._streams = []
        self.inputs = self.outputs = ()
        del self.memory

    def _bind(self, plan: Plan, program: Program) -> list[Bound]:
        """The step of each command, in issue order."""
        issued: list[Bound] = []
        recorded: set[int] = set()
        with SessionCache(plan, program, self.memory) as sessions:
            for index, command in enumerate(program.commands):
                if isinstance(command, Record):
                    recorded.add(command.event)
                elif isinstance(command, Wait) and command.event not in recorded:
                    raise PlanInvalidError([f"commands[{index}]: waits for event {command.event} before its record"])
                issued.append((command, self._step(sessions, command, index)))
        return issued

    def _step(self, sessions: SessionCache, command: Command, index: int) -> Step:
        match command:
            case Launch():
                return sessions.bind(command, f"commands[{index}]")
            case Memcpy():
                target = self.memory.range(command.dst, command.nbytes, written=True)
                return partial(np.copyto, target, self.memory.range(command.src, command.nbytes))
            case Memset():
                nbytes = command.count * command.element_nbytes
                elements = self.memory.range(command.dst, nbytes, written=True).view(f"u{command.element_nbytes}")
                return partial(elements.fill, command.value)
            case Record():
                return self._gates[command.event].release
            case Wait():
                return partial(_pass, self._gates[command.event])

    def _walk(self, stream: Sequence[Bound]) -> None:
        """Run the steps of one stream; whatever happens, nobody is left waiting for its events."""
        done = 0
        try:
            for _, step in stream:
                step()
                done += 1
        except runtime_errors() as exc:
            raise InputError(f"{self._origin(stream[done][0])}: failed on these inputs: {exc}") from exc
        finally:
            for command, step in stream[done:]:
                if isinstance(command, Record):
                    step()

    def _origin(self, command: Command) -> str:
        if isinstance(command, Record | Wait):
            return f"event {command.event}"
        op = self._program.ops[command.op]
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


def _pass(gate: threading.Lock) -> None:
    """Wait until the gate is open and leave it open for the others who wait."""
    with gate:
        pass
