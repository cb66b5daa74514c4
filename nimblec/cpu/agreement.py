"""Optimise a model so that it still computes what it did: leave out the rewrites of ONNX Runtime that change it.

ONNX Runtime's optimiser changes the results of some models, breaks others, and crashes on a few.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, numpy_helper

from nimblec.base.difference import difference, relative_gaps
from nimblec.base.errors import CompileError
from nimblec.cpu.optimizer import OptimizedModel, OptimizerError, Rewriting, optimize
from nimblec.cpu.reference import ReferenceModel, ReferenceRun, run_feeds, run_reference
from nimblec.onnx_import import model_nodes
from nimblec.onnx_import.external_data import read_tensor

T = TypeVar("T")

_ROUNDING = {"float16": 2.0**-9, "float32": 2.0**-15, "float64": 2.0**-44}
"""A difference, relative to the largest magnitude of an output, that another order of sums makes in most networks."""

_MOVES = {"float16": 2.0**-10, "float32": 2.0**-20, "float64": 2.0**-20}
"""Relative changes of numbers within the rounding of a longer computation."""

_OF_MOVES = 8
"""Rounding may change an output by this many times what such changes of inputs and constants do."""

_STRUCTURAL = frozenset({
    "Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod", "OneHot", "Pad", "Pow", "Range",
    "Resize", "Upsample",
})  # fmt: skip
"""Operators whose constants are sizes, bounds and exponents: with others the model computes something else."""

_MOST_MOVED = 1 << 16
"""Constants of more elements stay as they are: models that have them have biases, scales or norms, too."""

_FOLDING = frozenset({"ConstantFolding"})
"""Left out only where nothing else helps: the sizes of many models are known because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed(Generic[T]):
    """An optimised model that agrees with its ``source``, and what was ``built`` of it.

    ``outputs`` are what the optimised model makes of the inputs of the golden record on one thread. ``error`` is the
    largest difference of a float from the source's, relative to its output's largest magnitude.
    """

    source: ReferenceModel
    optimized: OptimizedModel
    built: T
    rewriting: Rewriting
    outputs: list[np.ndarray]
    error: float
    notes: tuple[str, ...] = ()


def optimize_agreeing(
    model: ReferenceModel,
    scratch: Path,
    build: Callable[[ReferenceModel, OptimizedModel], T],
    *,
    without: frozenset[str] = frozenset(),
    approximate: bool = False,
    max_error: float | None = None,
) -> Agreed[T]:
    """Optimise a model with all rewrites of ONNX Runtime that leave its results, and build something of it.

    Rewrites at fault are found by leaving them out; ``without`` is a first guess, from another program of the model.
    ``approximate`` lets products with quantised weights round their activations to 8 bits. ``max_error`` limits
    `Agreed.error`. Raises CompileError where the model does not run without its optimiser, or where ``build`` fails for
    another reason.
    """
    try:
        model, runs = run_reference(model)
    except CompileError:
        # Building may give a better reason why no plan can hold the model.
        build(model, optimize(model.proto, model.folder, scratch))
        raise
    comparison = _Comparison(model, runs, max_error)
    seen: dict[str, None] = {}

    def attempt(without: Collection[str], *, approximate: bool = False) -> Agreed[T]:
        rewriting = Rewriting(without=frozenset(without), approximate=approximate)
        try:
            optimized = optimize(model.proto, model.folder, scratch, rewriting)
        except OptimizerError as exc:
            seen.update(dict.fromkeys(exc.suspects))
            raise
        seen.update(dict.fromkeys(optimized.rewrites))
        built = build(model, optimized)
        outputs, error = comparison.compare(optimized, is_approximate=approximate)
        return Agreed(
            source=model,
            optimized=optimized,
            built=built,
            rewriting=rewriting,
            outputs=outputs,
            error=error,
        )

    try:
        agreed = attempt(without)
    except CompileError as exc:
        agreed = _without_faults(attempt, seen, exc)
    if approximate:
        exact, agreed = agreed, attempt(agreed.rewriting.without, approximate=True)
        figures = f"by {agreed.error:.2g} of the largest magnitude of an output, by {exact.error:.2g} without"
        agreed = replace(agreed, notes=(*exact.notes, f"--approximate: results differ from exact ones {figures}"))
    return agreed


def _without_faults(
    attempt: Callable[[Collection[str]], Agreed[T]], seen: Mapping[str, None], reason: CompileError
) -> Agreed[T]:
    """Return the model optimised without a few rewrites; ``reason`` is why it fails with all of them.

    ``seen`` are the names of the rewrites that changed it, to which an attempt adds. Raises ``reason`` where it fails
    without them, too.
    """

    def works(without: Collection[str]) -> bool:
        try:
            attempt(without)
        except CompileError:
            return False
        return True

    names = next((names for names in _suspected(seen) if works(names)), None)
    if names is None:
        raise reason
    agreed = attempt(_fewest(names, works))
    listed, said = ", ".join(sorted(agreed.rewriting.without)), str(reason).partition(": if an input")[0]
    return replace(agreed, notes=(f"ONNX Runtime's optimiser runs without {listed}: with it, {said}",))


def _suspected(seen: Mapping[str, None]) -> Iterator[list[str]]:
    """Yield rewrites to leave out, as long as more are seen to change the model: leaving some out lets others apply."""
    for kept in (_FOLDING, frozenset[str]()):
        names: list[str] = []
        while len(names) < len(seen.keys() - kept):
            names = [name for name in seen if name not in kept]
            yield names


