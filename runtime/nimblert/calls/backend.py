"""The interface of a target: code and weights on a device, and programs in the memory of a context."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from nimblert.plan import Plan, Pointer, Program, Tensor, Work
from nimblert.plan.dimensions import Shape, Shapes

if TYPE_CHECKING:
    from nimblert.calls.refitting import Refit

RunAt: TypeAlias = Callable[[tuple[int, ...], int], dict[str, Any]]
"""Takes the addresses and the stream, and returns the outputs by name."""


class PreparedCall(Protocol):
    """Calls of a program with arrays of some layouts."""

    program: Program
    run_at: RunAt | None
    """As `run`, on arrays at device addresses that are ready for work on a stream; None where that is not possible."""

    def run(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Run on arrays of these layouts, and return new outputs by name."""

    def run_into(
        self, arrays: Sequence[Any], out: Mapping[str, Any], *, reuse_outputs: bool, stream: int | None
    ) -> dict[str, Any]:
        """Run as `run` does, except for bound outputs and those in ``out``, on a stream of the caller.

        With ``reuse_outputs`` they are views of memory that the next run overwrites.
        """


class Backend(Protocol):
    """A loaded program. `inputs` and `outputs` are strided views of host memory."""

    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]

    @property
    def sizes(self) -> Mapping[str, Shape]:
        """The sizes that the last run gave to the outputs that it cropped, by name."""

    def prepare(self, arrays: Sequence[Any], shapes: Shapes | None = None) -> PreparedCall:
        """Return the call for arrays of these layouts, one for each input, of its dtype and rank.

        Those of smaller shapes are padded, and ``shapes`` crops the outputs.
        """

    def place(self, arrays: Sequence[Any]) -> None:
        """Copy these inputs in."""

    def empty(self, tensor: Tensor, *, on_device: bool, stream: int | None) -> Any:
        """Return a new array for an output, for a run on ``stream``, by default the context's."""

    def enqueue_replay(self, stream: int | None) -> None:
        """Enqueue a `replay`."""

    def synchronize(self) -> None:
        """Wait for what was enqueued."""

    def bind(self, tensor: Tensor, array: Any) -> None:
        """Use an array of the caller in place of an input or output; None restores the program's own memory."""

    def address(self, tensor: Tensor) -> int:
        """Return the device address of the memory for an input or output, which may be bound."""

    def own_address(self, tensor: Tensor) -> int:
        """Return the address of the program's own memory for an input or output."""

    def run(self) -> None:
        """Compute ``outputs`` from ``inputs``."""

    def replay(self) -> None:
        """Repeat the last run without copying inputs or outputs."""

    def steps(self) -> Generator[Work, None, None]:
        """Compute command by command, and yield each launch, copy or fill when it is done."""

    def profile(self) -> list[int]:
        """Run all `steps`, and return the nanoseconds of each launch, copy or fill."""

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """Return a copy of bytes of the program's memory, as uint8."""

    def close(self) -> None:
        """Free everything."""


class Loaded(Protocol):
    """Code and weights of a plan on a device, the GPU of this ordinal, which its contexts share."""

    device: int

    def working(self, arena: Any, *, poison: bool) -> Any:
        """Return the memory that the programs of one context share, in ``arena`` if one is given."""

    def backend(self, program: Program, working: Any, *, poison: bool) -> Backend:
        """Load a program into the memory of a context."""

    def empty(self, tensor: Tensor) -> np.ndarray:
        """Return a new host array for an input or output, in the memory that the device reaches fastest."""

    def refit(self, refits: "Sequence[Refit]", backends: Sequence[Any]) -> Sequence[Backend]:
        """Replace weights, or none where it raises; return the successor of each backend."""

    def close(self) -> None:
        """Free code and weights; every context must be closed."""


class Backends(dict[str, Backend]):
    """The loaded programs of a context by name; a lookup loads a program that is not."""

    def __init__(self, plan: Plan, loaded: Loaded, working: Any, *, poison: bool) -> None:
        super().__init__()
        self._programs = {program.name: program for program in plan.programs}
        self._loaded, self._working, self._poison = loaded, working, poison

    def __missing__(self, name: str) -> Backend:
        made = self[name] = self._loaded.backend(self._programs[name], self._working, poison=self._poison)
        return made
