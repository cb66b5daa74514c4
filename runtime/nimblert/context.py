"""Context: the programs of a plan in memory of their own, ready to be called."""

import atexit
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Never, Self, TypeAlias

import numpy as np

from nimblert import telemetry
from nimblert.arena import Arena
from nimblert.calls.backend import Backend, Backends, Loaded
from nimblert.calls.binding import Bindings
from nimblert.calls.entries import Entries, Entry, Signature
from nimblert.calls.known import KnownCalls
from nimblert.calls.lock import CallLock
from nimblert.calls.outputs import check_parts, checked_out, filled, run_parts
from nimblert.errors import InputError
from nimblert.plan import Plan, Pointer, Program, Tensor, Work, listed
from nimblert.stages import stage
from nimblert.telemetry import CommandTime, command_times

if TYPE_CHECKING:
    from collections.abc import Generator

    from nimblert.calls.state import State, Working

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays of the caller by the name of an input or output."""

_UNSHARED = nullcontext()

_open: "weakref.WeakSet[_Runs]" = weakref.WeakSet()


class _Interface:
    """What a plan takes and gives: its entries, inputs and outputs."""

    _noun = "context"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._signatures = Entries(plan)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({listed([repr(program) for program in self.plan.programs])})"

    def __reduce__(self) -> Never:
        raise InputError(f"a copy of this {self._noun} cannot be made, nor a pickle: load the plan where it is to run")

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the plan's entries, for `entry`."""
        return self._signatures.names

    @property
    def program(self) -> Program:
        """The first program of the default entry: the only one, or else "main". Raises InputError without one."""
        return self._signatures[None].programs[0]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of `program`, each with name, shape and dtype."""
        return self.program.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of `program`, each with name, shape and dtype."""
        return self.program.outputs


