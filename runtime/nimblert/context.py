"""Context: the programs of a plan in memory of their own, ready to be called."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Never, Self, TypeAlias

import numpy as np

from nimblert import interpreter
from nimblert.arena import Arena
from nimblert.arrays.device_arrays import DeviceArray
from nimblert.calls.backend import Backend, Backends, Resident
from nimblert.calls.binding import Bindings
from nimblert.calls.entries import Entries, Entry, Signature
from nimblert.calls.outputs import checked_out
from nimblert.calls.parts import serve
from nimblert.calls.state import State, Working
from nimblert.calls.turn import Relaunch, Steps, Turn
from nimblert.errors import InputError
from nimblert.extents import region_sizes
from nimblert.plan import Plan, Pointer, Program, Target, Tensor, listed
from nimblert.timing import CommandTime, command_times

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays of the caller by the name of an input or output."""


class Context:
    """The programs of a plan with an arena, state, inputs and outputs of their own, for one thread at a time.

    Made by `Executable.context`; weights and code are the executable's. Each program is loaded when it
    is first asked for. Ctrl-C ends a run between two commands, and the context stays usable. What two
    threads ask of one context at the same time raises InputError in the second.
    """

    _noun = "context"
    _waits = False
    """Whether a thread waits for the run of another, or is refused."""
    _again = "make another one"

    def __init__(self, plan: Plan, resident: Resident, *, arena: Arena | None = None, poison: bool = False) -> None:
        self.plan = plan
        self._resident = resident
        self._arena = arena
        self._poison = poison
        self._signatures = Entries(plan)
        self._bindings = {name: Bindings(self._signatures[name]) for name in self._signatures.names}
        self._turn = Turn(plan.programs[0], self._noun, self._again, waits=self._waits)
        self._direct = self._turn.direct
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
        """The names of the plan's entries, each of which `entry` gives."""
        return self._signatures.names

    def entry(self, name: str | None = None) -> Entry:
        """The entry called ``name``: without one, the only one there is, or "main". Raises InputError."""
        signature = self._signatures[name]
        return Entry(signature, partial(self._call, signature), partial(self.run, entry=signature.name))

    @property
    def program(self) -> Program:
        """The first program of the entry that is meant where none is named."""
        return self._signatures[None].programs[0]

    @property
    def backend(self) -> Backend:
        """What runs `program`."""
        with self._turn.taken():
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
        """Load every program now, rather than when it is first called."""
        with self._turn.taken():
            self._turn.check_ready(self._turn.steps)
            for program in self.plan.programs:
                self._backends[program.name]

    @property
    def state(self) -> State:
        """The named tensors that this context keeps from run to run; all entries of the plan share them."""
        return State(self)

    def reset(self) -> None:
        """Give the state of this context its initial values, those of the plan."""
        with self.between_runs() as working:
            working.kept.reset()

    @contextmanager
    def between_runs(self) -> Iterator[Working]:
        """The memory that holds the state, with no run before the block has ended. Raises InputError as a run would."""
        with self._turn.taken():
            self._turn.check_ready()
            yield self._working

    def __call__(self, *args: Any, entry: str | None = None, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """Run an entry on arrays given in the plan's order, by name, or both; their shapes choose its program.

        One output comes back as an array, several as a tuple in the plan's order. An input whose name
        is "entry" is given by position, or to what `entry` returns.
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
        """Run an entry on arrays by input name: the outputs by name, in the plan's order.

        An output that ``out`` names is written into that array. Others are new arrays; with
        ``reuse_outputs`` they are views of memory that the next run writes again, and cost no copy.

        On a GPU ``stream`` is one of the caller, by its handle or ``__cuda_stream__``: the run is enqueued
        there and not waited for. Outputs are on the device, written when the stream comes to them.
        Raises InputError.
        """
        signature = self._signatures[entry]
        if out is not None and not isinstance(out, Mapping):
            raise InputError(f"out: got {type(out).__name__}, expected a dict of arrays by output name")
        return self._run(signature, arrays, out or {}, reuse_outputs=reuse_outputs, stream=stream)

    async def arun(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> dict[str, np.ndarray]:
        """As `run`, while the event loop goes on; the run itself goes to its end even if its task is cancelled."""
        return await asyncio.to_thread(self.run, arrays, entry=entry)

    def steps(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> Steps:
        """Run an entry on arrays by input name, one command after the other in issue order.

        Yields each launch, copy or fill when it is done; `read` gives what it wrote. Until the generator is
        exhausted, closed or dropped, every other run raises InputError.
        """
        program, checked = self._choose(self._signatures[entry], arrays)
        turn, arena = self._turn, self._arena
        steps: Steps | None = None
        try:
            with turn.taken():
                turn.check_ready()
                backend = self._backends[program.name]
                steps = backend.steps()
                with nullcontext() if arena is None else arena.turn(steps):
                    turn.steps = steps
                    turn.changed()
                    turn.program, turn.parts = program, 1
                    backend.place(checked)
            while True:
                with turn.taken():
                    turn.check_ready(steps)
                    work = next(steps, None)
                if work is None:
                    return
                yield work
        finally:
            if turn.steps is steps:  # without the lock: this thread may hold it where it drops the generator
                turn.steps = None
            if arena is not None and arena.owner is steps:
                arena.owner = None

    def profile(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> tuple[CommandTime, ...]:
        """Run an entry on arrays by input name, one command after the other: how long each took, in issue order.

        Commands run alone here: those that otherwise share the machine, or one session of ONNX Runtime,
        may take less time together than the sum says. Raises InputError.
        """
        program, checked = self._choose(self._signatures[entry], arrays)
        with self._running():
            self._turn.check_ready()
            self._turn.parts = 1
            backend = self._backend(program)
            backend.place(checked)
            return command_times(program, backend.profile())

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes of the memory of the program run last, between two `steps`, as uint8.

        Raises InputError where the region does not hold them.
        """
        held = region_sizes(self.plan, self._turn.program).get((pointer.region, pointer.index), 0)
        if not 0 <= pointer.offset <= pointer.offset + nbytes <= held:
            region = f"{pointer.region.name}({pointer.index})"
            raise InputError(f"read: {nbytes} bytes at {pointer.offset} lie outside {region} ({held} bytes)")
        with self._turn.taken():
            self._turn.check_ready(self._turn.steps)
            return self._backends[self._turn.program.name].read(pointer, nbytes)

    def replay(self) -> None:
        """Run again on the inputs of the run before; nothing is copied to or from the caller."""
        with self._running():
            self._replayed().replay()

    def launch(self, stream: Any = None) -> None:
        """As `replay`, enqueued on a ``stream`` of the caller or on our own, and not waited for.

        What is enqueued in a context runs one after the other, on whatever streams; `synchronize`
        waits for it. On the CPU it is done when this returns, and there is no stream to choose.
        Raises InputError.
        """
        relaunch = self._turn.relaunch  # which another thread may take away
        if relaunch is not None and relaunch(stream):
            return
        handle = self._working.stream_handle(stream)
        with self._running():
            backend = self._replayed()
            backend.launch(handle)
            if self._arena is None and self.plan.target is Target.CUDA:
                bindings = self._bindings[self._turn.program.entry]
                self._turn.relaunch = Relaunch(self._turn, bindings.check_in_place, backend.launch)

    def synchronize(self) -> None:
        """Wait for what was enqueued by `launch` and by `run` on a stream."""
        with self._turn.taken():
            self._turn.check_ready(self._turn.steps)
            self._backends[self._turn.program.name].synchronize()

    def bind(self, name: str, array: Any, *, entry: str | None = None) -> None:
        """Have the kernels read an input, or write an output, where an array of the caller is: nothing is copied.

        The array is on the plan's device, with the layout that `inputs` and `outputs` tell, and is kept.
        A run then leaves a bound input out and gives a bound output as its array; `launch` and `replay` use what
        stands there. Other profiles of the entry cannot run. None gives the plan's own memory back.
        Takes as long as the program's graph takes to build. Raises InputError.
        """
        bindings = self._bindings[self._signatures[entry].name]
        changes = bindings.changes
        binding = bindings.check(name, array, self._working.take)
        with self._turn.taken():
            self._turn.check_ready()
            bindings.check_unchanged(changes)
            self._turn.changed()
            bindings.bind(binding, array, self._backends[binding.program.name])
            self._turn.program, self._turn.parts = binding.program, 1

    def _call(self, signature: Signature, args: Sequence[Any], kwargs: Arrays) -> np.ndarray | tuple[np.ndarray, ...]:
        results = tuple(self._run(signature, signature.by_name(args, kwargs), {}).values())
        return results[0] if len(results) == 1 else results

    def _run(
        self, signature: Signature, arrays: Arrays, out: Arrays, *, reuse_outputs: bool = False, stream: Any = None
    ) -> dict[str, np.ndarray]:
        if not (out or reuse_outputs) and stream is None and (direct := self._direct.get(signature.name)) is not None:
            results = direct(arrays)
            if results is not None:
                return results
        return self._run_any(signature, arrays, out, reuse_outputs=reuse_outputs, stream=stream)

    def _run_any(
        self, signature: Signature, arrays: Arrays, out: Arrays, *, reuse_outputs: bool, stream: Any
    ) -> dict[str, np.ndarray]:
        """As `_run`, whatever the call is."""
        working, bindings = self._working, self._bindings[signature.name]
        changes = bindings.changes
        usual = not out and stream is None and self._arena is None and bindings.program is None
        if usual and (plain := signature.plain(arrays)) is not None:
            with self._turn.taken():
                self._turn.check_ready()
                bindings.check_unchanged(changes)
                self._turn.parts = 1
                backend = self._backend(signature.programs[0])
                results = backend.call(plain, out, reuse_outputs=reuse_outputs, stream=None)
                self._call_directly(signature, backend)
                return results
        handle = None if stream is None else working.stream_handle(stream)
        take = working.take if handle is None else partial(working.take, stream=handle)
        checked = signature.check(bindings.complete(arrays), take)
        program = signature.exact(checked)
        bindings.check_program(program)
        chosen = signature.serve(checked) if program is None else program
        taken = checked_out(chosen.outputs, out, take) if out else {}
        with self._running():
            self._turn.check_ready()
            bindings.check_unchanged(changes)
            self._turn.parts = 1 if isinstance(chosen, Program) else len(chosen.parts)
            if isinstance(chosen, Program):
                backend = self._backend(chosen)
                results = backend.call(checked, taken, reuse_outputs=reuse_outputs, stream=handle)
                if usual and self.plan.target is Target.CUDA:
                    self._call_directly(signature, backend)
            else:
                results = serve(chosen, checked, taken, self._backend, reuse_outputs=reuse_outputs, stream=handle)
        results |= {**bindings.outputs(), **out}
        return {tensor.name: results[tensor.name] for tensor in chosen.outputs}

    def _call_directly(self, signature: Signature, backend: Backend) -> None:
        """Have calls of an entry that are like the last one take the short way."""
        direct = backend.direct(self._turn)
        if direct is not None:
            self._direct[signature.name] = direct

    def _choose(self, signature: Signature, arrays: Arrays) -> tuple[Program, list[np.ndarray | DeviceArray]]:
        """The program that takes these arrays and those that are bound in one run, and all of them in its order."""
        bindings = self._bindings[signature.name]
        program, checked = signature.choose(bindings.complete(arrays), self._working.take)
        bindings.check_program(program)
        return program, checked

    def _backend(self, program: Program) -> Backend:
        """What runs ``program``, which `replay` and `read` are about from now on."""
        self._turn.program = program
        return self._backends[program.name]

    def _running(self) -> AbstractContextManager[object]:
        """The turn of a run, and of the arena that it takes place in."""
        return self._turn.taken() if self._arena is None else self._sharing(self._arena)

    @contextmanager
    def _sharing(self, arena: Arena) -> Iterator[None]:
        with self._turn.taken(), arena.turn():
            yield

    def _replayed(self) -> Backend:
        """What runs the program of the call before.

        Raises InputError where that call was split, or what is bound is elsewhere by now or of another program.
        """
        turn = self._turn
        turn.check_ready()
        if turn.parts > 1:
            raise InputError(f"the call before was {turn.parts} runs, of which the last alone is left: call again")
        bindings = self._bindings[turn.program.entry]
        bindings.check_in_place()
        bindings.check_program(turn.program)
        return self._backends[turn.program.name]

    def close(self) -> None:
        """Give back memory, streams and graphs; calling it twice is harmless.

        Waits for the run of another thread. In a forked process, and when the interpreter shuts down, it does nothing.
        """
        turn = self._turn
        if not turn.can_end:
            return
        turn.waits = True  # who calls meanwhile waits, and reads that it is closed
        with turn.lock:
            if not turn.closed:
                turn.closed = True
                turn.changed()
                for backend in self._backends.values():
                    backend.close()
                self._working.close()

    @contextmanager
    def _idle(self) -> Iterator[dict[str, Backend]]:
        """The programs that were loaded, by name, none of which runs until the block ends: callers wait.

        The block may put others in their place. Raises InputError where a run by steps is half done.
        """
        turn = self._turn
        waits, turn.waits = turn.waits, True
        try:
            with turn.lock:
                if turn.closed:
                    yield {}
                    return
                turn.check_ready()
                yield self._backends
                turn.changed()
        finally:
            turn.waits = waits

    def hold(self, timeout_s: float) -> None:
        """Let the run of another thread end, and none begin any more: the interpreter shuts down."""
        if self._turn.can_end:
            self._turn.hold(timeout_s)

    def holdings(self) -> tuple[object, ...]:
        """What has threads and sessions."""
        return self._backends, self._resident

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
