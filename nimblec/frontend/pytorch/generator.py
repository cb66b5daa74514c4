"""torch's generator of a GPU, as the steps of a module draw from it whose seed and offset are tensors of its state."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

MARK = 0x6E69_6D62_6C65_6331
"""The seed while a graph is captured: by it the memory is known in which torch gives kernels the seed of a replay."""


class CudaGenerator:
    """A generator of torch's on the current GPU, which starts from a seed and an offset."""

    def __init__(self, seed: int, offset: int) -> None:
        self._generator = torch.Generator("cuda")
        self._seed, self._offset = seed, offset
        self.rewind()

    @property
    def used(self) -> int:
        """How much larger its offset is than at the start. Not to be asked while a graph is captured."""
        return int(self._generator.get_offset()) - self._offset

    def rewind(self) -> None:
        """Draw the same numbers again."""
        self._seed_with(self._seed)

    def mark(self) -> None:
        """Have `MARK` for a seed until it is wound back."""
        self._seed_with(MARK)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Draw what is drawn from torch's default generator inside the block."""
        default: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self._generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(before)

    def _seed_with(self, seed: int) -> None:
        self._generator.manual_seed(seed % (1 << 64))
        self._generator.set_offset(self._offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorState:
    """Where a module keeps a generator: tensors of one int64 each."""

    seed: Tensor
    offset: Tensor

    def generator(self) -> CudaGenerator:
        """One that starts where they say."""
        return CudaGenerator(int(self.seed), int(self.offset))


class StepGenerator:
    """Has torch's kernels draw the random numbers of a step, from the state that ``find`` gives.

    A context around what draws; ``used`` is how much larger the offset is after that. In a capture, during which
    torch does not tell, it is what the last step used that ran.
    """

    def __init__(self, find: Callable[[], GeneratorState]) -> None:
        self.find = find
        self._used = 0
        self._running: CudaGenerator | None = None
        self._is_captured = False
        self._entered = ExitStack()

    @property
    def used(self) -> int:
        """Of the step that runs, or else of the last one that did."""
        return self._used if self._running is None else self._running.used

    def __enter__(self) -> Self:
        if not self._is_captured:
            self._running = self.find().generator()
            self._entered.enter_context(self._running.standing_in())
        return self

    def __exit__(self, *_exc: object) -> None:
        self._entered.close()
        self._used, self._running = self.used, None

    @contextmanager
    def capturing(self) -> Iterator[CudaGenerator]:
        """Give a new generator to the capture inside the block, of whose replays it is, too.

        New to torch, it gets memory on the device when the capture begins. Its seed is marked until the block ends.
        """
        generator = self.find().generator()
        generator.mark()
        self._is_captured = True
        try:
            with generator.standing_in():
                yield generator
        finally:
            self._is_captured = False
            generator.rewind()