class _Runs(_Interface):
    """The calls of a context, one at a time."""

    _waits = False  # a thread does not wait for the run of another, but is refused
    _again = "make another one"

    def __init__(self, plan: Plan, loaded: Loaded, *, arena: Arena | None = None, poison: bool = False) -> None:
        super().__init__(plan)
        self._loaded = loaded
        self._arena = arena
        self._lock = CallLock(self._noun, self._again, waits=self._waits)
        self._bindings = {name: Bindings(self._signatures[name]) for name in self._signatures.names}
        self._known = {n: KnownCalls(self._signatures[n].programs[0].inputs, loaded.device) for n in self.entries}
        self._last, self._parts = plan.programs[0], 1
        """The program of the last run, and the number of runs of its call."""
        self._stepping = False
        """Whether a run by `steps` is half done."""
        self._working = loaded.working(None if arena is None else arena.memory, poison=poison)
        self._backends = Backends(plan, loaded, self._working, poison=poison)
        try:
            with stage("program"):
                self._backends[self._last.name]
        except BaseException:
            self._working.close()
            raise
        _open.add(self)

    def __call__(self, /, *args: Any, entry: str | None = None, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """Run an entry on arrays given in the plan's order, by name, or both; their shapes choose the program.

        Returns a single output as an array, several as a tuple in the plan's order. An input named "entry" is given
        by position, or by name in a call of what `entry` returns.
        """
        return self._call(self._signatures[entry], args, kwargs)

    def entry(self, name: str | None = None) -> Entry:
        """Return the entry called ``name``; by default the only one, or else "main". Raises InputError."""
        signature = self._signatures[name]
        return Entry(signature, partial(self._call, signature), partial(self.run, entry=signature.name))

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
        """Run as `run` does, without blocking the event loop; a cancelled task still completes its run."""
        import asyncio  # the caller's event loop has imported it

        return await asyncio.to_thread(self.run, arrays, entry=entry)

    def _call(self, signature: Signature, args: Sequence[Any], kwargs: Arrays) -> np.ndarray | tuple[np.ndarray, ...]:
        results = tuple(self._run(signature, signature.by_name(args, kwargs), {}).values())
        return results[0] if len(results) == 1 else results

    def _run(
        self, signature: Signature, arrays: Arrays, out: Arrays, *, reuse_outputs: bool = False, stream: Any = None
    ) -> dict[str, np.ndarray]:
        observer = telemetry.observer
        if observer is None:
            return self._compute(signature, arrays, out, reuse_outputs=reuse_outputs, stream=stream)
        bound = self._bindings[signature.name].program
        with observer(telemetry.observed_call(self.plan, signature, arrays, bound)):
            return self._compute(signature, arrays, out, reuse_outputs=reuse_outputs, stream=stream)

    def _compute(
        self, signature: Signature, arrays: Arrays, out: Arrays, *, reuse_outputs: bool, stream: Any
    ) -> dict[str, np.ndarray]:
        is_usual = not out and not reuse_outputs and stream is None
        bindings = self._bindings[signature.name]
        with self._lock, self._in_arena():
            self._check_idle()
            known = self._known[signature.name].find(arrays) if is_usual else None
            if known is not None:
                self._last, self._parts = known.program, 1
                return known.run(*known.args)
            handle = self._working.stream_handle(stream)
            take = partial(self._working.take, stream=handle)
            checked = signature.check(bindings.complete(arrays, take), take)
            served = signature.serve(checked)
            bindings.check_program(served.exact)
            taken = checked_out(served.outputs, out, take) if out else {}
            if taken or served.count > 1:
                check_parts(served, checked, taken, self._backends)
            self._last, self._parts = served.last.program, served.count
            if served.count > 1:
                results = run_parts(served, checked, taken, self._backends, stream=handle)
            else:
                prepared = self._backends[self._last.name].prepare(checked, served.last.shapes)
                if is_usual and bindings.program is None:
                    self._known[signature.name].add(arrays, prepared)
                    results = prepared.run(checked)
                else:
                    results = prepared.run_into(checked, taken, reuse_outputs=reuse_outputs, stream=handle)
            results |= filled({**bindings.outputs(), **out}, self._backends[self._last.name].sizes)
        return {tensor.name: results[tensor.name] for tensor in served.outputs}

    def _forget(self) -> None:
        """Check the next call of each kind again: something has changed in the context."""
        for known in self._known.values():
            known.clear()

    def _choose(self, signature: Signature, arrays: Arrays) -> tuple[Backend, list[Any]]:
        """Return the program that takes these arrays and the bound ones in one run, loaded, and its inputs in order."""
        bindings = self._bindings[signature.name]
        checked = signature.check(bindings.complete(arrays, self._working.take), self._working.take)
        program = signature.serve_at_once(checked)
        bindings.check_program(program)
        self._last, self._parts = program, 1
        return self._backends[program.name], checked

    def _in_arena(self) -> AbstractContextManager[object]:
        """Hold the shared arena, if there is one."""
        return _UNSHARED if self._arena is None else self._arena.used_by(self)

    def _check_idle(self) -> None:
        """Raise InputError while a run by steps is half done."""
        if self._stepping:
            raise InputError("a run by steps() is half done: exhaust it or close it first")

    def close(self) -> None:
        """Give back memory, streams and graphs; calling it twice is harmless.

        Waits for the run of another thread. Does nothing after a fork.
        """
        if self._lock.close():
            self._free()

    def _free(self) -> None:
        """Free what this context alone has."""
        self._end_steps()
        self._forget()
        # The stack closes each of them, whatever another raises.
        with ExitStack() as stack:
            stack.callback(self._working.close)
            for backend in self._backends.values():
                stack.callback(backend.close)

    def _end_steps(self) -> None:
        self._stepping = False
        if self._arena is not None:
            self._arena.end_steps(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Context(_Runs):
    """The programs of a plan with an arena, state, inputs and outputs of their own, for one thread at a time.

    Made by `Executable.context`; it shares weights and code with the executable. Each program is loaded on first use.
    Of two threads that use a context at the same time, the second gets an InputError. An exception within a
    call, such as a KeyboardInterrupt, closes the context.
    """

    def warm(self) -> None:
        """Load every program now instead of on its first call."""
        with self._lock:
            for program in self.plan.programs:
                self._backends[program.name]

    @property
    def state(self) -> "State":
        """The named tensors that this context keeps from run to run; all entries of the plan share them."""
        from nimblert.calls.state import State

        return State(self)

    def reset(self) -> None:
        """Give the state of this context its initial values, those of the plan."""
        with self.between_runs() as working:
            working.reset()

    @contextmanager
    def between_runs(self) -> "Iterator[Working]":
        """Provide the memory that holds the state; no run begins meanwhile. Raises InputError as a run would."""
        with self._lock:
            self._check_idle()
            yield self._working

    def steps(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> "Generator[Work, None, None]":
        """Run an entry on arrays by input name, one command after the other in issue order.

        Yields each launch, copy or fill when it is done; `read` gives what it wrote. Until the generator is
        exhausted or closed, every other run raises InputError.
        """
        with self._lock, self._in_arena():
            self._check_idle()
            backend, checked = self._choose(self._signatures[entry], arrays)
            self._forget()
            backend.place(checked)
            steps = backend.steps()
            self._stepping = True
            if self._arena is not None:
                self._arena.stepping = self
        try:
            while True:
                with self._lock, self._in_arena():
                    work = next(steps, None)
                if work is None:
                    return
                yield work
        finally:
            self._end_steps()

    def profile(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> tuple[CommandTime, ...]:
        """Run an entry on arrays by input name, one command after the other, and return their times in issue order.

        Each command runs alone: commands that otherwise run concurrently, or in one session of ONNX Runtime, may take
        less time together than the sum. Raises InputError.
        """
        with self._lock, self._in_arena():
            self._check_idle()
            backend, checked = self._choose(self._signatures[entry], arrays)
            backend.place(checked)
            return command_times(self._last, backend.profile())

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """Return a copy of ``nbytes`` bytes of the memory of the program that ran last, as uint8; also between steps.

        Raises InputError where the region does not hold them.
        """
        from nimblert.check.bounds import extent_problems, region_sizes

        for sentence in extent_problems("read", pointer, nbytes, region_sizes(self.plan, self._last)):
            raise InputError(sentence)
        with self._lock, self._in_arena():
            return self._backends[self._last.name].read(pointer, nbytes)

    def replay(self) -> None:
        """Repeat the last run on its inputs; nothing is copied from or to the caller."""
        with self._lock, self._in_arena():
            self._repeated().replay()

    def launch(self, stream: Any = None) -> None:
        """Enqueue a `replay` on a ``stream`` of the caller, by default the context's, without waiting.

        Launches of a context run one after the other, whatever their streams; `synchronize` waits for them. On the
        CPU the run is complete when this returns, and ``stream`` must be None. Raises InputError.
        """
        handle = self._working.stream_handle(stream)
        with self._lock, self._in_arena():
            self._repeated().enqueue_replay(handle)

    def _repeated(self) -> Backend:
        """Return the backend of the program that ran last.

        Raises InputError where its call was split, or a bound array has moved or belongs to another program.
        """
        self._check_idle()
        if self._parts > 1:
            why = f"the call before was split into {self._parts} runs, of which only the last could be repeated"
            raise InputError(f"{why}: call again, or give sizes that one run covers")
        bindings = self._bindings[self._last.entry]
        bindings.check_in_place()
        bindings.check_program(self._last)
        return self._backends[self._last.name]

    def synchronize(self) -> None:
        """Wait for the runs that `launch`, or `run` with a stream, has enqueued."""
        with self._lock:
            self._backends[self._last.name].synchronize()

    def bind(self, name: str, array: Any, *, entry: str | None = None) -> None:
        """Have the kernels read an input from, or write an output to, an array of the caller, without a copy.

        The array is on the plan's device or in page-locked memory (`empty_output`), has the strides that `inputs` or
        `outputs` list, and is kept alive. Runs then omit a bound input and return a bound output as its array;
        `launch` and `replay` use what the arrays hold, and do not wait for other work on them.
        Other profiles of the entry cannot run. None restores the plan's own memory. The program's graph is rebuilt,
        which takes its time. Raises InputError.
        """
        bindings = self._bindings[self._signatures[entry].name]
        with self._lock:
            self._check_idle()
            binding = bindings.check(name, array, self._working.take)
            self._forget()
            bindings.bind(binding, array, self._backends[binding.program.name])
            self._last, self._parts = binding.program, 1

    def empty_input(self, name: str, *, entry: str | None = None) -> np.ndarray:
        """Return a new array for an input, of its largest size and in its layout; the contents are arbitrary.

        On a GPU it is in page-locked memory: an input above 1 MiB is uploaded from there without being copied first.
        Other threads may use the context meanwhile. Raises InputError.
        """
        tensor = self._signatures[entry].largest("input", name)
        self._lock.check_open()
        return self._loaded.empty(tensor)

    def empty_output(self, name: str, *, entry: str | None = None) -> np.ndarray:
        """Return a new array for an output, as `empty_input` does for an input.

        Once it is bound, other threads may read it while a run writes it: on a GPU kernels write to the host's memory.
        """
        tensor = self._signatures[entry].largest("output", name)
        self._lock.check_open()
        return self._loaded.empty(tensor)


@atexit.register
def _close_all() -> None:
    """Close what is still open when the interpreter ends: native code of daemon threads would crash the process."""
    for context in list(_open):
        context.close()
