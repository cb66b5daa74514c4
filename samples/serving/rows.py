"""Calls of any number of rows through a plan, joined in batches where the plan allows it."""

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np

import nimblert
from nimblert.plan import Fit, Plan, Program, Target

CPU_ROUNDING = 1e-4
"""What a sum may change by, relative to the largest value of an output, where fewer threads are free to compute it."""

Arrays = dict[str, np.ndarray]

_Call = tuple[Arrays, int, asyncio.Future[Arrays]]
"""Inputs, their number of rows, and the outputs to come."""


class Rows:
    """The main entry of a plan whose inputs and outputs all have the rows, the batch, as their first dimension.

    ``batch`` is the most rows that joined calls may have: those of the largest program if the plan takes every smaller
    number too, and its rows do not depend on each other (the dimension is "split"); else 0.
    """

    def __init__(self, model: nimblert.Executable) -> None:
        """Runs each number of rows once, so that the programs are loaded. Raises what `served_programs` raises."""
        programs = served_programs(model.plan)
        self._model = model
        self.inputs = model.inputs
        self.outputs = model.outputs
        largest = max(program.outputs[0].shape[0] for program in programs)
        self.batch = largest if largest == 1 or _are_independent(programs) else 0
        for count in range(1, largest + 1):
            try:
                self.run(self.zeros(count))
            except nimblert.InputError:
                self.batch = 0

    def zeros(self, count: int) -> Arrays:
        """Inputs of so many rows."""
        return {tensor.name: np.zeros((count, *tensor.shape[1:]), tensor.dtype) for tensor in self.inputs}

    def check(self, arrays: Arrays) -> int:
        """How many rows ``arrays`` have; InputError where the plan does not take them."""
        expected = {tensor.name: tensor for tensor in self.inputs}
        if arrays.keys() != expected.keys():
            raise nimblert.InputError(f"inputs: {sorted(arrays)}, expected {sorted(expected)}")
        for name, array in arrays.items():
            row = expected[name].shape[1:]
            if not array.ndim or array.shape[1:] != row:
                wanted = ", ".join(("rows", *map(str, row)))
                raise nimblert.InputError(f"input {name!r}: shape {array.shape}, expected ({wanted})")
            if str(array.dtype) != expected[name].dtype:
                raise nimblert.InputError(f"input {name!r}: dtype {array.dtype}, expected {expected[name].dtype}")
        counts = {len(array) for array in arrays.values()}
        if len(counts) != 1 or 0 in counts:
            raise nimblert.InputError(f"inputs: {sorted(counts)} rows, expected as many of each, and one at least")
        return counts.pop()

    def run(self, arrays: Arrays) -> Arrays:
        """The outputs. Raises InputError for a number of rows that the plan does not take."""
        return self._model.run(arrays)

    def run_each(self, calls: Sequence[Arrays]) -> list[Arrays | nimblert.InputError]:
        """Run calls as one, and return the outputs of each.

        Where values of one are refused, such as an index out of range, each runs alone: the error stands in place of
        that call's outputs, and the others have theirs.
        """
        try:
            return [*split(self.run(joined(calls)), [count_rows(call) for call in calls])]
        except nimblert.InputError as exc:
            if len(calls) == 1:
                return [exc]
        return [self.run_each([call])[0] for call in calls]


def served_programs(plan: Plan, name: object = "the plan") -> Sequence[Program]:
    """The programs of the main entry. Raises InputError, which says ``name``, for a plan that cannot be served."""
    entries = plan.entries
    if len(entries) != 1 and "main" not in entries:
        found = f"has the entries {list(entries)}, only one is served"
        raise nimblert.InputError(f"{name}: {found}: compile it alone, or name it 'main'")
    if any(tensor.name for tensor in plan.state):
        way_out = "give each client a context, in a server of your own"
        raise nimblert.InputError(f"{name}: has state, which the calls of all clients would share: {way_out}")
    programs = entries.get("main") or next(iter(entries.values()))
    for program in programs:
        firsts = {tensor.shape[:1] for tensor in (*program.inputs, *program.outputs)}
        if len(firsts) != 1 or firsts == {()}:
            raise nimblert.InputError(f"{name}: expected a batch as the first dimension of every input and output")
    return programs


