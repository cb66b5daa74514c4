"""Context: the programs of a plan in memory of their own, which can be called."""

import asyncio
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from nimblert import interpreter
from nimblert.arena import Arena
from nimblert.arrays.device_arrays import DeviceArray
from nimblert.calls.backend import Backend, Resident
from nimblert.calls.binding import Bindings
from nimblert.calls.entries import Signature
from nimblert.calls.serving import checked_out, serve
from nimblert.calls.state import State, Working
from nimblert.calls.turn import DirectCall, Relaunch, Turn
from nimblert.errors import InputError
from nimblert.extents import region_sizes
from nimblert.plan import Plan, Pointer, Program, Target, Tensor, Work
from nimblert.timing import CommandTime, command_times

_LISTED = 4
"""Of what may be many, a repr shows so many."""


class Context:
    """The programs of a plan with an arena, state, inputs and outputs of their own, for one thread at a time.

    Made by `Executable.context`; weights and code are the executable's. Each program is loaded when it
    is first asked for. Ctrl-C ends a run between two commands, and the context stays usable. What two
    threads ask of one context at the same time raises InputError in the second.
    """

    _noun = "context"
    _turns = False
    """Whether threads wait for one another, or the second is refused."""
    _again = "make another one"

    def __init__(self, plan: Plan, resident: Resident, *, arena: Arena | None = None, poison: bool = False) -> None:
        self.plan = plan
        self._resident = resident
        self._arena = arena
        self._poison = poison
        self._signatures = {name: Signature(name, programs) for name, programs in plan.entries.items()}
        (default,) = self._signatures if len(self._signatures) == 1 else ("main",)
        named: dict[str | None, Signature | None] = {None: self._signatures.get(default)}
        named.update(self._signatures)
        self._named = named
        self._bindings = {name: Bindings(signature) for name, signature in self._signatures.items()}
        self._backends: dict[str, Backend] = {}
        self._turn = Turn(plan.programs[0])  # `replay` and `read` are about its program
        self._direct: dict[str, DirectCall] = {}
        self._relaunch: Relaunch | None = None
        self._closed = False
        self._steps: Generator[Work, None, None] | None = None
        self._working = resident.working(None if arena is None else arena.memory, poison=poison)
        try:
            self._load(self._turn.program)
        except BaseException:
            self._working.close()
            raise
        interpreter.live.add(self)

    def __repr__(self) -> str:
        programs = ", ".join(map(repr, self.plan.programs[:_LISTED]))
        more = ", ..." if len(self.plan.programs) > _LISTED else ""
        return f"{type(self).__name__}({programs}{more})"

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the plan's entries, each of which `entry` gives."""
        return tuple(self._signatures)

    def entry(self, name: str | None = None) -> "Entry":
        """The entry called ``name``: without one, the only one there is, or "main". Raises InputError."""
        return Entry(self, self._signature(name))

    @property
    def program(self) -> Program:
        """The first program of the entry that is meant where none is named."""
        return self._signature(None).programs[0]

    @property
    def backend(self) -> Backend:
        """What runs `program`."""
        with self._lock:
            self._check_ready(self._steps)
            return self._load(self.program)

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
        with self._lock:
            self._check_ready(self._steps)
            for programs in self.plan.entries.values():
                for program in programs:
                    self._load(program)

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
        with self._lock:
            self._check_ready()
            yield self._working

    def __call__(self, *args: Any, entry: str | None = None, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """Run an entry on arrays given in the plan's order, by name, or both; their shapes choose its program.

        One output comes back as an array, several as a tuple in the plan's order. An input whose name
        is "entry" is given by position, or to what `entry` returns.
        """
        return self._call(self._named.get(entry) or self._signature(entry), args, kwargs)

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
        signature = self._named.get(entry) or self._signature(entry)
        return self._run(signature, arrays, out or {}, reuse_outputs=reuse_outputs, stream=stream)

    async def arun(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> dict[str, np.ndarray]:
        """As `run`, while the event loop goes on; the run itself goes to its end even if its task is cancelled."""
        return await asyncio.to_thread(self.run, arrays, entry=entry)

    def steps(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> Generator[Work, None, None]:
        """Run an entry on arrays by input name, one command after the other in issue order.

        Gives each launch, copy or fill when it is done; what it wrote can be had of `read`. Until the
        generator is exhausted, closed or dropped, every other run raises InputError.
        """
        program, checked = self._choose(self._signature(entry), arrays)
        with self._lock:
            self._check_ready()
            backend = self._load(program)
            steps = backend.steps()
        try:
            with self._running(steps):
                self._check_ready()
                self._steps = steps
                self._changed()
                self._turn.program = program
                backend.place(checked)
            while True:
                with self._lock:
                    self._check_ready(steps)
                    work = next(steps, None)
                if work is None:
                    return
                yield work
        finally:
            if self._steps is steps:  # without the lock: this thread may hold it where it drops the generator
                self._steps = None
            if self._arena is not None and self._arena.owner is steps:
                self._arena.owner = None

    def profile(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> tuple[CommandTime, ...]:
        """Run an entry on arrays by input name, one command after the other: how long each took, in issue order.

        Commands run alone here: those that otherwise share the machine, or one session of ONNX Runtime,
        may take less time together than the sum says. Raises InputError.
        """
        program, checked = self._choose(self._signature(entry), arrays)
        with self._running():
            self._check_ready()
            backend = self._load(program)
            self._turn.program = program
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
        with self._lock:
            self._check_ready(self._steps)
            return self._load(self._turn.program).read(pointer, nbytes)

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
        if self._relaunch is not None and self._relaunch(stream):
            return
        handle = self._working.stream_handle(stream)
        with self._running():
            backend = self._replayed()
            backend.launch(handle)
            if self._arena is None and self.plan.target is Target.CUDA:
                bindings = self._bindings[self._turn.program.entry]
                self._relaunch = Relaunch(self._turn, bindings.check_in_place, backend.launch)

    def synchronize(self) -> None:
        """Wait for what was enqueued by `launch` and by `run` on a stream."""
        with self._lock:
            self._check_ready(self._steps)
            self._load(self._turn.program).synchronize()

    def bind(self, name: str, array: Any, *, entry: str | None = None) -> None:
        """Have the kernels read an input, or write an output, where an array of the caller is: nothing is copied.

        The array is on the plan's device, with the layout that `inputs` and `outputs` tell, and is kept.
        A run then leaves a bound input out and gives a bound output as its array; `launch` and `replay` use what
        stands there. Other profiles of the entry cannot run. None gives the plan's own memory back.
        Takes as long as the program's graph takes to build. Raises InputError.
        """
        bindings = self._bindings[self._signature(entry).name]
        checked = None if array is None else bindings.check(name, array, self._working.take)
        with self._lock:
            self._check_ready()
            found = bindings.bound(name) if checked is None else checked[:2]
            if found is None:
                raise InputError(f"bind: nothing is bound to {name!r}")
            program, tensor = found
            self._changed()
            backend = self._load(program)
            if checked is None:
                backend.bind(tensor, None)
                bindings.drop(name)
            else:
                bindings.check_apart(program, tensor, checked[2], backend.own_address)
                backend.bind(tensor, checked[2])
                bindings.add(program, tensor, array, checked[2])
            self._turn.program = program

    def _call(
        self, signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        results = tuple(self._run(signature, signature.by_name(args, kwargs), {}).values())
        return results[0] if len(results) == 1 else results

    def _run(
        self,
        signature: Signature,
        arrays: Mapping[str, Any],
        out: Mapping[str, Any],
        *,
        reuse_outputs: bool = False,
        stream: Any = None,
    ) -> dict[str, np.ndarray]:
        if not (out or reuse_outputs) and stream is None and (direct := self._direct.get(signature.name)) is not None:
            results = direct(arrays)
            if results is not None:
                return results
        return self._run_any(signature, arrays, out, reuse_outputs=reuse_outputs, stream=stream)

    def _run_any(
        self,
        signature: Signature,
        arrays: Mapping[str, Any],
        out: Mapping[str, Any],
        *,
        reuse_outputs: bool,
        stream: Any,
    ) -> dict[str, np.ndarray]:
        """As `_run`, whatever the call is."""
        working, bindings = self._working, self._bindings[signature.name]
        changes = bindings.changes
        usual = not out and stream is None and self._arena is None and bindings.program is None
        if usual and (plain := signature.plain(arrays)) is not None:
            with self._lock:
                self._check_ready()
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
            self._check_ready()
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

    def _choose(
        self, signature: Signature, arrays: Mapping[str, Any]
    ) -> tuple[Program, list[np.ndarray | DeviceArray]]:
        """The program that takes these arrays and those that are bound in one run, and all of them in its order."""
        bindings = self._bindings[signature.name]
        program, checked = signature.choose(bindings.complete(arrays), self._working.take)
        bindings.check_program(program)
        return program, checked

    def _backend(self, program: Program) -> Backend:
        """What runs ``program``, which `replay` and `read` are about from now on."""
        self._turn.program = program
        return self._load(program)

    def _signature(self, name: str | None) -> Signature:
        found = self._named.get(name)
        if found is None:
            what = "no entry is named" if name is None else f"entry {name!r}: not found"
            raise InputError(f"{what}, the plan has {list(self._signatures)}")
        return found

    def _load(self, program: Program) -> Backend:
        """What runs ``program``, loaded now if it was not before."""
        if program.name not in self._backends:
            self._backends[program.name] = self._resident.backend(program, self._working, poison=self._poison)
        return self._backends[program.name]

    @property
    def _lock(self) -> threading.Lock:
        """Whose turn it is. A child may have been forked while a thread held it, which no child has."""
        self._check_process()
        if not self._turns and self._turn.lock.locked():
            raise InputError("this context is at work in another thread: each takes one of its own, context()")
        return self._turn.lock

    def _running(self, steps: Generator[Work, None, None] | None = None) -> AbstractContextManager[object]:
        """The turn of a run, and the arena for it, which ``steps`` keep until they end."""
        return self._lock if self._arena is None else self._sharing(self._arena, steps)

    @contextmanager
    def _sharing(self, arena: Arena, steps: Generator[Work, None, None] | None) -> Iterator[None]:
        with self._lock, arena.turn(steps):
            yield

    def _changed(self) -> None:
        """Have the next call look at everything again; whose turn it is says that."""
        self._turn.state = object()
        self._direct.clear()
        self._relaunch = None

    def _check_process(self) -> None:
        """Raise InputError in a forked process."""
        process = self._turn.process
        if os.getpid() != process:
            raise InputError(f"this {self._noun} was loaded in process {process}: load the plan again in this one")

    def _check_ready(self, steps: Generator[Work, None, None] | None = None) -> None:
        """Raise InputError unless it is open and nothing but ``steps`` is half done."""
        if self._closed:
            raise InputError(f"this {self._noun} is closed: {self._again}")
        if self._steps is not steps:
            raise InputError("a run by steps() is half done: exhaust it or close it first")

    def _replayed(self) -> Backend:
        """What runs the program of the call before.

        Raises InputError where that call was split, or what is bound is elsewhere by now or of another program.
        """
        self._check_ready()
        turn = self._turn
        if turn.parts > 1:
            raise InputError(f"the call before was {turn.parts} runs, of which the last alone is left: call again")
        bindings = self._bindings[turn.program.entry]
        bindings.check_in_place()
        bindings.check_program(turn.program)
        return self._load(turn.program)

    def close(self) -> None:
        """Give back memory, streams and graphs; calling it twice is harmless.

        Waits for the run of another thread. In a forked process it does nothing.
        """
        if os.getpid() != self._turn.process:
            return
        self._turns = True  # who calls meanwhile waits, and reads that it is closed
        with self._turn.lock:
            if not self._closed:
                self._closed = True
                self._changed()
                for backend in self._backends.values():
                    backend.close()
                self._working.close()

    def hold(self, timeout_s: float) -> None:
        """Let the run of another thread end, and no other begin any more: who calls from now on waits."""
        if os.getpid() == self._turn.process:
            self._turns = True
            self._turn.lock.acquire(timeout=timeout_s)

    def holdings(self) -> tuple[object, ...]:
        """What has threads and sessions."""
        return self._backends, self._resident

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Entry:
    """One entry of a context. ``name``; ``programs`` are those of its profiles."""

    def __init__(self, context: Context, signature: Signature) -> None:
        self.name = signature.name
        self.programs = signature.programs
        self._context = context
        self._signature = signature

    def __repr__(self) -> str:
        return f"Entry({self.name!r}, {len(self.programs)} programs)"

    def __call__(self, *args: Any, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """As a call of the context that names this entry."""
        return self._context._call(self._signature, args, kwargs)  # noqa: SLF001

    def run(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """As `Context.run`."""
        return self._context.run(arrays, entry=self.name)


@contextmanager
def idle(contexts: Iterable[Context]) -> Iterator[dict[tuple[Context, str], Backend]]:
    """The programs that open contexts have loaded, none of which runs until the block ends: who calls one waits.

    What is in the dict then is what they run from now on. Raises InputError where a run by steps is half done.
    """
    with ExitStack() as stack:
        waiting = []
        for context in contexts:
            stack.callback(setattr, context, "_turns", context._turns)  # noqa: SLF001
            context._turns = True  # noqa: SLF001
            stack.enter_context(context._turn.lock)  # noqa: SLF001
            if not context._closed:  # noqa: SLF001
                context._check_ready()  # noqa: SLF001
                waiting.append(context)
        loaded = {(c, name): backend for c in waiting for name, backend in c._backends.items()}  # noqa: SLF001
        yield loaded
        for (context, name), backend in loaded.items():
            context._changed()  # noqa: SLF001
            context._backends[name] = backend  # noqa: SLF001
