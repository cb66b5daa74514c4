"""Process pools: a process for each device; a call goes to the one with the fewest calls in flight."""

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from nimblert import interpreter
from nimblert.calls import refitting
from nimblert.calls.entries import Signature
from nimblert.calls.outputs import checked_out
from nimblert.calls.refitting import NewWeights
from nimblert.errors import CudaError, DeviceLostError, InputError, NimbleError
from nimblert.plan import Plan, listed
from nimblert.pool import Pool
from nimblert.processes import weights as new_weights
from nimblert.processes.channel import Memory
from nimblert.processes.dispatcher import Call, Dispatcher, Exclusive, none_left
from nimblert.processes.layout import Layout, Layouts
from nimblert.processes.process import Process, end, ended_by

if TYPE_CHECKING:
    import asyncio


class ProcessPool(Pool):
    """A plan on several devices, with a process for each. Threads and tasks may share it.

    The arrays of a call go through shared memory, so they are on the host. Devices fail independently: after a failed
    kernel, or if its process is killed, calls in flight on that device raise DeviceLostError, and later ones go to the
    others. ``devices`` are those in service.
    """

    def __init__(self, plan: Plan, layouts: Layouts, processes: Sequence[Process], weights: Memory) -> None:
        """``processes`` have loaded the plan, and end with the pool; see `nimblert.load_pool`."""
        super().__init__(plan)
        self._dispatcher = Dispatcher(processes, partial(_end, tuple(processes), weights))
        self._layouts = layouts
        self._all = tuple(processes)
        self._weights = weights
        self._end = weakref.finalize(self, _stopped, self._dispatcher, self._process)
        self._end.atexit = False  # `hold` comes first
        interpreter.live.add(self)

    def __repr__(self) -> str:
        programs = listed([repr(program) for program in self.plan.programs])
        return f"ProcessPool({programs}, devices={list(self.devices)})"

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that calls go to: those in service."""
        return tuple(process.device for process in self._dispatcher.processes)

    def __call__(
        self, /, *args: Any, entry: str | None = None, **kwargs: Any
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """As a call of an executable, on the device with the fewest calls in flight."""
        signature = self._signatures[entry]
        results = tuple(self.run(signature.by_name(args, kwargs), entry=signature.name).values())
        return results[0] if len(results) == 1 else results

    def run(
        self, arrays: Mapping[str, Any], *, entry: str | None = None, out: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """As `Context.run`, on the device with the fewest calls in flight; arrays are on the host.

        Raises InputError, CudaError; DeviceLostError where the device's process ended during the call, or none is left.
        """
        layout, given = self._laid_out(self._signatures[entry], arrays)
        if out is not None and not isinstance(out, Mapping):
            raise InputError(f"out: got {type(out).__name__}, expected a dict of arrays by output name")
        taken: Mapping[str, Any] = checked_out(layout.output_tensors, out, _refused) if out else {}
        call = Call(layout, given)
        self._dispatcher.submit(call)
        try:
            call.wait()
        except BaseException:  # a signal handler's
            call.is_dropped = True
            raise
        results: dict[str, np.ndarray] = call.outcome()
        for name, array in taken.items():
            array[...] = results[name]
        return {name: (out or {}).get(name, result) for name, result in results.items()}

    async def arun(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> dict[str, np.ndarray]:
        """As `run`, without blocking the event loop; a call is completed even if its task is cancelled."""
        import asyncio  # the caller's event loop has imported it

        loop = asyncio.get_running_loop()
        done = loop.create_future()
        layout, given = self._laid_out(self._signatures[entry], arrays)
        call = Call(layout, given, partial(_tell, loop, done))
        self._dispatcher.submit(call)
        await done
        results: dict[str, np.ndarray] = call.outcome()
        return results

    def _laid_out(self, signature: Signature, arrays: Mapping[str, Any]) -> tuple[Layout, Sequence[Any]]:
        """The layout of a call, and its inputs in order. Raises InputError."""
        self._check_process()
        given = signature.plain(arrays) or signature.check(arrays, _refused)
        return self._layouts.of(signature, tuple([array.shape for array in given])), given

    def _lose(self, process: Process) -> None:
        """Give a process no more calls; it ends if it has not."""
        self._dispatcher.lose(process)
        process.how()

    def context(self) -> Never:
        """Raises InputError: a context cannot be in another process."""
        raise InputError("a pool of processes has no contexts of this one: load the plan without processes=True")

    def refit(self, weights: NewWeights) -> None:
        """Replace weights on all devices, as `Executable.refit` does on one.

        Calls in flight end before the change, and others begin after it. The arrays are on the host. No device
        changes before all are prepared; where one cannot be, none changes. A device whose process ends meanwhile is
        out of service, and the others change. Raises InputError, CudaError, DeviceLostError.
        """
        self._check_process()
        refits = refitting.checked(self.plan, weights, _refused)
        task = Exclusive(partial(self._refit, refits))
        self._dispatcher.submit(task)
        interrupted: BaseException | None = None
        while not task.is_over:
            try:
                task.wait()
            except BaseException as exc:  # noqa: BLE001 - raised once all devices have the same weights again
                interrupted = exc
        if interrupted is not None:
            raise interrupted
        task.outcome()

    def _refit(self, refits: Sequence[refitting.Refit]) -> None:
        try:
            self._replace(new_weights.write(self.plan, refits, self._weights))
        finally:
            self._weights.clear()
        if error := none_left(self._all):
            raise error

    def _replace(self, message: bytes) -> None:
        """Tell all processes to prepare, then to change; or not to, where one cannot."""
        ready, failed = self._answers(self._dispatcher.processes, message, new_weights.PREPARED)
        if failed:
            self._answers(ready, new_weights.ABORT, new_weights.KEPT)
            raise failed[0][1]
        _, failed = self._answers(ready, new_weights.COMMIT, new_weights.REPLACED)
        for process, exc in failed:  # whose weights may be half new
            process.ended = f"its weights could not be replaced ({exc})"
            self._lose(process)

    def _answers(
        self, processes: Sequence[Process], message: bytes, expected: bytes
    ) -> tuple[list[Process], list[tuple[Process, Exception]]]:
        """Send a message to these processes: those that give the expected answer, and the errors of others."""
        for process in processes:
            process.control.send(message)
        ready: list[Process] = []
        failed: list[tuple[Process, Exception]] = []
        for process in processes:
            try:
                process.answer(expected)
                ready.append(process)
            except DeviceLostError:
                self._lose(process)
            except (NimbleError, MemoryError) as exc:
                if isinstance(exc, CudaError) and exc.is_final:
                    process.ended = ended_by(exc)
                    self._lose(process)
                else:
                    failed.append((process, exc))
        return ready, failed

    def close(self) -> None:
        """End every process once the calls in flight have ended; calling it twice is harmless.

        Does nothing in a forked process.
        """
        if os.getpid() == self._process:
            self._dispatcher.close()
            self._end.detach()

    def hold(self, timeout_s: float) -> None:
        """Wait for the calls in flight, let none begin, and end the processes: the interpreter is shutting down."""
        if os.getpid() == self._process:
            self._dispatcher.hold(timeout_s)
            self._end.detach()

    def holdings(self) -> tuple[object, ...]:
        """The processes, which are the parent's in a forked process."""
        return (self._all,)


def _refused(value: Any, ordinal: int) -> Never:
    del value, ordinal
    raise InputError(
        "it is on a GPU, and the arrays of a call go to another process: give a numpy array, or load the pool without "
        "processes=True"
    )


def _tell(loop: "asyncio.AbstractEventLoop", done: "asyncio.Future[None]") -> None:
    """Wake the task that waits for a call."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_wake, done)


def _wake(done: "asyncio.Future[None]") -> None:
    if not done.done():  # else the task was cancelled
        done.set_result(None)


def _stopped(dispatcher: Dispatcher, owner: int) -> None:
    """End a pool that was dropped, but not in a forked process."""
    if os.getpid() == owner:
        dispatcher.stop()


def _end(processes: Sequence[Process], weights: Memory) -> None:
    end(processes)
    weights.close()
