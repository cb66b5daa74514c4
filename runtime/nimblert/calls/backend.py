"""The interface of a target: code and weights on a device, and programs in the memory of a context."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nimblert.calls.changing import Commit
from nimblert.calls.refitting import Refit
from nimblert.calls.turn import DirectCall, Turn
from nimblert.dimensions import Shapes
from nimblert.plan import Plan, Pointer, Program, Tensor, Work


class Backend(Protocol):
    """A loaded program. `inputs` and `outputs` are strided views of host memory."""

    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]

    def place(self, arrays: Sequence[Any]) -> None:
        """Copy these inputs in, each of its dtype and rank; smaller shapes are padded."""

    def call(
        self,
        arrays: Sequence[Any],
        out: Mapping[str, Any],
        *,
        reuse_outputs: bool,
        shapes: Shapes | None = None,
        stream: int | None,
    ) -> dict[str, Any]:
        """Run on these inputs, and return the outputs by name, except those written into arrays of ``out``.

        ``shapes`` crops the outputs.
        """

    def direct(self, turn: Turn, shapes: tuple[Shapes, Shapes] | None) -> DirectCall | None:
        """The usual call as one function, in the turn of a context; None where this target or program has none.

        ``shapes`` are those of its inputs and outputs where they are smaller than the program's.
        """

    def empty(self, tensor: Tensor, *, on_device: bool, stream: int | None) -> Any:
        """A new array for an output, for a run on ``stream``, by default the context's."""

    def launch(self, stream: int | None) -> None:
        """Enqueue a `replay`."""

    def synchronize(self) -> None:
        """Wait for what was enqueued."""

    def bind(self, tensor: Tensor, array: Any, commit: Commit) -> None:
        """Use an array of the caller in place of an input or output; None restores the program's own memory.

        ``commit`` is called once nothing else can fail.
        """

    def address(self, tensor: Tensor) -> int:
        """The device address of the memory for an input or output, which may be bound."""

    def own_address(self, tensor: Tensor) -> int:
        """The address of the program's own memory for an input or output."""

    def run(self) -> None:
        """Compute ``outputs`` from ``inputs``."""

    def replay(self) -> None:
        """Repeat the last run without copying inputs or outputs."""

    def steps(self) -> Generator[Work, None, None]:
        """Compute command by command, and yield each launch, copy or fill when it is done."""

    def profile(self) -> list[int]:
        """Run all `steps`, and return the nanoseconds of each launch, copy or fill."""

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of bytes of the program's memory, as uint8."""

    def close(self) -> None:
        """Free everything."""


class Resident(Protocol):
    """Code and weights of a plan on a device, which its contexts share."""

    def working(self, arena: Any, *, poison: bool) -> Any:
        """The memory that the programs of one context share, in ``arena`` if one is given."""

    def backend(self, program: Program, working: Any, *, poison: bool) -> Backend:
        """A program in the memory of a context."""

    def empty_input(self, tensor: Tensor) -> np.ndarray:
        """A new host array for an input, in the memory that is read fastest."""

    def refit(
        self,
        refits: Sequence[Refit],
        backends: Sequence[Any],
        replace_old: Callable[[Sequence[Backend]], None],
    ) -> None:
        """Replace weights: all of them, or none where it raises.

        The change, which is `uninterrupted`, ends with ``replace_old``, which takes the successor of each backend.
        """

    def close(self) -> None:
        """Free code and weights; every context must be closed."""


class Backends(dict[str, Backend]):
    """The loaded programs of a context by name; a lookup loads a program that is not."""

    def __init__(self, plan: Plan, resident: Resident, working: Any, *, poison: bool) -> None:
        super().__init__()
        self._programs = {program.name: program for program in plan.programs}
        self._resident, self._working, self._poison = resident, working, poison

    def __missing__(self, name: str) -> Backend:
        made = self[name] = self._resident.backend(self._programs[name], self._working, poison=self._poison)
        return made
