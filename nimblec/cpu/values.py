"""Dtype and static shape of every value of an optimised model.

ONNX Runtime infers them when it loads the model. Where it cannot (its own operators without
shape inference, loops), the model is run on two sets of inputs and the shapes are observed. Values
whose sizes depend on values, sequences and optionals have no place in a plan's memory, which is laid
out before it runs: `nimblec.cpu.regions` makes kernels that keep them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from nimblec.base.errors import UnsupportedModelError
from nimblec.cpu import ort_process
from nimblec.cpu.constants import TensorType
from nimblec.cpu.optimizer import SHAPE_ARITHMETIC, OptimizedModel
from nimblec.cpu.ort_worker import Feed, RefusedError
from nimblec.onnx_import import model_nodes, model_shapes
from nimblec.onnx_import.model_file import ModelTensor
from nimblert.arrays.layouts import numpy_dtype
from nimblert.plan import ITEM_NBYTES
from nimblert.plan.records import MAX_RANK

SIZED_BY_VALUE = frozenset({"NonZero", "Unique", "NonMaxSuppression", "Compress", "SequenceAt", "StringSplit"})
"""Operators whose output sizes depend on values by definition."""

Ranges = Mapping[str, tuple[int, int]]

_MOST_NBYTES = 1 << 47

_TYPE_NAMES = {"float": "float32", "double": "float64"}


class Values(NamedTuple):
    """The ``types`` of the values of the main graph by name, its inputs included.

    ``unsized`` are the other values: tensors whose shape is not known before a run, each with its dtype, and sequences
    and optionals, with "".
    """

    types: dict[str, TensorType]
    unsized: dict[str, str]


def infer(
    optimized: OptimizedModel, inputs: Sequence[ModelTensor], ranges: Ranges, bounded: Collection[str] = ()
) -> Values:
    """Return the values of a model. ``ranges`` bound the integers of inputs where the model has to run.

    The user says that the sizes of the values ``bounded`` depend on values.
    """
    model = optimized.proto
    types = {tensor.name: TensorType(dtype=tensor.dtype, shape=static_shape(tensor)) for tensor in inputs}
    check_sizes(types)
    makers = {name: node for node in model.graph.node for name in node.output if name}
    if not makers:
        return Values(types, {})
    exposed = with_outputs(model, makers).SerializeToString()
    try:
        described, _ = ort_process.run(exposed, folder=str(optimized.folder))
    except RefusedError as exc:
        raise UnsupportedModelError(f"ONNX Runtime does not run the nodes of the model one by one: {exc}") from exc
    dtypes = {name: _dtype(name, kind, makers[name]) for name, kind, _ in described}
    shapes = {name: tuple(shape) for name, _, shape in described if _is_known(shape)}
    if len(shapes) < len(makers):
        shapes = {name: shape for name, shape in _inferred_by_onnx(model).items() if name in makers} | shapes
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}

    def unsized_but(observed: Collection[str]) -> dict[str, str]:
        """Return the unsized values, where these were observed to have one size."""
        found: dict[str, str] = {}
        for name, node in makers.items():
            # Two runs may agree by chance in the size of a value that is made of one of unknown size.
            if not dtypes[name] or (
                name not in shapes
                and (
                    name not in observed
                    or name in bounded
                    or not found.keys().isdisjoint(model_nodes.read_names(node))
                    or _is_sized_by_value(node, opset, shapes, makers, types, found)
                    or _counts_steps(node, name, constants)
                )
            ):
                found[name] = dtypes[name]
        return found

    unsized = unsized_but(makers)
    unknown = [name for name in makers if name not in shapes and name not in unsized]
    if unknown:
        feeds = [_draw(inputs, ranges, n) for n in range(2)]
        observed = _observe(exposed, optimized.folder, feeds, unknown, makers)
        unsized = unsized_but(observed)
        shapes |= observed
    types |= {name: TensorType(dtype=dtypes[name], shape=shapes[name]) for name in makers if name not in unsized}
    check_sizes(types)
    return Values(types, unsized)


def check_sizes(types: Mapping[str, TensorType]) -> None:
    """Raise UnsupportedModelError for a value of too many dimensions or bytes."""
    for name, tensor_type in types.items():
        if len(tensor_type.shape) > MAX_RANK:
            raise UnsupportedModelError(
                f"value {name!r} has {len(tensor_type.shape)} dimensions; a plan holds at most {MAX_RANK}"
            )
        nbytes = prod(max(size, 1) for size in tensor_type.shape) * ITEM_NBYTES[tensor_type.dtype]
        if nbytes > _MOST_NBYTES:  # an empty tensor has strides, too
            shape = "x".join(map(str, tensor_type.shape))
            raise UnsupportedModelError(
                f"value {name!r} has the shape {shape}: {nbytes} bytes, more than a process can address"
            )


def _is_known(shape: Sequence[object]) -> bool:
    """Return whether ONNX Runtime knows a shape; it reports [] for a scalar and for a value of unknown rank alike."""
    return bool(shape) and all(isinstance(n, int) and n >= 0 for n in shape)


def _inferred_by_onnx(model: ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes that ONNX's own inference finds: also of scalars, and of what is taken out of sequences.

    Of outputs, the model may declare that they are scalars.
    """
    undeclared = ModelProto()
    undeclared.CopyFrom(model)
    for value in (*undeclared.graph.value_info, *undeclared.graph.output):
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.ClearField("shape")
    inferred = model_shapes.infer_shapes(undeclared)
    values = (*inferred.graph.value_info, *inferred.graph.output)
    tensors = {value.name: value.type.tensor_type for value in values}
    return {
        name: tuple(dim.dim_value for dim in tensor.shape.dim)
        for name, tensor in tensors.items()
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
    }