def _fewest(names: Sequence[str], works: Callable[[Collection[str]], bool]) -> Collection[str]:
    """Return a small subset of ``names`` to leave out so that the model works, as it does without all of them."""
    for name in names:
        if works({name}):
            return {name}
    left_out = set(names)
    for name in names:
        if works(left_out - {name}):
            left_out.remove(name)
    return left_out


class _Comparison:
    """Compares optimised models with the runs of the model as it is.

    Integers and bools must be equal, floats agree within rounding. Where small changes of inputs and constants change
    an output of the model itself, in that run or in most, an optimised one may change it a few times as much.
    """

    def __init__(self, model: ReferenceModel, runs: Sequence[ReferenceRun], max_error: float | None) -> None:
        self._model = model
        self._runs = runs
        self._max_error = float("inf") if max_error is None else max_error
        self._names = [value.name for value in model.proto.graph.output]

    def compare(self, optimized: OptimizedModel, *, is_approximate: bool) -> tuple[list[np.ndarray], float]:
        """Return the outputs of an optimised model in the first run, and the largest difference of a float in any.

        Raises CompileError where it does not agree, unless it is approximate.
        """
        feeds = [run.feed for run in self._runs]
        results = run_feeds(optimized.proto, optimized.folder, self._names, feeds, threads=1)
        made: list[list[np.ndarray]] = []
        error = 0.0
        for index, (run, found) in enumerate(zip(self._runs, results, strict=True)):
            if isinstance(found, str):
                raise CompileError(f"a run fails: {found}")
            made.append(found)
            for position, (name, wanted, got) in enumerate(zip(self._names, run.outputs, found, strict=True)):
                if (wanted.dtype, wanted.shape) != (got.dtype, got.shape):
                    raise CompileError(f"output {name!r} becomes {got.dtype} of shape {list(got.shape)}")
                differs = difference(wanted, got)
                if not is_approximate and not self._is_rounding(index, position, got):
                    raise CompileError(f"output {name!r} is wrong ({differs})")
                if not differs.exact and wanted.any():
                    error = max(error, differs.relative)
                    if error > self._max_error:
                        raise CompileError(
                            f"output {name!r} has a {differs}, and --max-error allows {self._max_error:.2g}"
                        )
        return made[0], error

    def _is_rounding(self, index: int, position: int, got: np.ndarray) -> bool:
        """Return whether rounding explains how an output, ``got``, differs from that of a run.

        A difference that is not small must be matched, within a factor and in nearly all elements, by that of small
        changes of the inputs: a quantised number near a tie may round either way.
        """
        wanted = self._runs[index].outputs[position]
        least = _ROUNDING.get(wanted.dtype.name, 0.0)
        gaps = _gaps(wanted, got)
        if gaps.max(initial=0.0) <= least:
            return True
        changes = [
            _changes(run.outputs[position], [outputs[position] for outputs in moved])
            for run, moved in zip(self._runs, self._moved, strict=True)
        ]
        moves = changes[index] > least
        largest = max(changes[index].max(), np.median([change.max(initial=0.0) for change in changes]))
        return bool(gaps.max() <= largest and ((gaps > least) & ~moves).sum() * _OF_MOVES <= moves.sum())

    @cached_property
    def _moved(self) -> list[list[list[np.ndarray]]]:
        """For each run, the outputs of the model as it is with small changes of its inputs, and of constants, too."""
        found: list[list[list[np.ndarray]]] = [[] for _ in self._runs]
        random = partial(np.random.default_rng(0).choice, [-1, 1])
        for signs in (random, random, lambda _: 1, lambda _: -1):
            feeds = [{name: _changed(array, signs) for name, array in run.feed.items()} for run in self._runs]
            model = _changed_constants(self._model, signs) if signs is random else self._model.proto
            for outputs, result in zip(found, run_feeds(model, self._model.folder, self._names, feeds), strict=True):
                if not isinstance(result, str):
                    outputs.append(result)
        return found


def _changes(output: np.ndarray, moved: Sequence[np.ndarray]) -> np.ndarray:
    """Return how far small changes move each element; ignore changes that alter the number of elements."""
    gaps = (_OF_MOVES * _gaps(output, other) for other in (output, *moved) if other.shape == output.shape)
    return np.asarray(np.max([*gaps], axis=0))


def _gaps(wanted: np.ndarray, got: np.ndarray) -> np.ndarray:
    return relative_gaps(wanted, got) if wanted.dtype.kind in "fc" else (wanted != got).astype(np.float64)


def _changed(array: np.ndarray, signs: Callable[[tuple[int, ...]], np.ndarray | int]) -> np.ndarray:
    move = _MOVES.get(array.dtype.name)
    return array if move is None else (array * (1 + move * signs(array.shape))).astype(array.dtype)


def _changed_constants(model: ReferenceModel, signs: Callable[[tuple[int, ...]], np.ndarray]) -> ModelProto:
    """Return the model with small changes of its float constants, but for large and structural ones."""
    changed = ModelProto()
    changed.CopyFrom(model.proto)
    kept = {name for node in model_nodes.nodes(changed.graph) if node.op_type in _STRUCTURAL for name in node.input}
    floats = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}
    for name, tensor in _constants(changed.graph):
        if tensor.data_type in floats and np.prod(tensor.dims) <= _MOST_MOVED and name not in kept:
            if tensor.data_location == TensorProto.EXTERNAL:
                read_tensor(tensor, model.folder)
            tensor.CopyFrom(numpy_helper.from_array(_changed(numpy_helper.to_array(tensor), signs), tensor.name))
    return changed


def _constants(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value")
