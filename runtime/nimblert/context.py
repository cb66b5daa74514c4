"""Context: the programs of a plan in memory of their own, ready to be called."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Never, Self, TypeAlias

import numpy as np

from nimblert import interpreter, telemetry
from nimblert.arena import Arena
from nimblert.arrays.device_arrays import DeviceArray
from nimblert.calls.backend import Backend, Backends, Resident
from nimblert.calls.binding import Bindings
from nimblert.calls.direct_calls import DirectCalls
from nimblert.calls.entries import Entries, Entry, Signature
from nimblert.calls.outputs import check_apart, checked_out
from nimblert.calls.parts import check_parts, serve
from nimblert.calls.state import State, T, Working
from nimblert.calls.turn import Relaunch, Steps, Turn, relaunch
from nimblert.dimensions import Shapes
from nimblert.errors import InputError
from nimblert.extents import extent_problems, region_sizes
from nimblert.plan import Plan, Pointer, Program, Target, Tensor, listed
from nimblert.timing import CommandTime, command_times

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays of the caller by the name of an input or output."""

_ALONE = nullcontext()


class Context:
    """The programs of a plan with an arena, state, inputs and outputs of their own, for one thread at a time.

    Made by `Executable.context`; it shares weights and code with the executable. Each program is loaded on first use.
    Ctrl-C ends a run between two commands, and the context stays usable. Of two threads that use a context at the
    same time, the second gets an InputError.
    """

    _noun = "context"
    _waits = False  # a thread does not wait for the run of another, but is refused
    _again = "make another one"

    def __init__(self, plan: Plan, resident: Resident, *, arena: Arena | None = None, poison: bool = False) -> None:
        self.plan = plan
        self._resident = resident
        self._arena = arena
        self._poison = poison
        self._signatures = Entries(plan)
        self._bindings = {name: Bindings(self._signatures[name]) for name in self._signatures.names}
        self._turn = Turn(plan.programs[0], self._noun, self._again, waits=self._waits)
        self._direct = DirectCalls()
        self._relaunch: Relaunch | None = None
        self._working = resident.working(None if arena is None else arena.memory, poison=poison)
        self._backends = Backends(plan, resident, self._working, poison=poison)
        try:
            self._backends[self._turn.program.name]
        except BaseException:
            self._working.close()
            raise
        interpreter.live.add(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({listed([repr(program) for program in self.plan.programs])})"

    def __reduce__(self) -> Never:
        raise InputError(f"a copy of this {self._noun} cannot be made, nor a pickle: load the plan where it is to run")

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the plan's entries, for `entry`."""
        return self._signatures.names

    def entry(self, name: str | None = None) -> Entry:
        """The entry called ``name``; by default the only one, or else "main". Raises InputError."""
        signature = self._signatures[name]
        return Entry(signature, partial(self._call, signature), partial(self.run, entry=signature.name))

    @property
    def program(self) -> Program:
        """The first program of the default entry: the only one, or else "main". Raises InputError without one."""
        return self._signatures[None].programs[0]

    @property
    def backend(self) -> Backend:
        """The backend of `program`."""
        with self._turn.taken(), self._turn.lock:
            self._turn.check_ready(self._turn.steps)
            return self._backends[self.program.name]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of `program`, each with name, shape and dtype."""
        return self.program.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of `program`, each with name, shape and dtype."""
        return self.program.outputs

    def warm(self) -> None:
        """Load every program now instead of on its first call."""
        with self._turn.taken(), self._turn.lock:
            self._turn.check_ready(self._turn.steps)
            for program in self.plan.programs:
                self._backends[program.name]

    @property
    def state(self) -> State:
        """The named tensors that this context keeps from run to run; all entries of the plan share them."""
        return State(self)

    def reset(self) -> None:
        """Give the state of this context its initial values, those of the plan."""
        self.between_runs(lambda working: working.kept.reset())

    def between_runs(self, do: Callable[[Working], T]) -> T:
        """What ``do`` returns for the memory that holds the state; no run begins meanwhile.

        Raises InputError as a run would.
        """
        with self._turn.taken(), self._turn.lock:
            self._turn.check_ready()
            return do(self._working)

    def __call__(self, /, *args: Any, entry: str | None = None, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """Run an entry on arrays given in the plan's order, by name, or both; their shapes choose the program.

        Returns a single output as an array, several as a tuple in the plan's order. An input named "entry" is given
        by position, or by name in a call of what `entry` returns.
        """
        return self._call(self._signatures[entry], args, kwargs)

    def run(
        self,
        arrays: Mapping[str, Any],
        *,
        entry: str | None = None,
        out: Mapping[str, Any] | None = None,
        reuse_outputs: bool = False,
        stream: Any = None,
    ) -> dict[str, np.ndarray]:
        """Run an entry on arrays by input name, and return the outputs by name, in the plan's order.

        Outputs in ``out`` are written into the arrays given there. The others are new arrays, or with
        ``reuse_outputs`` views of memory that the next run overwrites, which saves a copy; on a GPU `close` frees it.

        On a GPU ``stream`` is a stream of the caller, given by its handle or ``__cuda_stream__``: the run is enqueued
        on it, and this returns without waiting. Outputs are on the device, and written in the order of the stream.
        Raises InputError.
        """
        signature = self._signatures[entry]
        if out is not None and not isinstance(out, Mapping):
            raise InputError(f"out: got {type(out).__name__}, expected a dict of arrays by output name")
        return self._run(signature, arrays, out or {}, reuse_outputs=reuse_outputs, stream=stream)

    async def arun(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> dict[str, np.ndarray]:
        """As `run`, without blocking the event loop; a run is completed even if its task is cancelled."""
        import asyncio  # the caller's event loop has imported it

        return await asyncio.to_thread(self.run, arrays, entry=entry)

    def steps(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> Steps:
        """Run an entry on arrays by input name, one command after the other in issue order.

        Yields each launch, copy or fill when it is done; `read` gives what it wrote. Until the generator is
        exhausted, closed or dropped, every other run raises InputError.
        """
        program, checked = self._choose(self._signatures[entry], arrays)
        turn, arena, bindings = self._turn, self._arena, self._bindings[program.entry]
        steps: Steps | None = None
        try:
            with turn.taken(), turn.lock, self._in_arena():
                self._check_ready()
                backend = self._backends[program.name]
                steps = turn.steps = backend.steps()
                if arena is not None:
                    arena.owner = turn
                self._changed()
                turn.program, turn.parts = program, 1
                backend.place(checked)
            while True:
                with turn.taken(), turn.lock:
                    self._check_open(steps)
                    bindings.check_in_place()
                    work = next(steps, None)
                if work is None:
                    return
                yield work
        finally:  # without the lock: this thread may hold it where it drops the generator
            if steps is not None and arena is not None and arena.owner is turn:
                arena.owner = None
            if steps is not None and turn.steps is steps:
                turn.steps = None

    def profile(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> tuple[CommandTime, ...]:
        """Run an entry on arrays by input name, one command after the other, and return their times in issue order.

        Each command runs alone: commands that otherwise run concurrently, or in one session of ONNX Runtime, may take
        less time together than the sum. Raises InputError.
        """
        program, checked = self._choose(self._signatures[entry], arrays)
        with self._turn.taken(), self._turn.lock, self._in_arena():
            self._check_ready()
            backend = self._backend(program)
            self._turn.parts = 1
            backend.place(checked)
            return command_times(program, backend.profile())

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes of the memory of the program that ran last, as uint8; also between two `steps`.

        Raises InputError where the region does not hold them.
        """
        for sentence in extent_problems("read", pointer, nbytes, region_sizes(self.plan, self._turn.program)):
            raise InputError(sentence)
        with self._turn.taken(), self._turn.lock:
            self._check_open(self._turn.steps)
            return self._backends[self._turn.program.name].read(pointer, nbytes)

    def replay(self) -> None:
        """Repeat the last run on its inputs; nothing is copied from or to the caller."""
        with self._turn.taken(), self._turn.lock, self._in_arena():
            self._replayed().replay()

    def launch(self, stream: Any = None) -> None:
        """As `replay`, but enqueued on a ``stream`` of the caller, or else the context's, without waiting.

        Launches of a context run one after the other, whatever their streams; `synchronize` waits for them. On the
        CPU the run is complete when this returns, and ``stream`` must be None. Raises InputError.
        """
        again = self._relaunch  # read once: another thread may set it to None
        if again is not None and again(stream):
            return
        handle = self._working.stream_handle(stream)
        with self._turn.taken(), self._turn.lock, self._in_arena():
            backend = self._replayed()
            backend.launch(handle)
            if self._arena is None and self.plan.target is Target.CUDA:
                bindings = self._bindings[self._turn.program.entry]
                self._relaunch = relaunch(self._turn, bindings.watches, backend.launch)

    def synchronize(self) -> None:
        """Wait for the runs that `launch`, or `run` with a stream, has enqueued."""
        with self._turn.taken(), self._turn.lock:
            self._turn.check_ready(self._turn.steps)
            self._backends[self._turn.program.name].synchronize()

    def bind(self, name: str, array: Any, *, entry: str | None = None) -> None:
        """Have the kernels read an input from, or write an output to, an array of the caller, without a copy.

        The array is on the plan's device, has the strides that `inputs` or `outputs` list, and is kept alive. Runs then
        omit a bound input and return a bound output as its array; `launch` and `replay` use what the arrays hold, and
        do not wait for other work on them.
        Other profiles of the entry cannot run. None restores the plan's own memory. The program's graph is rebuilt,
        which takes its time. Raises InputError.
        """
        bindings = self._bindings[self._signatures[entry].name]
        changes = bindings.changes
        binding = bindings.check(name, array, self._working.take)
        with self._turn.taken(), self._turn.lock:
            self._turn.check_ready()
            bindings.check_unchanged(changes)
            self._changed()
            bindings.bind(binding, array, self._backends[binding.program.name])
            self._turn.program, self._turn.parts = binding.program, 1

    def empty_input(self, name: str, *, entry: str | None = None) -> np.ndarray:
        """A new array for an input, of its largest size and in its layout; the contents are arbitrary.

        On a GPU it is in page-locked memory: from 256 KiB on, the usual call uploads it, or a dense part of it, without
        copying it first. Other threads may use the context meanwhile. Raises InputError.
        """
        tensor = self._signatures[entry].largest_input(name)
        self._turn.check_process()
        self._turn.check_ready(self._turn.steps)  # without the lock: other threads may make inputs during a call
        return self._resident.empty_input(tensor)

    def _call(self, signature: Signature, args: Sequence[Any], kwargs: Arrays) -> np.ndarray | tuple[np.ndarray, ...]:
        results = tuple(self._run(signature, signature.by_name(args, kwargs), {}).values())
        return results[0] if len(results) == 1 else results

    def _run(
        self,
        signature: Signature,
        arrays: Arrays,
        out: Arrays,
        *,
        reuse_outputs: bool = False,
        stream: Any = None,
        is_observed: bool = False,
    ) -> dict[str, np.ndarray]:
        observer = telemetry.observer
        if observer is not None and not is_observed:
            bound = self._bindings[signature.name].program
            with observer(telemetry.observed_call(self.plan, signature, arrays, bound)):
                return self._run(signature, arrays, out, reuse_outputs=reuse_outputs, stream=stream, is_observed=True)
        if not (out or reuse_outputs) and stream is None and (direct := self._direct.get(signature.name)) is not None:
            results = direct(arrays)
            if results is not None:
                return results
        return self._run_any(signature, arrays, out, reuse_outputs=reuse_outputs, stream=stream)

    def _run_any(
        self, signature: Signature, arrays: Arrays, out: Arrays, *, reuse_outputs: bool, stream: Any
    ) -> dict[str, np.ndarray]:
        """As `_run`, for any call: direct calls take the usual ones."""
        working, bindings = self._working, self._bindings[signature.name]
        changes = bindings.changes
        usual = not out and stream is None and self._arena is None and bindings.program is None
        if usual and (plain := signature.plain(arrays)) is not None:
            with self._turn.taken(), self._turn.lock:
                self._turn.check_ready()
                bindings.check_unchanged(changes)
                self._turn.parts = 1
                results = self._backend(signature.programs[0]).call(plain, {}, reuse_outputs=reuse_outputs, stream=None)
                self._call_directly(signature, arrays)
                return results
        handle = None if stream is None else working.stream_handle(stream)
        take = working.take if handle is None else partial(working.take, stream=handle)
        checked = signature.check(bindings.complete(arrays, take), take)
        program = signature.exact(checked)
        bindings.check_program(program)
        chosen = signature.serve(checked) if program is None else program
        taken = checked_out(chosen.outputs, out, take) if out else {}
        with self._turn.taken(), self._turn.lock, self._in_arena():
            self._check_ready()
            bindings.check_unchanged(changes)
            if isinstance(chosen, Program):
                if taken:
                    check_apart(taken, chosen, self._backends[chosen.name])
                self._turn.parts, shapes = 1, None
                results = self._backend(chosen).call(checked, taken, reuse_outputs=reuse_outputs, stream=handle)
            else:
                check_parts(chosen, checked, taken, self._backends)
                self._turn.parts = chosen.count
                shapes = tuple(array.shape for array in checked), chosen.last.shapes
                results = serve(chosen, checked, taken, self._backend, reuse_outputs=reuse_outputs, stream=handle)
            if usual and self.plan.target is Target.CUDA and self._turn.parts == 1:
                self._call_directly(signature, arrays, shapes)
        results |= {**bindings.outputs(), **out}
        return {tensor.name: results[tensor.name] for tensor in chosen.outputs}

    def _call_directly(self, signature: Signature, arrays: Arrays, shapes: tuple[Shapes, Shapes] | None = None) -> None:
        """Let later calls like the last one be direct calls where they are usual ones; see `Backend.direct`."""
        direct = self._backends[self._turn.program.name].direct(self._turn, shapes)
        if direct is not None:
            self._direct.add(signature, arrays, direct)

    def _choose(self, signature: Signature, arrays: Arrays) -> tuple[Program, list[np.ndarray | DeviceArray]]:
        """The program that takes these arrays and the bound ones in one run, and all its inputs in order."""
        bindings = self._bindings[signature.name]
        program, checked = signature.choose(bindings.complete(arrays, self._working.take), self._working.take)
        bindings.check_program(program)
        return program, checked

    def _backend(self, program: Program) -> Backend:
        """The backend of ``program``, which from now on is the one that ran last."""
        self._turn.program = program
        return self._backends[program.name]

    def _in_arena(self) -> AbstractContextManager[object]:
        """The lock of the shared arena, if there is one."""
        return _ALONE if self._arena is None else self._arena.taken()

    def _check_ready(self) -> None:
        """Raise InputError where no run can begin."""
        self._turn.check_ready()
        if self._arena is not None:
            self._arena.check_free()

    def _check_open(self, steps: Steps | None) -> None:
        """Raise InputError where a run by these steps cannot go on, nor its memory be read."""
        self._turn.check_ready(steps)
        if self._arena is not None:
            self._arena.check_open()

    def _changed(self) -> None:
        """End direct calls and relaunches: the next call looks at everything again."""
        self._turn.state = object()
        self._direct.clear()
        self._relaunch = None

    def _replayed(self) -> Backend:
        """The backend of the program that ran last.

        Raises InputError where its call was split, or a bound array has moved or belongs to another program.
        """
        turn = self._turn
        self._check_ready()
        if turn.parts > 1:
            why = f"the call before was split into {turn.parts} runs, of which only the last could be repeated"
            raise InputError(f"{why}: call again, or give sizes that one run covers")
        bindings = self._bindings[turn.program.entry]
        bindings.check_in_place()
        bindings.check_program(turn.program)
        return self._backends[turn.program.name]

    def close(self) -> None:
        """Give back memory, streams and graphs; calling it twice is harmless.

        Waits for the run of another thread. Does nothing in a forked process, and while the interpreter shuts down.
        Raises InputError within a run: in a signal handler or a finalizer that has interrupted it.
        """
        turn = self._turn
        if not turn.can_end:
            return
        turn.check_not_within()
        turn.waits = True  # threads that call meanwhile wait, and are told that it is closed
        with turn.taken(), turn.lock:
            if not turn.closed:
                turn.closed = True
                self._changed()
                with ExitStack() as stack:  # all of them, whatever one raises
                    stack.callback(self._working.close)
                    for backend in self._backends.values():
                        stack.callback(backend.close)

    def hold(self, timeout_s: float) -> None:
        """Wait for the run of another thread, and let no more begin: the interpreter is shutting down."""
        if self._turn.can_end:
            self._turn.hold(timeout_s)

    def holdings(self) -> tuple[object, ...]:
        """The objects that own threads and sessions."""
        return self._backends, self._resident

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def while_idle(contexts: Sequence[Context], do: Callable[[list[dict[str, Backend]]], T]) -> T:
    """What ``do`` returns while all these contexts are idle. Other callers block until it returns.

    It takes the backends of each context's loaded programs by name, and may replace them.
    Raises InputError where a run by steps is half done, and for more contexts than the stack has frames for.
    """
    try:
        return _while_idle(contexts, do)
    except RecursionError as exc:
        raise InputError(
            f"{len(contexts)} contexts are too many to wait for at a time: close some, or raise sys.setrecursionlimit"
        ) from exc


def _while_idle(
    contexts: Sequence[Context], do: Callable[[list[dict[str, Backend]]], T], *loaded: dict[str, Backend]
) -> T:
    if not contexts:
        return do([*loaded])
    first, *others = contexts
    turn = first._turn  # noqa: SLF001 - of this module
    waits, turn.waits = turn.waits, True
    try:
        turn.check_not_within()
        with turn.owner, turn.lock:  # nested, so that an exception of a signal handler leaves none held
            if not turn.closed:
                turn.check_ready()
            first._changed()  # noqa: SLF001
            return _while_idle(others, do, *loaded, {} if turn.closed else first._backends)  # noqa: SLF001
    finally:
        turn.waits = waits