def _is_sized_by_value(
    node: NodeProto,
    opset: int,
    shapes: Mapping[str, object],
    makers: Mapping[str, NodeProto],
    given: Collection[str],
    unsized: Collection[str],
) -> bool:
    """Return whether an output's size is unknown because it depends on values.

    True of an operator of ONNX itself if the shapes of its operands are known. Loops, branches,
    ONNX Runtime's own operators and a few functions of ONNX may just lack shape inference.
    """
    if node.op_type in SIZED_BY_VALUE:
        return True
    if not _has_rule(node, opset) or not all(name in shapes or name not in makers for name in node.input):
        return False
    sizing = node.input if node.op_type in _SIZED_BY_ALL else node.input[_FIRST_SIZE.get(node.op_type, 1) :]
    return not all(_is_shape_arithmetic(name, makers, given, unsized) for name in sizing)


_SIZED_BY_ALL = frozenset({"ConstantOfShape", "Range"})
_FIRST_SIZE = {"MaxUnpool": 2}
"""The first operand whose values may be sizes: for most operators it is the second."""


def _is_shape_arithmetic(
    name: str, makers: Mapping[str, NodeProto], given: Collection[str], unsized: Collection[str]
) -> bool:
    """Return whether a value follows from constants and shapes of sized values; ``given`` are the model's inputs."""
    waiting, seen = [name], {name}
    while waiting:
        value = waiting.pop()
        node = makers.get(value)
        if value in given or value in unsized or (node is not None and model_nodes.subgraphs(node)):
            return False
        if node is None or (node.op_type in SHAPE_ARITHMETIC and node.input[0] not in unsized):
            continue
        waiting += [read for read in node.input if read not in seen]
        seen.update(node.input)
    return True


def _counts_steps(node: NodeProto, name: str, constants: Mapping[str, TensorProto]) -> bool:
    """Return whether a value is a scan output of a Loop whose number of steps is not known before a run."""
    if node.op_type != "Loop" or node.domain:
        return False
    body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
    carried = len(body.input) - 2
    count, condition = node.input[0], node.input[1]
    makers = {made: inner for inner in body.node for made in inner.output}
    kept = {tensor.name for tensor in body.initializer if numpy_helper.to_array(tensor).all()}
    going = body.output[0].name
    while going in makers and makers[going].op_type == "Identity":
        going = makers[going].input[0]
    goes_on = going in kept or going == body.input[1].name
    starts = not condition or (condition in constants and bool(numpy_helper.to_array(constants[condition]).all()))
    return name in node.output[carried:] and not (count in constants and starts and goes_on)


