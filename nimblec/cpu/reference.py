"""Run a model in ONNX Runtime without its optimiser: the reference for every plan made from ONNX."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.base.options import DEFAULT_TRIP_LIMIT
from nimblec.cpu import ort_process
from nimblec.cpu.constants import TensorType
from nimblec.cpu.optimizer import plain_words, refusal, size_advice
from nimblec.cpu.ort_worker import RefusedError
from nimblec.cpu.values import Ranges, check_sizes, static_shape, with_outputs
from nimblec.onnx_export.model_state import ModelState
from nimblec.onnx_import import model_file, model_nodes
from nimblec.onnx_import.model_file import ModelTensor
from nimblert import golden
from nimblert.arrays.layouts import numpy_dtype
from nimblert.plan import Profile
from nimblert.plan.dimensions import Shape

Arrays = Mapping[str, np.ndarray]

SEED = 0
"""Of the inputs of golden records."""


_COUNTING = frozenset({
    "BlackmanWindow", "ConstantOfShape", "Expand", "HammingWindow", "HannWindow", "Loop", "MelWeightMatrix", "Pad",
    "Range", "Tile",
})  # fmt: skip
"""Operators for which an integer may be a size or a number of trips."""

_MOST_COUNTED, _FEW = 50, 8
"""The largest integer drawn for an input of a few elements where such an operator may read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """The model of a program; it has static shapes. ``folder`` has its external data.

    ``ranges`` bound the random integers drawn for inputs, by name. ``examples`` are arrays for some of them.
    ``trip_limit`` is the most trips of a loop whose number of trips the model leaves open, ``bounds`` are the largest
    shapes of outputs whose sizes depend on values.
    """

    entry: str
    profile: Profile
    folder: Path
    proto: ModelProto
    state: tuple[ModelState, ...] = ()
    ranges: Ranges = field(default_factory=dict)
    examples: Arrays = field(default_factory=dict)
    trip_limit: int = DEFAULT_TRIP_LIMIT
    bounds: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def inputs(self) -> list[ModelTensor]:
        """The inputs that a caller gives, without the state."""
        state = {tensor.input for tensor in self.state}
        return [tensor for tensor in model_file.inputs(self.proto) if tensor.name not in state]

    @property
    def state_inputs(self) -> dict[str, np.ndarray]:
        """The state before the first call, by the names of the model's inputs."""
        return {tensor.input: tensor.data for tensor in self.state}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """A run without ONNX Runtime's optimiser: all inputs by name, and all outputs in order."""

    feed: Arrays
    outputs: list[np.ndarray]


def run_reference(model: ReferenceModel) -> tuple[ReferenceModel, list[ReferenceRun]]:
    """Run a model on several sets of inputs; returns it, and the runs.

    Where it does not run on the inputs of the golden record, the model that is returned has other ranges of integers:
    above 0, or what it compares them with. Other sets on which it does not run are left out. Raises
    CompileError where it runs on neither, UnsupportedModelError for inputs and outputs of bfloat16.
    """
    for role, tensors in (("input", model_file.inputs(model.proto)), ("output", model_file.outputs(model.proto))):
        for tensor in tensors:
            if tensor.dtype == "bfloat16":
                raise UnsupportedModelError(
                    f"{role} {tensor.name!r} is bfloat16, which ONNX Runtime exchanges with no caller from Python: "
                    "convert it to float32 in the model, or compile for --target cuda"
                )
    check_sizes({t.name: TensorType(dtype=t.dtype, shape=static_shape(t)) for t in model.inputs})
    names = [value.name for value in model.proto.graph.output]
    said: list[str] = []
    others = (ranges for ranges in (_positive(model), _compared(model)) if ranges != model.ranges)
    for ranges in (model.ranges, *others):
        given = replace(model, ranges=ranges)
        feeds = [{**feed, **model.state_inputs} for feed in draw_feeds(given)]
        results = run_feeds(model.proto, model.folder, names, feeds)
        pairs = zip(feeds, results, strict=True)
        runs = [ReferenceRun(feed=feed, outputs=found) for feed, found in pairs if not isinstance(found, str)]
        if not isinstance(results[0], str):
            return given, runs
        said.append(results[0])
    problem = plain_words(said[0])
    advice = size_advice(problem)
    if not advice and any(numpy_dtype(tensor.dtype).kind in "iu" for tensor in model.inputs):
        advice = "; if integers must be in a range, give --example NAME=FILE.npy (in Python examples={NAME: array})"
    raise CompileError(f"ONNX Runtime cannot run the model on random inputs: {problem}{advice}")


def _positive(model: ReferenceModel) -> Ranges:
    """Return the ranges of integer inputs, without 0 and less where they hold more."""
    found = dict(model.ranges)
    for tensor in model.inputs:
        if numpy_dtype(tensor.dtype).kind in "iu":
            low, high = found.get(tensor.name, (0, 1))
            found[tensor.name] = (max(low, min(high, 1)), high)
    return found


