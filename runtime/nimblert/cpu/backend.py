"""The CPU backend: every launch is a small ONNX model that ONNX Runtime runs on memory of the plan.

Consecutive launches of a stream share a session (`nimblert.cpu.onnx_join`), with one IO binding, made at load; a run
only walks over them. Streams are concurrent threads, and events are locks (`nimblert.cpu.streams`).

Trust: `verify` has bounded the plan; `nimblert.cpu.host_memory` bounds every address that is handed over, and
`nimblert.cpu.onnx_session` compares the dtypes of parameters with the model's. ONNX Runtime parses the models; it finds
no files of theirs, and knows no operators but its own.
"""

import re
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from nimblert.arrays import layouts, padding
from nimblert.arrays.dtypes import numpy_dtype
from nimblert.calls.changing import Commit, uninterrupted
from nimblert.calls.outputs import no_memory
from nimblert.calls.refitting import Refit
from nimblert.calls.turn import Turn
from nimblert.cpu.direct import Direct, at_work
from nimblert.cpu.host_memory import HostMemory, HostWeights, HostWorking
from nimblert.cpu.onnx_session import LABEL, SessionCache, run_options, runtime_errors
from nimblert.cpu.onnx_threads import Pool, Threads
from nimblert.cpu.streams import Bound, Patient, Step, Streams, interruptible, pass_gate, unlock
from nimblert.dimensions import Shapes
from nimblert.errors import InputError, PlanInvalidError
from nimblert.limits import DEFAULT_LIMITS, Limits
from nimblert.ordering.pieces import writes
from nimblert.plan import Command, Launch, Memcpy, Memset, Plan, Pointer, Program, Record, Region, Tensor, Wait, Work

_NAMED = re.compile(rf"Name:'{LABEL}(\d{{1,9}})'")
"""How the message of a failure names a node of a joined model: by the index of its command."""