def _has_rule(node: NodeProto, opset: int) -> bool:
    """Return whether ONNX has shape inference for a node; not all operators without a domain are ONNX's."""
    if node.domain or model_nodes.subgraphs(node) or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return False
    schema = onnx.defs.get_schema(node.op_type, max_inclusive_version=opset)
    return bool(schema.has_type_and_shape_inference_function)


def with_outputs(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """Return a copy of ``model`` whose outputs are the values ``names`` of its main graph.

    Constants that no node reads are left out: below IR version 4 ONNX Runtime refuses them.
    """
    exposed = ModelProto()
    exposed.CopyFrom(model)
    del exposed.graph.output[:]
    exposed.graph.output.extend(ValueInfoProto(name=name) for name in names)
    used = _read_names(model.graph)
    del exposed.graph.initializer[:]
    exposed.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in used)
    return exposed


def _read_names(graph: GraphProto) -> set[str]:
    """Return the values that nodes read, or that the bodies of nodes return."""
    nodes = list(model_nodes.nodes(graph))
    returned = {value.name for node in nodes for body in model_nodes.subgraphs(node) for value in body.output}
    return returned.union(*(node.input for node in nodes))


def _dtype(value: str, kind: str, node: NodeProto) -> str:
    """Return the plan's name of a dtype: "float32" for ONNX Runtime's "tensor(float)"; "" for sequences and optionals.

    Raises UnsupportedModelError for a type whose elements no plan can hold.
    """
    wrapped = kind
    while wrapped.startswith(("seq(", "optional(")):
        wrapped = wrapped.partition("(")[2].removesuffix(")")
    if wrapped != kind:
        _dtype(value, wrapped, node)
        return ""
    inner = kind.removeprefix("tensor(").removesuffix(")")
    name = _TYPE_NAMES.get(inner, inner)
    if not kind.startswith("tensor(") or name not in ITEM_NBYTES:
        raise UnsupportedModelError(
            f"node {model_nodes.node_name(node)!r} ({node.op_type}): output {value!r} is a {kind}, "
            f"which a plan cannot hold; only tensors of numbers and bools"
        )
    return name


def static_shape(tensor: ModelTensor) -> tuple[int, ...]:
    """Return the shape of an input of a model with static shapes."""
    assert tensor.shape is not None
    return tuple(n for n in tensor.shape if n is not None)


def _observe(
    model: bytes, folder: Path, feeds: Sequence[Feed], names: Sequence[str], makers: Mapping[str, NodeProto]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that two runs on different inputs agree on, by name."""
    _, results = ort_process.run(model, folder=str(folder), names=names, feeds=feeds)
    seen: list[list[list[int]]] = []
    for result in results:
        if isinstance(result, str):
            node = makers[names[0]]
            raise UnsupportedModelError(
                f"node {model_nodes.node_name(node)!r} ({node.op_type}): the shape of output {names[0]!r} is not known "
                f"before a run, and a run on random inputs failed: {result}"
            )
        seen.append([shape or [] for shape, _ in result])
    return {name: tuple(first) for name, first, second in zip(names, *seen, strict=True) if first == second}


def _draw(inputs: Sequence[ModelTensor], ranges: Ranges, seed: int) -> Feed:
    """Draw inputs: normal floats, and integers at the lower end of their range (seed 0) or the upper (seed 1).

    Bools, and integers without a range, are 0 or 1.
    """
    random = np.random.default_rng(seed)
    drawn = {}
    for tensor in inputs:
        dtype, shape = numpy_dtype(tensor.dtype), static_shape(tensor)
        ends = ranges.get(tensor.name, (0, 1))
        values = np.full(shape, ends[seed]) if dtype.kind in "biu" else random.standard_normal(shape)
        drawn[tensor.name] = np.asarray(values).astype(dtype)
    return drawn
