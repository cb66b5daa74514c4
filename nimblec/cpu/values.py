"""Dtype and static shape of every value of an optimised model.

ONNX Runtime infers them when it loads the model. Where it cannot (its own operators without
shape inference, loops), the model is run on two sets of inputs and the shapes are observed; sizes
that depend on values are refused, since a plan's memory is laid out before it runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from nimblec.cpu.constants import TensorType, external, is_embedded, type_of
from nimblec.cpu.observation import open_exposed
from nimblec.cpu.optimizer import OptimizedModel
from nimblec.cpu.optimizer_process import RefusedError
from nimblec.cpu.optimizing import observe_shapes
from nimblec.errors import UnsupportedModelError
from nimblec.frontend.onnx import model_nodes
from nimblec.frontend.onnx.model_file import ModelTensor
from nimblert.extents import MAX_RANK
from nimblert.plan import ITEM_NBYTES

SIZED_BY_VALUE = frozenset({"NonZero", "Unique", "NonMaxSuppression", "Compress", "SequenceAt", "StringSplit"})
"""Operators whose output sizes depend on values by definition."""

_MOST_NBYTES = 1 << 47

_READ_BY_INFERENCE = 64
"""Shape inference reads constants (shapes, axes) of at most this many elements."""

_TYPE_NAMES = {"float": "float32", "double": "float64"}


def infer(optimized: OptimizedModel, inputs: Sequence[ModelTensor]) -> dict[str, TensorType]:
    """The type of every node output of the main graph, and of its inputs, by name."""
    model = optimized.proto
    types = {tensor.name: TensorType(dtype=tensor.dtype, shape=_static(tensor)) for tensor in inputs}
    _check_sizes(types)
    makers = {name: node for node in model.graph.node for name in node.output if name}
    if not makers:
        return types
    arrays = _large_constants(optimized)  # lives as long as the session, which does not copy them
    exposed = _with_all_outputs(model, makers).SerializeToString()
    session = _open(exposed, arrays)
    found = {value.name: value for value in session.get_outputs()}
    dtypes = {name: _dtype(found[name], node) for name, node in makers.items()}
    shapes = {name: tuple(value.shape) for name, value in found.items() if _is_known(value)}
    if len(shapes) < len(makers):
        shapes |= {name: () for name in _scalars(model) if name in makers}
    unknown = [name for name in makers if name not in shapes]
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    for name in unknown:
        if _is_sized_by_value(makers[name], opset, shapes, makers):
            raise _sized_by_value(makers[name], name)
    if unknown:
        shapes |= _observe(exposed, arrays, inputs, unknown, makers)
    types |= {name: TensorType(dtype=dtypes[name], shape=shapes[name]) for name in makers}
    _check_sizes(types)
    return types


def _check_sizes(types: Mapping[str, TensorType]) -> None:
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


def _open(model: bytes, arrays: Mapping[str, np.ndarray]) -> Any:
    """A session of a model, with the data of its large constants."""
    try:
        return open_exposed(model, arrays)
    except RefusedError as exc:
        raise UnsupportedModelError(f"ONNX Runtime does not run the nodes of the model one by one: {exc}") from exc


def _is_known(value: Any) -> bool:
    """Whether ONNX Runtime knows the shape; it reports [] for a scalar and for a value of unknown rank alike."""
    return bool(value.shape) and all(isinstance(n, int) and n >= 0 for n in value.shape)


def _scalars(model: ModelProto) -> set[str]:
    """The values that ONNX's own shape inference finds to have no dimensions."""
    bare = ModelProto()
    bare.CopyFrom(model)
    for tensor in bare.graph.initializer:
        if prod(tensor.dims) > _READ_BY_INFERENCE:
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
    inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    values = (*inferred.graph.value_info, *inferred.graph.output)
    tensors = {value.name: value.type.tensor_type for value in values}
    return {name for name, tensor in tensors.items() if tensor.HasField("shape") and not tensor.shape.dim}


