"""ExecutablePool: one executable on each GPU of a machine, in this process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from nimblert.errors import DeviceMismatchError, InputError
from nimblert.executable import Executable, load
from nimblert.plan import Plan, Target, Tensor
from nimblert.plan.records import is_integer

if TYPE_CHECKING:
    from nimblert.calls.refitting import NewWeights
    from nimblert.plan.container import Source


class ExecutablePool(AbstractContextManager["ExecutablePool"]):
    """A plan without state on several devices; see `load_pool`. Threads and tasks may share it.

    A call goes to the device with the fewest calls in flight. No error of a call takes a device out of service.
    """

    def __init__(self, executables: Sequence[Executable]) -> None:
        first, *_ = self.executables = tuple(executables)
        from nimblert.check.program_rules import keeps_state

        if keeps_state(first.plan):
            raise InputError("the plan has state, and a pool's calls run on any device: load it on each, with load()")
        self.plan, self.entries, self.weights = first.plan, first.entries, first.weights
        self.devices = tuple(executable.device for executable in self.executables)
        self._in_flight: list[Executable] = []
        """The executable of each call in flight. Lists count, append and remove atomically: no lock is needed."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """As `Context.inputs`."""
        return self.executables[0].inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """As `Context.outputs`."""
        return self.executables[0].outputs

    def __call__(self, /, *args: Any, entry: str | None = None, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """Call one of the executables, as `Context.__call__` does. Raises InputError, CudaError."""
        with self._least_busy() as executable:
            return executable(*args, entry=entry, **kwargs)

    def run(
        self, arrays: Mapping[str, Any], *, entry: str | None = None, out: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """Run an entry on one of the devices, as `Context.run` does. Raises InputError, CudaError."""
        with self._least_busy() as executable:
            return executable.run(arrays, entry=entry, out=out)

    async def arun(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> dict[str, np.ndarray]:
        """Run an entry without blocking the event loop; a run is completed even if its task is cancelled."""
        import asyncio  # the caller's event loop has imported it

        return await asyncio.to_thread(self.run, arrays, entry=entry)

    @contextmanager
    def _least_busy(self) -> Iterator[Executable]:
        executable = min(self.executables, key=self._in_flight.count)
        self._in_flight.append(executable)
        try:
            yield executable
        finally:
            self._in_flight.remove(executable)

    def refit(self, weights: "NewWeights") -> None:
        """Replace weights on one device after the other, as `Executable.refit` does.

        Raises InputError, and changes no device, where an array does not fit. Raises CudaError where a device has too
        little memory; the devices before it then have the new weights.
        """
        from nimblert.calls import refitting

        checked = [refitting.checked(self.plan, weights, one._working.take) for one in self.executables]  # noqa: SLF001 - of the same package
        for executable, refits in zip(self.executables, checked, strict=True):
            executable._refit(refits)  # noqa: SLF001

    def close(self) -> None:
        """Close every executable, whatever one raises; calling it twice is harmless."""
        with ExitStack() as stack:
            for executable in self.executables:
                stack.callback(executable.close)

    def __exit__(self, *_: object) -> None:
        self.close()


def load_pool(plan: "Plan | Source", *, devices: Sequence[int] | None = None, **options: Any) -> ExecutablePool:
    """Load a plan on the GPUs with the ordinals ``devices``, or on all that can run it; `load` has the ``options``.

    A plan for the CPU, which uses all cores by itself, is loaded once. Raises InputError for a plan with state, and
    what `load` raises where one of the given devices, or no device at all, can run the plan.
    """
    if not (devices is None or (isinstance(devices, Sequence) and devices and all(map(is_integer, devices)))):
        raise InputError(f"devices: got {devices!r}, expected ordinals of GPUs")
    with ExitStack() as loaded:
        found: list[Executable] = []
        for device in _ordinals() if devices is None else devices:
            try:
                found.append(loaded.enter_context(load(plan, device=int(device), **options)))
            except DeviceMismatchError:
                if devices is not None:
                    raise
            if found and found[0].plan.target is Target.CPU:
                break
        # Where no device can run the plan, this load raises the error of the first one.
        pool = ExecutablePool(found or [load(plan, **options)])
        loaded.pop_all()
    return pool


def _ordinals() -> Iterator[int]:
    """Yield the ordinals of all GPUs: the first one before CUDA starts, which a plan for the CPU does without."""
    yield 0
    from nimblert.cuda import driver

    driver.initialise()
    yield from range(1, driver.count())
