"""The usual call of a CPU plan as one function: numpy arrays in, one step, new arrays out.

After a run of ONNX Runtime the caches are cold for Python: each function call takes 2 to 5 us.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nimblert.calls.outputs import no_memory
from nimblert.calls.turn import Turn
from nimblert.plan import Program

if TYPE_CHECKING:
    from nimblert.cpu.streams import Bound, Streams

_CALM = 16
"""Consecutive runs that must begin without a crowd before a run uses several threads again: the threads that it wakes
spin for up to 60 ms after it."""


class AtWork(set[object]):
    """The runs on the CPU at this moment, of all plans of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._calm = _CALM

    def are_crowd(self, size: int) -> bool:
        """Whether so many runs are at work, or were a short while ago; each run asks when it begins."""
        self._calm = 0 if len(self) >= size else self._calm + 1
        return self._calm <= _CALM


at_work = AtWork()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=at_work.clear)


class Direct:
    """Calls of a program that is one step, until something changes in the context.

    ``steps`` are that step, and the one for the calling thread alone, used when a ``crowd`` of so many runs is at work;
    None where a call cannot be direct.
    """

    def __init__(
        self,
        turn: Turn,
        program: Program,
        streams: "Streams",
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        steps: tuple["Bound | None", "Bound | None"],
        crowd: int | None,
    ) -> None:
        self._turn, self._state, self._program, self._streams = turn, turn.state, program, streams
        self._inputs = [(t.name, v.dtype, v.shape, v) for t, v in zip(program.inputs, inputs, strict=True)]
        self._outputs = [(t.name, v.copy) for t, v in zip(program.outputs, outputs, strict=True)]
        self._step, self._alone = steps
        self._crowd = crowd

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """The outputs by name; None, having done nothing, for any other call. Raises InputError where an op fails."""
        turn = self._turn
        may_be = type(arrays) is dict and len(arrays) == len(self._inputs)
        if not may_be or turn.lock.locked() or turn.process != os.getpid():
            return None
        given = []
        for name, dtype, shape, view in self._inputs:
            array = arrays.get(name)
            if type(array) is not np.ndarray or array.dtype is not dtype or array.shape != shape:
                return None
            given.append((view, array))
        with turn.owner, turn.lock:
            if turn.state is not self._state or self._streams.dirty:
                return None
            try:
                at_work.add(self)
                bound = self._alone if self._crowd and at_work.are_crowd(self._crowd) else self._step
                if bound is None:
                    return None
                command, step = bound
                turn.program, turn.parts = self._program, 1
                for view, array in given:
                    view[...] = array
                try:
                    step()
                except self._streams.failures as exc:
                    raise self._streams.refusal(command, exc) from exc
            finally:
                at_work.discard(self)
            results = {}
            try:
                for name, copy in self._outputs:  # a comprehension is a function
                    results[name] = copy()
            except MemoryError as exc:
                raise no_memory(exc) from exc
            return results