def _is_sized_by_value(
    node: NodeProto, opset: int, shapes: Mapping[str, object], makers: Mapping[str, NodeProto]
) -> bool:
    """Whether an output's size is unknown because it depends on values.

    True of an operator of ONNX itself if the shapes of its operands are known. Loops, branches,
    ONNX Runtime's own operators and a few functions of ONNX may just lack shape inference.
    """
    if node.op_type in SIZED_BY_VALUE:
        return True
    return _has_rule(node, opset) and all(name in shapes or name not in makers for name in node.input)


def _has_rule(node: NodeProto, opset: int) -> bool:
    """Whether ONNX has shape inference for a node; not all operators without a domain are ONNX's."""
    if node.domain or model_nodes.subgraphs(node) or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return False
    schema = onnx.defs.get_schema(node.op_type, max_inclusive_version=opset)
    return bool(schema.has_type_and_shape_inference_function)


def _with_all_outputs(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """The model with every value of the main graph as an output, and large constants without data.

    Constants that no node reads are left out: below IR version 4 ONNX Runtime refuses them.
    """
    exposed = ModelProto()
    exposed.CopyFrom(model)
    del exposed.graph.output[:]
    exposed.graph.output.extend(ValueInfoProto(name=name) for name in names)
    used = _read_names(model.graph)
    del exposed.graph.initializer[:]
    exposed.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in used)
    for tensor in exposed.graph.initializer:
        if not is_embedded(tensor):
            tensor.CopyFrom(external(tensor.name, type_of(tensor)))
    return exposed


def _read_names(graph: GraphProto) -> set[str]:
    """The values that nodes read, or that the bodies of nodes return."""
    nodes = list(model_nodes.nodes(graph))
    returned = {value.name for node in nodes for body in model_nodes.subgraphs(node) for value in body.output}
    return returned.union(*(node.input for node in nodes))


def _large_constants(optimized: OptimizedModel) -> dict[str, np.ndarray]:
    """The constants that nodes read and that `_with_all_outputs` leaves without data."""
    graph = optimized.proto.graph
    used = _read_names(graph)
    large = [tensor.name for tensor in graph.initializer if tensor.name in used and not is_embedded(tensor)]
    return {name: np.require(optimized.arrays[name], requirements="A") for name in large}


def _dtype(value: Any, node: NodeProto) -> str:
    """The plan's name of a dtype: "float32" for ONNX Runtime's "tensor(float)"."""
    inner: str = value.type.removeprefix("tensor(").removesuffix(")")
    name = _TYPE_NAMES.get(inner, inner)
    if not value.type.startswith("tensor(") or name not in ITEM_NBYTES:
        raise UnsupportedModelError(
            f"node {model_nodes.node_name(node)!r} ({node.op_type}): output {value.name!r} is a {value.type}, "
            f"which a plan cannot hold; only tensors of numbers and bools"
        )
    return name


def _static(tensor: ModelTensor) -> tuple[int, ...]:
    assert tensor.shape is not None
    return tuple(n for n in tensor.shape if n is not None)


def _observe(
    model: bytes,
    arrays: Mapping[str, np.ndarray],
    inputs: Sequence[ModelTensor],
    names: Sequence[str],
    makers: Mapping[str, NodeProto],
) -> dict[str, tuple[int, ...]]:
    """Shapes that two runs on different inputs agree on."""
    described = {tensor.name: (tensor.dtype, _static(tensor)) for tensor in inputs}
    try:
        seen = observe_shapes(model, arrays, described, names)
    except RefusedError as exc:
        node = makers[names[0]]
        raise UnsupportedModelError(
            f"node {model_nodes.node_name(node)!r} ({node.op_type}): the shape of output {names[0]!r} is not known "
            f"before a run, and a run on random inputs failed: {exc}"
        ) from exc
    for name, first, second in zip(names, *seen, strict=True):
        if first != second:
            raise _sized_by_value(makers[name], name)
    return {name: tuple(shape) for name, shape in zip(names, seen[0], strict=True)}


def _sized_by_value(node: NodeProto, value: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"node {model_nodes.node_name(node)!r} ({node.op_type}): the size of output {value!r} depends on values, and a "
        f"plan's sizes are fixed; cut the model before it"
    )