def _compared(model: ReferenceModel) -> Ranges:
    """Return the ranges of integer inputs: of one that the main graph compares with a constant, that number alone."""
    graph = model.proto.graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    held |= {n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"}
    found = {
        one: numpy_helper.to_array(held[other])
        for node in graph.node
        if node.op_type == "Equal"
        for one, other in (node.input, node.input[::-1])
        if other in held and held[other].data_location != TensorProto.EXTERNAL
    }
    integers = (t.name for t in model.inputs if numpy_dtype(t.dtype).kind in "iu" and t.name in found)
    numbers = {name: int(found[name]) for name in integers if found[name].size == 1}
    return {**{name: (number, number) for name, number in numbers.items()}, **model.ranges}


def draw_feeds(model: ReferenceModel) -> Iterator[dict[str, np.ndarray]]:
    """Yield inputs that tell models apart, those of the golden record first.

    The others are examples, integers and floats of both signs that are small, large and whole, zeros, and numbers next
    to zero. Integers stay within their range, and are small where one may be a size or the number of trips of a loop.
    """
    inputs = [(t, numpy_dtype(t.dtype), static_shape(t)) for t in model.inputs]
    first = {
        t.name: golden.draw_array(dtype, shape, model.ranges.get(t.name), SEED, position)
        for position, (t, dtype, shape) in enumerate(inputs)
    }
    yield first
    arrays = model.examples
    given = {t.name: arrays[t.name] for t, _, shape in inputs if t.name in arrays and arrays[t.name].shape == shape}
    if given:
        yield {**first, **given}
    counts = any(node.op_type in _COUNTING for node in model_nodes.nodes(model.proto.graph))
    random = np.random.default_rng(SEED)
    normal = {t.name: random.standard_normal(shape) for t, _, shape in inputs}
    for integers, floats in (
        (lambda x: 1000 * x, lambda x: 30 * x),
        (lambda x: np.rint(2 * x), lambda x: np.rint(4 * x) / 2),
        (lambda x: 1e18 * x, lambda x: 1e-3 * x),
        (lambda x: 0 * x, lambda x: 0 * x),
        (lambda x: 0 * x + 1, lambda x: np.where(x > 0, x, 1e-40)),
    ):
        feed = {}
        for t, dtype, _ in inputs:
            drawn: np.ndarray = (integers if dtype.kind in "iu" else floats)(normal[t.name])
            if dtype.kind in "iu":
                low, high = model.ranges.get(t.name, (np.iinfo(dtype).min, np.iinfo(dtype).max))
                most = _MOST_COUNTED if counts and drawn.size <= _FEW else 2**62
                drawn = np.clip(drawn, float(low), float(min(high, most)))
            feed[t.name] = np.asarray(drawn > 0 if dtype.kind == "b" else drawn).astype(dtype)
        yield feed


def run_feeds(
    model: ModelProto, folder: Path, names: Sequence[str], feeds: Sequence[Arrays], threads: int = 0
) -> list[list[np.ndarray] | str]:
    """Return the outputs ``names`` for each of ``feeds``, or why the model does not run, without ORT's optimiser.

    ``folder`` has the model's external data. Raises UnsupportedModelError where the model cannot be opened.
    """
    code = model.SerializeToString()
    try:
        _, results = ort_process.run(code, folder=str(folder.resolve()), names=names, feeds=feeds, threads=threads)
    except RefusedError as exc:
        raise refusal(exc, model) from exc
    except ort_process.EndedError as exc:
        if len(feeds) == 1:
            return [str(exc)]
        return [found for feed in feeds for found in run_feeds(model, folder, names, [feed], threads)]
    return [
        found if isinstance(found, str) else [np.asarray(array) for _, array in found]  # None where numpy has no dtype
        for found in results
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the main graph: its names in plans, and the values it reads and makes.

    ``name`` is the source of its commands in CPU plans, ``description`` in CUDA plans.
    """

    name: str
    description: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]


def read_nodes(model: ModelProto) -> tuple[Node, ...]:
    """Return the nodes of the main graph in order. ``model`` has the names that its file gives them."""
    renamed = ModelProto()
    renamed.CopyFrom(model)
    model_nodes.clear_repeated_names(renamed)
    return tuple(
        Node(
            name=model_nodes.node_name(unique),
            description=model_nodes.describe(node),
            reads=model_nodes.read_names(node),
            makes=tuple(name for name in node.output if name),
        )
        for node, unique in zip(model.graph.node, renamed.graph.node, strict=True)
    )


def run_values(model: ModelProto, folder: Path, inputs: Arrays) -> dict[str, np.ndarray]:
    """Return every tensor of numbers that a node of the main graph computes, by name."""
    names = tuple(dict.fromkeys(name for node in model.graph.node for name in node.output if name))
    (found,) = run_feeds(with_outputs(model, names), folder, names, [inputs])
    if isinstance(found, str):
        raise CompileError(f"ONNX Runtime cannot run the model on random inputs: {found}")
    return {name: array for name, array in zip(names, found, strict=True) if array.dtype.kind in "biufc"}
