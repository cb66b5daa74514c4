"""What a target gives to a context: code and weights, memory, and programs that run in it."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nimblert.calls.refitting import Refit
from nimblert.calls.turn import DirectCall, Turn
from nimblert.plan import Plan, Pointer, Program, Tensor, Work


class Backend(Protocol):
    """A program in memory. `inputs` and `outputs` are strided views of host memory."""

    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]

    def place(self, arrays: Sequence[Any]) -> None:
        """Take these inputs, each of its dtype and rank; what is beyond a smaller shape is padded."""

    def call(
        self,
        arrays: Sequence[Any],
        out: Mapping[str, Any],
        *,
        reuse_outputs: bool,
        shapes: Sequence[tuple[int, ...]] | None = None,
        stream: int | None,
    ) -> dict[str, Any]:
        """Run on these inputs: the outputs by name, but for those in ``out``, which the caller's arrays take.

        ``shapes`` of the outputs are those of their heads that are asked for.
        """

    def direct(self, turn: Turn) -> DirectCall | None:
        """The usual call in one piece, in the turn of a context; None where this target or program has none."""

    def empty(self, tensor: Tensor, *, on_device: bool) -> Any:
        """A new array for an output."""

    def launch(self, stream: int | None) -> None:
        """Enqueue a `replay`."""

    def synchronize(self) -> None:
        """Wait for what was enqueued."""

    def bind(self, tensor: Tensor, array: Any) -> None:
        """Have commands use an array of the caller in place of an input or output; None: the program's own again."""

    def own_address(self, tensor: Tensor) -> int:
        """Where the program's own memory of an input or output begins."""

    def run(self) -> None:
        """Compute the ``outputs`` of the ``inputs``."""

    def replay(self) -> None:
        """Compute again on the inputs of the run before, without moving them or the outputs."""

    def steps(self) -> Generator[Work, None, None]:
        """Compute the outputs of the inputs command by command: each launch, copy or fill when it is done."""

    def profile(self) -> list[int]:
        """As all of `steps`: nanoseconds of each launch, copy or fill."""

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of bytes of the program's memory, as uint8."""

    def close(self) -> None:
        """Give everything back."""


class Resident(Protocol):
    """What the contexts of a plan share on a device: code and weights."""

    def working(self, arena: Any, *, poison: bool) -> Any:
        """The memory that the programs of one context share, over an arena if one is given."""

    def backend(self, program: Program, working: Any, *, poison: bool) -> Backend:
        """A program in the memory of a context."""

    def refit(
        self, refits: Sequence[Refit], backends: Sequence[Any], ready: Callable[[], None]
    ) -> Sequence[Backend]:
        """Replace weights, none where it raises: what takes the place of each backend that is over them.

        ``ready`` is called when all else that may raise is done.
        """

    def close(self) -> None:
        """Give back code and weights; every context must be closed."""


class Backends(dict[str, Backend]):
    """The programs of a context by name, each loaded when it is first asked for."""

    def __init__(self, plan: Plan, resident: Resident, working: Any, *, poison: bool) -> None:
        super().__init__()
        self._programs = {program.name: program for program in plan.programs}
        self._resident, self._working, self._poison = resident, working, poison

    def __missing__(self, name: str) -> Backend:
        made = self[name] = self._resident.backend(self._programs[name], self._working, poison=self._poison)
        return made
