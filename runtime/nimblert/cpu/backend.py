"""The CPU backend: every launch is an ONNX model of one node or several, which ONNX Runtime runs on memory of the plan.

Each launch has a session and an IO binding, made at load; a run only walks over them. Streams are concurrent threads,
and events are locks (`nimblert.cpu.streams`). Trust: `verify` has bounded the plan, `nimblert.cpu.host_memory` bounds
every address, and `nimblert.cpu.onnx_session` compares parameters with the model. ONNX Runtime parses the models,
without files or custom operators.
"""

import re
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.layouts import numpy_dtype
from nimblert.calls.backend import RunAt
from nimblert.calls.outputs import checked_sizes, filled, no_memory
from nimblert.calls.refitting import Refit
from nimblert.cpu.host_memory import HostMemory, HostWeights, HostWorking
from nimblert.cpu.onnx_session import LABEL, SessionCache, run_options, runtime_errors
from nimblert.cpu.streams import Step, Streams, Threads, open_gate, pass_gate, refusal
from nimblert.errors import InputError, PlanInvalidError, endless
from nimblert.plan import (
    Command,
    Crop,
    Launch,
    Memcpy,
    Memset,
    Plan,
    Pointer,
    Program,
    Record,
    Region,
    Switch,
    Tensor,
    Wait,
    While,
    Work,
)
from nimblert.plan.dimensions import Shape, Shapes
from nimblert.plan.pieces import writes
from nimblert.plan.records import DEFAULT_LIMITS, Limits

_NAMED = re.compile(rf"Name:'{LABEL}(\d{{1,9}})'")
"""How the message of a failure names a node of a model of several: by its number."""


