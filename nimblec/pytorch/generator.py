"""torch's generator of a GPU for the steps of a module whose state holds the seed and offset as tensors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

MARK = 0x6E69_6D62_6C65_6331
"""The seed during a capture, which identifies the memory where torch passes the seed of a replay to kernels."""


class CudaGenerator:
    """A generator of torch's on the current GPU, which starts from a seed and an offset."""

    def __init__(self, seed: int, offset: int) -> None:
        self._generator = torch.Generator("cuda")
        self._seed, self._offset = seed, offset
        self.rewind()

    @property
    def used(self) -> int:
        """How far its offset has advanced. torch does not tell while a graph is captured."""
        return int(self._generator.get_offset()) - self._offset

    def rewind(self) -> None:
        """Draw the same numbers again."""
        self._seed_with(self._seed)

    def mark(self) -> None:
        """Use `MARK` as the seed until `rewind`."""
        self._seed_with(MARK)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Take the place of torch's default generator inside the block."""
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
    """The tensors, of one int64 each, in which a module keeps a generator."""

    seed: Tensor
    offset: Tensor

    def generator(self) -> CudaGenerator:
        """Return a generator that starts from their values."""
        return CudaGenerator(int(self.seed), int(self.offset))


class StepGenerator:
    """Makes torch's kernels draw the random numbers of a step from the state that ``find`` returns.

    A context manager; ``used`` is how far the block advanced the offset. In a capture, during which torch does not
    tell, it is the value of the last step that ran.
    """

    def __init__(self, find: Callable[[], GeneratorState]) -> None:
        self.find = find
        self._used = 0
        self._running: CudaGenerator | None = None
        self._is_captured = False
        self._entered = ExitStack()

    @property
    def used(self) -> int:
        """The advance of the offset by the running step, or else by the last one."""
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
        """Use a new generator for the capture inside the block, and for its replays.

        torch gives it memory on the device when the capture begins. Its seed is `MARK` until the block ends.
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