def _are_independent(programs: Sequence[Program]) -> bool:
    """Whether the compiler found that the rows of an entry's programs do not depend on each other."""
    names = [
        name
        for name, _ in programs[0].profile
        if all(dict(program.profile)[name] == program.inputs[0].shape[0] for program in programs)
    ]
    fits = [dict(zip(dict(program.profile), program.fits, strict=False)) for program in programs]
    return len(names) == 1 and all(of.get(names[0]) is Fit.SPLIT for of in fits)


class Probe:
    """A run that is made again and again, to see whether a plan still computes what it did when it was loaded."""

    def __init__(self, model: nimblert.Executable) -> None:
        """Makes the first run."""
        self._model = model
        self._inputs = {tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in model.inputs}
        self._expected = model.run(self._inputs)
        rounding = CPU_ROUNDING if model.plan.target is Target.CPU else 0.0
        tolerances = [program.golden.tolerance for program in model.entry().programs if program.golden]
        self._tolerance = max([rounding, *tolerances])

    def check(self) -> None:
        """Raise RuntimeError where outputs differ by more than repeated runs of the plan may."""
        for name, found in self._model.run(self._inputs).items():
            if not _agree(found, self._expected[name], self._tolerance):
                raise RuntimeError(f"output {name!r} is not what it was at load")


def _agree(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    """Whether arrays are equal bit for bit, or differ by no more than ``tolerance`` of the largest finite magnitude."""
    if found.tobytes() == expected.tobytes():
        return True
    one, other = (array.astype(np.result_type(array.dtype, np.float64)) for array in (found, expected))
    largest = np.abs(other, where=np.isfinite(other), out=np.zeros(other.shape)).max()
    return bool(tolerance > 0 and np.allclose(one, other, rtol=0, atol=tolerance * largest, equal_nan=True))


class Batches:
    """Joins concurrent calls: for servers whose own batches would mix invalid requests with valid ones."""

    def __init__(self, rows: Rows, wait_s: float) -> None:
        """A batch waits ``wait_s`` seconds for calls to join it."""
        self._rows = rows
        self._wait_s = wait_s
        self._waiting: deque[_Call] = deque()
        self._working: asyncio.Task[None] | None = None

    async def run(self, arrays: Arrays) -> Arrays:
        """Run as `Rows.run`. Raises InputError for this call alone, and any other error for its batch."""
        count = self._rows.check(arrays)
        result: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self._waiting.append((arrays, count, result))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await result

    async def _work(self) -> None:
        while self._waiting:
            if sum(count for _, count, _ in self._waiting) < self._rows.batch:
                await asyncio.sleep(self._wait_s)
            taken = self._next()
            calls = [arrays for arrays, _, _ in taken]
            (found,) = await asyncio.gather(asyncio.to_thread(self._rows.run_each, calls), return_exceptions=True)
            outcomes = [found] * len(taken) if isinstance(found, BaseException) else found
            for (_, _, result), outcome in zip(taken, outcomes, strict=True):
                if result.cancelled():
                    continue
                if isinstance(outcome, BaseException):
                    result.set_exception(outcome)
                else:
                    result.set_result(outcome)

    def _next(self) -> list[_Call]:
        """The calls of the next batch: the first, and those after it that fit."""
        taken = [self._waiting.popleft()]
        room = self._rows.batch - taken[0][1]
        while self._waiting and self._waiting[0][1] <= room:
            taken.append(self._waiting.popleft())
            room -= taken[-1][1]
        return taken


def count_rows(arrays: Arrays) -> int:
    """Return the rows of a call that `Rows.check` takes."""
    return len(next(iter(arrays.values())))


def joined(items: Sequence[Arrays]) -> Arrays:
    """The arrays of several dicts, concatenated by rows."""
    if len(items) == 1:
        return dict(items[0])
    return {name: np.concatenate([item[name] for item in items]) for name in items[0]}


def split(arrays: Arrays, counts: Sequence[int]) -> list[Arrays]:
    """Undo `joined`: one dict for each number of rows in ``counts``."""
    ends = np.cumsum(counts)
    return [
        {name: array[end - count : end] for name, array in arrays.items()}
        for count, end in zip(counts, ends, strict=True)
    ]