class CpuResident:
    """The weights of a CPU plan, and the sessions over them, which all contexts share."""

    def __init__(
        self,
        plan: Plan,
        weights: HostWeights | None = None,
        sessions: SessionCache | None = None,
        *,
        threads: Threads | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._plan = plan
        self.weights = weights or HostWeights(plan)
        self.sessions = SessionCache(plan, self.weights, threads, limits) if sessions is None else sessions

    def working(self, arena: np.ndarray | None = None, *, poison: bool = False) -> HostWorking:
        """Arena and state for one context."""
        return HostWorking(self._plan, arena, poison=poison)

    def backend(self, program: Program, working: HostWorking, *, poison: bool = False) -> "CpuBackend":
        """A program in the memory of a context."""
        return CpuBackend(self._plan, program, poison=poison, resident=self, working=working)

    def empty_input(self, tensor: Tensor) -> np.ndarray:
        """A new array for an input, in its layout."""
        return layouts.strided(np.empty(tensor.span_nbytes, np.uint8), tensor)

    def refit(
        self,
        refits: Sequence[Refit],
        backends: Sequence["CpuBackend"],
        replace_old: Callable[[Sequence["CpuBackend"]], None],
    ) -> None:
        """Replace weights; see `Resident.refit`.

        Sessions over replaced weights are opened again: ONNX Runtime keeps packed copies of some weights, and may have
        computed with others when it opened the session.
        """
        weights = self.remade(refits)
        renewed = CpuResident(self._plan, weights, self.sessions.over(weights))
        made: list[CpuBackend] = []

        def change() -> None:
            self.weights, self.sessions = renewed.weights, renewed.sessions
            replace_old(made)

        try:
            made.extend(backend.renewed(renewed) for backend in backends)
            uninterrupted(change)
        except BaseException:
            if self.weights is not weights:
                for backend in made:
                    backend.close()
            raise

    def remade(self, refits: Sequence[Refit]) -> HostWeights:
        """The weights after these ``refits``. Raises InputError where an op fails."""
        with self.weights.rewritten(_replaced(refits)) as weights:
            scratch = CpuResident(replace(self._plan, state=(), state_nbytes=0), weights, self.sessions.over(weights))
            with scratch.sessions.lock, scratch.sessions:
                for refit in refits:
                    scratch._make(refit)
        return weights

    def _make(self, refit: Refit) -> None:
        """Write the weights that a refit replaces, all of which are writable here."""
        program = refit.program
        alone = HostWorking(replace(self._plan, programs=(program,)))
        backend = CpuBackend(self._plan, program, resident=self, working=alone)
        try:
            for view, array in zip(backend.inputs, refit.arrays, strict=True):
                if isinstance(array, np.ndarray):
                    np.copyto(view, array)
            backend.run()
        finally:
            backend.close()

    def close(self) -> None:
        """Do nothing: sessions and weights are freed with their last user."""


class CpuBackend:
    """A program in host memory. ``inputs`` and ``outputs`` are strided views of it, in program order.

    ``poison`` fills the arena and the outputs with 0xFF bytes first. Programs of one ``working`` memory
    run one at a time. With ``singly``, every run is one launch after the other, each in a session of its own: `profile`
    then needs no further sessions, nor the packed weights that they keep.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        *,
        poison: bool = False,
        resident: CpuResident | None = None,
        working: HostWorking | None = None,
        singly: bool = False,
    ) -> None:
        resident = resident or CpuResident(plan)
        self._program = program
        self._plan = plan
        self._sessions = resident.sessions
        self._bound: set[str] = set()
        self._runs_singly = singly
        _check_events(program)
        self._own = HostMemory(plan, program, poison=poison, weights=resident.weights, working=working)
        self._build(self._own)
        self._start_threads(self)

    def _build(self, memory: HostMemory) -> None:
        """Bind the launches to ``memory``."""
        self._gates = [threading.Lock() for _ in range(self._program.event_count)]
        self._options = run_options()
        self.memory = memory
        self.inputs: tuple[np.ndarray, ...] = tuple(map(memory.tensor, self._program.inputs))
        self.outputs: tuple[np.ndarray, ...] = tuple(map(memory.tensor, self._program.outputs))
        with self._sessions.lock, self._sessions:
            streams: list[list[Bound]]
            if self._runs_singly:
                self._crowd, streams = None, [[*self._singly]]
            else:
                self._crowd = self._sessions.crowd(self._program)
                streams = [self._bind_streams(each) for each in self._sessions.streams_by_thread(self._program)]
        self._issued = [steps for steps in streams if steps] or [[]]
        failures = (*runtime_errors(), MemoryError)
        self._streams = Streams(self._issued, self._gates, self._options, failures, partial(_origin, self._program))

    def _start_threads(self, owner: "CpuBackend") -> None:
        """Start the threads, which end when ``owner`` is collected: they refer to the streams, not to it."""
        self._dropped = weakref.finalize(owner, self._streams.end)
        self._dropped.atexit = False  # a daemon thread may run until the process ends
        self._streams.start()

    def renewed(self, resident: CpuResident) -> "CpuBackend":
        """The program in the same memory, over the weights and sessions of another resident."""
        made = self._copied()
        made._sessions, made._own = resident.sessions, self._own.over(resident.weights)  # noqa: SLF001 - its own class
        made._build(self.memory.over(resident.weights))  # noqa: SLF001
        made._start_threads(made)  # noqa: SLF001
        return made

    def _copied(self) -> "CpuBackend":
        """The same, without the steps that are bound on demand: to be built over other memory."""
        made = copy(self)
        for steps in ("_singly", "_alone"):
            vars(made).pop(steps, None)
        return made

    def bind(self, tensor: Tensor, array: np.ndarray | None, commit: Commit) -> None:
        """Use an array of the caller in place of an input or output; None restores the program's own memory."""
        pointer = tensor.pointer
        place = pointer.region, pointer.index
        given = self._own.regions[place] if array is None else layouts.spanned(array, tensor.span_nbytes)
        made = self._copied()
        made._build(self.memory.rebased(place, given))  # noqa: SLF001 - its own class
        made._bound = self._bound - {tensor.name} if array is None else self._bound | {tensor.name}  # noqa: SLF001
        made._start_threads(self)  # noqa: SLF001
        old = copy(self)
        try:
            commit(partial(setattr, self, "__dict__", vars(made)))
        finally:
            (old if vars(self) is vars(made) else made)._end()  # noqa: SLF001

    def address(self, tensor: Tensor) -> int:
        """The address of the memory for an input or output, which may be bound."""
        return int(self.memory.tensor(tensor).ctypes.data)

    def own_address(self, tensor: Tensor) -> int:
        """The address of the program's own memory for an input or output."""
        return int(self._own.tensor(tensor).ctypes.data)

    def place(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy these arrays into ``inputs``, each of its input's shape or a smaller one."""
        for index, (view, array) in enumerate(zip(self.inputs, arrays, strict=True)):
            if self._bound and self._program.inputs[index].name in self._bound:
                continue
            if array.shape == view.shape:
                view[...] = array
            else:
                padding.place(view, array, padding.filling(self._program.inputs[index]))

    def call(
        self,
        arrays: Sequence[np.ndarray],
        out: Mapping[str, np.ndarray],
        *,
        reuse_outputs: bool,
        shapes: Sequence[tuple[int, ...]] | None = None,
        stream: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Run on these inputs, and return the outputs by name, except bound ones and those written into ``out``.

        ``shapes`` crops the outputs. Raises InputError where an op fails.
        """
        del stream  # a plan for the CPU takes none
        self.place(arrays)
        self.run()
        views = self.outputs
        if shapes is not None:
            views = tuple(view[tuple(map(slice, shape))] for view, shape in zip(views, shapes, strict=True))
        results = {}
        for tensor, view in zip(self._program.outputs, views, strict=True):
            if tensor.name in out:
                np.copyto(out[tensor.name], view)
            elif tensor.name not in self._bound:
                try:
                    results[tensor.name] = view if reuse_outputs else view.copy()
                except MemoryError as exc:
                    raise no_memory(exc) from exc
        return results

    def direct(self, turn: Turn, shapes: tuple[Shapes, Shapes] | None) -> Direct | None:
        """The usual call as one function, in the turn of a context; None where a run is more than one short step."""
        step = _only(self._issued[0]) if len(self._issued) == 1 else None
        alone = _only(self.__dict__.get("_alone", []))  # bound by now if it was needed
        if shapes is not None or self._bound or (step is None and alone is None):
            return None
        return Direct(turn, self._program, self._streams, self.inputs, self.outputs, (step, alone), self._crowd)

    def empty(self, tensor: Tensor, *, on_device: bool, stream: int | None) -> np.ndarray:
        """A new array for an output."""
        del on_device, stream  # all is of the host
        return np.empty(tensor.shape, numpy_dtype(tensor.dtype))

    def run(self) -> None:
        """Compute ``outputs`` from ``inputs``. Raises InputError where an op fails."""
        try:
            at_work.add(self)
            crowded = self._crowd is not None and at_work.are_crowd(self._crowd)
            self._streams.run(self._alone if crowded else None)
        finally:
            at_work.discard(self)

    def replay(self) -> None:
        """Repeat the last run: in host memory there is nothing to copy."""
        self.run()

    def launch(self, stream: int | None = None) -> None:
        """As `replay`, which is complete when this returns."""
        del stream
        self.run()

    def synchronize(self) -> None:
        """Do nothing: every run is complete when its call returns."""

    def steps(self) -> Generator[Work, None, None]:
        """Compute in issue order on the calling thread, and yield each launch, copy or fill when it is done.

        Raises InputError as `run` does.
        """
        for command, step in self._singly:
            self._streams.run([(command, step)])
            yield command

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes of the program's memory, as uint8.

        Raises InputError where they are not in one weight.
        """
        try:
            return self.memory.range(pointer, nbytes).copy()
        except PlanInvalidError as exc:
            raise InputError(f"read: {exc}") from exc

    def profile(self) -> list[int]:
        """Compute as `steps` does, and return the nanoseconds of each launch, copy or fill."""
        durations: list[int] = []
        self._streams.run([(command, partial(_time, step, durations)) for command, step in self._singly])
        return durations

    def close(self) -> None:
        """End the threads and drop sessions and memory."""
        self._end()
        self.inputs = self.outputs = ()
        del self._streams, self.memory, self._own

    def _end(self) -> None:
        """End the threads and drop the steps."""
        self._streams.close()
        self._dropped.detach()
        for steps in (*self._issued, vars(self).pop("_alone", [])):
            steps.clear()  # a step that was never run, or takes long, holds its stream
        vars(self).pop("_singly", None)

    @cached_property
    def _singly(self) -> list[tuple[Work, Step]]:
        """A step for each launch, copy or fill, in issue order, for `steps` and `profile`."""
        with self._sessions.lock, self._sessions:
            return [(command, self._step(command, index)) for index, command in self._program.work]

    @cached_property
    def _alone(self) -> list[Bound]:
        """All steps in issue order for the calling thread alone, used when other runs have the other cores."""
        with self._sessions.lock, self._sessions:
            return self._bind_streams(range(self._program.stream_count), alone=True)

    def _bind_streams(self, streams: Sequence[int], *, alone: bool = False) -> list[Bound]:
        """The steps of these streams in issue order; the launches of one session are one step.

        They may then run before commands of other streams that were issued earlier.
        """
        stretches = self._sessions.stretches(self._program)
        steps: list[Bound] = []
        for index, command in enumerate(self._program.commands):
            if command.stream not in streams:
                continue
            if index in stretches:
                stretch = replace(stretches[index], pool=Pool()) if alone else stretches[index]
                bound = self._sessions.bind_stretch(self._program, stretch, self.memory, self._options)
                loops = isinstance(command, Launch) and self._sessions.may_loop(command)
                steps.append((command, Patient(bound, self._options, steps, loops=loops)))
            elif not isinstance(command, Launch):
                steps.append((command, self._step(command, index)))
        return steps

    def _step(self, command: Command, index: int) -> Step:
        match command:
            case Launch():
                bound = self._sessions.bind(command, self.memory, self._options, f"commands[{index}]")
                if self._sessions.may_loop(command):
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


def _replaced(refits: Iterable[Refit]) -> set[int]:
    """The offsets of the weights that refits are given or compute."""
    given = {
        tensor.pointer.offset
        for refit in refits
        for tensor, array in zip(refit.program.inputs, refit.arrays, strict=True)
        if tensor.pointer.region is Region.WEIGHTS and array is not None and tensor.span_nbytes
    }
    accesses = (access for refit in refits for _, command in refit.program.work for access in writes(command))
    return given | {a.pointer.offset for a in accesses if a.pointer.region is Region.WEIGHTS and a.nbytes}


def _only(steps: Sequence[Bound]) -> Bound | None:
    """The only step, if there is one alone and it is short."""
    return steps[0] if len(steps) == 1 and not isinstance(steps[0][1], Patient) else None


def _check_events(program: Program) -> None:
    recorded: set[int] = set()
    for index, command in enumerate(program.commands):
        if isinstance(command, Record):
            recorded.add(command.event)
        elif isinstance(command, Wait) and command.event not in recorded:
            raise PlanInvalidError([f"commands[{index}]: waits for event {command.event} before its record"])


def _origin(program: Program, command: Command, failure: Exception) -> str:
    """The op that failed; in a model of several, the one that ONNX Runtime names."""
    if isinstance(command, Record | Wait):
        return f"event {command.event}"
    named = _NAMED.search(str(failure))
    if named and isinstance(found := program.commands[int(named[1])], Launch):
        command = found
    op = program.ops[command.op]
    return f"op {op.name} ({op.source})"


def _time(step: Step, durations: list[int]) -> None:
    """Run a step and append its nanoseconds."""
    begin = time.perf_counter_ns()
    step()
    durations.append(time.perf_counter_ns() - begin)
