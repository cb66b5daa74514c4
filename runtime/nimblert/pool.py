"""What pools of devices have in common: the plan that they serve."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Never, Self

import numpy as np

from nimblert.calls import refitting
from nimblert.calls.entries import Entries
from nimblert.errors import InputError
from nimblert.plan import Plan, Tensor
from nimblert.rules.state_rules import writes_state


class Pool(ABC):
    """A plan on several devices. Threads and tasks may share it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._signatures = Entries(plan)
        self._keeps = keeps_state(plan)
        self._process = os.getpid()

    def __reduce__(self) -> Never:
        raise InputError("a copy of this pool cannot be made, nor a pickle: load the plan where it is to run")

    @property
    @abstractmethod
    def devices(self) -> tuple[int, ...]:
        """The devices that calls go to."""

    @property
    def entries(self) -> tuple[str, ...]:
        """As `Context.entries`."""
        return self._signatures.names

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """As `Context.inputs`."""
        return self._signatures[None].programs[0].inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """As `Context.outputs`."""
        return self._signatures[None].programs[0].outputs

    @property
    def weights(self) -> dict[str, Tensor]:
        """As `Executable.weights`."""
        return refitting.replaceable(self.plan)

    def _check_process(self) -> None:
        """Raise InputError in a forked process."""
        if os.getpid() != self._process:
            raise InputError(f"this pool was loaded in process {self._process}: load the plan again in this one")

    @abstractmethod
    def run(
        self, arrays: Mapping[str, Any], *, entry: str | None = None, out: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """As `Context.run`, on the device with the fewest calls in flight."""

    async def arun(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> dict[str, np.ndarray]:
        """As `run`, without blocking the event loop; a run is completed even if its task is cancelled."""
        import asyncio  # the caller's event loop has imported it

        return await asyncio.to_thread(self.run, arrays, entry=entry)

    @abstractmethod
    def close(self) -> None:
        """Free every device once the calls in flight have ended; calling it twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keeps_state(plan: Plan) -> bool:
    """Whether a run of the plan changes state."""
    return any(writes_state(plan.state, program) for program in plan.programs)


def ordinals(devices: Sequence[int] | None) -> Iterator[int]:
    """The devices to try: those given, or else the first and, once CUDA is initialised, all others."""
    if devices is not None:
        yield from devices
        return
    yield 0
    from nimblert.cuda import driver  # which a plan for the CPU does without

    driver.initialise()
    yield from range(1, driver.count())