class CpuLoaded:
    """The weights of a CPU plan, and the sessions over them, which all contexts share."""

    device = 0

    def __init__(
        self,
        plan: Plan,
        weights: HostWeights | None = None,
        sessions: SessionCache | None = None,
        *,
        threads: Threads | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.plan = plan
        self.weights = weights or HostWeights(plan)
        self.sessions = SessionCache(plan, self.weights, threads, limits) if sessions is None else sessions

    def working(self, arena: np.ndarray | None = None, *, poison: bool = False) -> HostWorking:
        """Return arena and state for one context."""
        return HostWorking(self.plan, arena, poison=poison)

    def backend(self, program: Program, working: HostWorking, *, poison: bool = False) -> "CpuBackend":
        """Load a program into the memory of a context."""
        return CpuBackend(self, program, working, poison=poison)

    def empty(self, tensor: Tensor) -> np.ndarray:
        """Return a new array for an input or output, in its layout."""
        return layouts.strided(np.empty(tensor.span_nbytes, np.uint8), tensor)

    def refit(self, refits: Sequence[Refit], backends: Sequence["CpuBackend"]) -> Sequence["CpuBackend"]:
        """Replace weights, or none where it raises; return the successors of ``backends``.

        Sessions over replaced weights are opened again: ONNX Runtime keeps packed copies of some weights, and may have
        computed with others when it opened the session. Raises InputError where an op fails.
        """
        weights = self.remade(refits)
        renewed = CpuLoaded(self.plan, weights, self.sessions.over(weights))
        made = [backend.over(renewed) for backend in backends]
        self.weights, self.sessions = renewed.weights, renewed.sessions
        return made

    def remade(self, refits: Sequence[Refit]) -> HostWeights:
        """Return the weights after these ``refits``. Raises InputError where an op fails."""
        with self.weights.rewritten(_replaced(refits)) as weights:
            scratch = CpuLoaded(replace(self.plan, state=(), state_nbytes=0), weights, self.sessions.over(weights))
            for refit in refits:
                scratch._make(refit)
        return weights

    def _make(self, refit: Refit) -> None:
        """Write the weights that a refit replaces, all of which are writable here."""
        alone = HostWorking(replace(self.plan, programs=(refit.program,)))
        backend = CpuBackend(self, refit.program, alone)
        try:
            for view, array in zip(backend.inputs, refit.arrays, strict=True):
                if isinstance(array, np.ndarray):
                    np.copyto(view, array)
            backend.run()
        finally:
            backend.close()

    def close(self) -> None:
        """Do nothing: sessions and weights are freed with their last user."""


class CpuCall:
    """Calls of a program with arrays of some shapes; ``shapes`` crops the outputs."""

    run_at: RunAt | None = None

    def __init__(self, backend: "CpuBackend", shapes: Shapes | None) -> None:
        self.program = backend.program
        self._backend = backend
        views = backend.outputs
        if shapes is not None:
            views = tuple(view[tuple(map(slice, shape))] for view, shape in zip(views, shapes, strict=True))
        self._views = [(tensor.name, view) for tensor, view in zip(self.program.outputs, views, strict=True)]

    def run(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run on these inputs, and return new outputs by name. Raises InputError where an op fails."""
        return self.run_into(arrays, {}, reuse_outputs=False, stream=None)

    def run_into(
        self, arrays: Sequence[np.ndarray], out: Mapping[str, np.ndarray], *, reuse_outputs: bool, stream: int | None
    ) -> dict[str, np.ndarray]:
        """Run as `run` does, except for bound outputs and those written into arrays of ``out``."""
        del stream  # a plan for the CPU takes none
        self._backend.place(arrays)
        self._backend.run()
        results = {}
        into = filled(out, self._backend.sizes)
        try:
            for name, view in self._filled():
                if name in out:
                    np.copyto(into[name], view)
                elif name not in self._backend.bound:
                    results[name] = view if reuse_outputs else view.copy()
        except MemoryError as exc:
            raise no_memory(exc) from exc
        return results

    def _filled(self) -> Iterable[tuple[str, np.ndarray]]:
        """Return the outputs of the last run by name, as views."""
        return filled(dict(self._views), self._backend.sizes).items() if self._backend.sizes else self._views


class CpuBackend:
    """A program in host memory. ``inputs`` and ``outputs`` are strided views of it, in program order.

    ``poison`` fills the arena and the outputs with 0xFF bytes first. Programs of one ``working`` memory
    run one at a time. ``bound`` are the names of inputs and outputs in memory of the caller, ``sizes`` those that the
    last run gave to cropped outputs, by name.
    """

    def __init__(self, loaded: CpuLoaded, program: Program, working: HostWorking, *, poison: bool = False) -> None:
        self.program = program
        self.bound: frozenset[str] = frozenset()
        self._sessions = loaded.sessions
        self._bodies = loaded.plan.bodies
        self._own = HostMemory(program, loaded.weights, working, poison=poison)
        self._build(self._own)

    def _build(self, memory: HostMemory) -> None:
        """Bind the launches to ``memory``, and start the threads."""
        gates = [threading.Lock() for _ in range(self.program.event_count)]
        self.memory = memory
        self.inputs: tuple[np.ndarray, ...] = tuple(map(memory.tensor, self.program.inputs))
        self.outputs: tuple[np.ndarray, ...] = tuple(map(memory.tensor, self.program.outputs))
        self.sizes: dict[str, Shape] = {}
        binder = _Binder(self._sessions, self._bodies, memory, gates, self.sizes)
        with self._sessions.lock:
            self._bound = binder.bind(self.program)
            self._sessions.weights.let_go()
        threads = self._sessions.streams_by_thread(self.program)
        streams = [[bound for bound in self._bound if bound[0].stream in own] for own in threads]
        issued = [steps for steps in streams if steps] or [[]]
        self._streams = Streams(issued, gates, binder.options, binder.failures, partial(_origin, self.program))
        self._dropped = weakref.finalize(self, self._streams.close)
        self._dropped.atexit = False  # a daemon thread may run until the process ends

    def over(self, loaded: CpuLoaded) -> "CpuBackend":
        """Return the program in the same memory, over other weights and sessions."""
        made = copy(self)
        made._sessions, made._own = loaded.sessions, self._own.over(loaded.weights)  # noqa: SLF001 - of its own class
        made._build(self.memory.over(loaded.weights))  # noqa: SLF001
        return made

    def bind(self, tensor: Tensor, array: np.ndarray | None) -> None:
        """Use an array of the caller in place of an input or output; None restores the program's own memory."""
        pointer = tensor.pointer
        place = pointer.region, pointer.index
        given = self._own.regions[place] if array is None else layouts.spanned(array, tensor.span_nbytes)
        former = self._dropped
        self._build(self.memory.rebased(place, given))
        former()
        self.bound = self.bound - {tensor.name} if array is None else self.bound | {tensor.name}

    def address(self, tensor: Tensor) -> int:
        """Return the address of the memory for an input or output, which may be bound."""
        return int(self.memory.tensor(tensor).ctypes.data)

    def own_address(self, tensor: Tensor) -> int:
        """Return the address of the program's own memory for an input or output."""
        return int(self._own.tensor(tensor).ctypes.data)

    def prepare(self, arrays: Sequence[np.ndarray], shapes: Shapes | None = None) -> CpuCall:
        """Return the call for arrays of these shapes; ``shapes`` crops the outputs."""
        del arrays  # `place` takes any layout
        return CpuCall(self, shapes)

    def place(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy these arrays into ``inputs``, each of its input's shape or a smaller one, which is padded."""
        for tensor, view, array in zip(self.program.inputs, self.inputs, arrays, strict=True):
            if tensor.name in self.bound:
                continue
            if array.shape == view.shape:
                view[...] = array
            else:
                layouts.place(view, array, layouts.filling(tensor))

    def empty(self, tensor: Tensor, *, on_device: bool, stream: int | None) -> np.ndarray:
        """Return a new array for an output."""
        del on_device, stream  # all is of the host
        return np.empty(tensor.shape, numpy_dtype(tensor.dtype))

    def run(self) -> None:
        """Compute ``outputs`` from ``inputs``. Raises InputError where an op fails."""
        self._streams.run()

    def replay(self) -> None:
        """Repeat the last run: in host memory there is nothing to copy."""
        self._streams.run()

    def enqueue_replay(self, stream: int | None) -> None:
        """Repeat the last run, which is complete when this returns."""
        del stream
        self._streams.run()

    def synchronize(self) -> None:
        """Do nothing: every run is complete when its call returns."""

    def steps(self) -> Generator[Work, None, None]:
        """Compute in issue order on the calling thread, and yield each launch, copy or fill when it is done.

        Raises InputError as `run` does.
        """
        for command, step in self._bound:
            if isinstance(command, Work):
                self._streams.walk([(command, step)])
                yield command

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """Return a copy of ``nbytes`` bytes of the program's memory, as uint8.

        Raises InputError where they are not in one weight.
        """
        try:
            return self.memory.range(pointer, nbytes).copy()
        except PlanInvalidError as exc:
            raise InputError(f"read: {exc}") from exc

    def profile(self) -> list[int]:
        """Compute as `steps` does, and return the nanoseconds of each launch, copy or fill."""
        durations: list[int] = []
        work = [
            (command, partial(_time, step, durations)) for command, step in self._bound if isinstance(command, Work)
        ]
        self._streams.walk(work)
        return durations

    def close(self) -> None:
        """End the threads, and drop sessions and memory."""
        self._dropped()
        self.inputs = self.outputs = ()
        del self._streams, self._bound, self.memory, self._own


class _Binder:
    """Binds the commands of a program, and of the bodies that it runs, to memory: each becomes a call.

    The calls write the sizes of cropped outputs into ``sizes``.
    """

    def __init__(
        self,
        sessions: SessionCache,
        bodies: Sequence[Program],
        memory: HostMemory,
        gates: Sequence[threading.Lock],
        sizes: dict[str, Shape],
    ) -> None:
        self.options = run_options()
        self.failures = (*runtime_errors(), MemoryError)
        self._sessions = sessions
        self._bodies = bodies
        self._memory = memory
        self._gates = gates
        self._sizes = sizes

    def bind(self, program: Program) -> list[tuple[Command, Step]]:
        """Return the commands, each with its call."""
        return [(command, self._step(program, command, i)) for i, command in enumerate(program.commands)]

    def _step(self, program: Program, command: Command, index: int) -> Step:
        memory = self._memory
        match command:
            case Launch():
                pool = self._sessions.pools(program)[index]
                return self._sessions.bind(command, pool, memory, self.options, f"commands[{index}]")
            case Memcpy():
                target = memory.range(command.dst, command.nbytes, written=True)
                return partial(np.copyto, target, memory.range(command.src, command.nbytes))
            case Memset():
                nbytes = command.count * command.element_nbytes
                elements = memory.range(command.dst, nbytes, written=True).view(f"u{command.element_nbytes}")
                return partial(elements.fill, command.value)
            case While() | Switch():
                return self._control(program, command)
            case Crop():
                sizes = memory.array(command.sizes, "int64", (command.rank,))
                return partial(_crop, self._sizes, program.outputs[command.output], sizes)
            case Record() | Wait():
                return partial(open_gate if isinstance(command, Record) else pass_gate, self._gates[command.event])

    def _control(self, program: Program, command: While | Switch) -> Step:
        if isinstance(command, Switch):
            return partial(_branch, self._memory.range(command.index, 1), [*map(self._body, command.bodies)])
        condition, body = self._memory.range(command.condition, 1), self._body(command.body)
        return partial(_loop, condition, body, command.limit, _origin(program, command))

    def _body(self, index: int) -> Step:
        """Return a call that runs a body in issue order, on the thread that calls it."""
        body = self._bodies[index]
        bound = [(work, self._step(body, work, i)) for i, work in body.work]
        return partial(_run_body, body, bound, self.failures)


def _run_body(body: Program, bound: Sequence[tuple[Work, Step]], failures: tuple[type[Exception], ...]) -> None:
    try:
        for command, step in bound:  # noqa: B007 - the command that failed
            step()
    except InputError:
        raise
    except failures as exc:
        raise refusal(_origin(body, command, exc), exc) from exc


def _loop(condition: np.ndarray, body: Step, limit: int, origin: str) -> None:
    trips = 0
    while condition[0]:
        if trips == limit:
            raise endless(origin, limit)
        trips += 1
        body()


def _branch(index: np.ndarray, bodies: Sequence[Step]) -> None:
    bodies[min(int(index[0]), len(bodies) - 1)]()


def _crop(filled_sizes: dict[str, Shape], output: Tensor, sizes: np.ndarray) -> None:
    filled_sizes[output.name] = checked_sizes(output, sizes.tolist())


def _replaced(refits: Iterable[Refit]) -> set[int]:
    """Return the offsets of the weights that refits are given or compute."""
    given = {
        tensor.pointer.offset
        for refit in refits
        for tensor, array in zip(refit.program.inputs, refit.arrays, strict=True)
        if tensor.pointer.region is Region.WEIGHTS and array is not None and tensor.span_nbytes
    }
    accesses = (access for refit in refits for _, command in refit.program.work for access in writes(command))
    return given | {a.pointer.offset for a in accesses if a.pointer.region is Region.WEIGHTS and a.nbytes}


def _origin(program: Program, command: Command, failure: object = "") -> str:
    """Return the op of a command: of a model of several nodes that of the node which ONNX Runtime's ``failure`` names.

    The ops of the nodes follow the op of their launch.
    """
    if isinstance(command, Record | Wait):
        return f"event {command.event}"
    named = _NAMED.search(str(failure))
    number = command.op + 1 + int(named[1]) if named else command.op
    op = program.ops[number if number < len(program.ops) else command.op]
    return f"op {op.name} ({op.source})"


def _time(step: Step, durations: list[int]) -> None:
    """Run a step and append its nanoseconds."""
    begin = time.perf_counter_ns()
    step()
    durations.append(time.perf_counter_ns() - begin)
