"""Dtype and static shape of every value of an optimised model.

ONNX Runtime infers them when it loads the model. Where it cannot (its own operators without
shape functions, loops), the model is run on two sets of inputs and the shapes are observed; sizes
that depend on values are refused, since a plan's memory is laid out before it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto

from nimblec.errors import UnsupportedModelError
from nimblec.frontend import onnx_file
from nimblec.frontend.onnx_file import ModelTensor
from nimblert.dtypes import numpy_dtype
from nimblert.onnx_session import open_session, runtime_errors
from nimblert.plan import ITEM_NBYTES

SIZED_BY_VALUE = frozenset({"NonZero", "Unique", "NonMaxSuppression", "Compress", "SequenceAt", "StringSplit"})
"""Operators whose output sizes depend on values by their nature."""

_TYPE_NAMES = {"float": "float32", "double": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Dtype (a plan's name) and static shape of a value."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return prod(self.shape) * ITEM_NBYTES[self.dtype]


def infer(model: ModelProto, inputs: Sequence[ModelTensor]) -> dict[str, TensorType]:
    """The type of every node output of the main graph, and of its inputs, by name."""
    makers = {name: node for node in model.graph.node for name in node.output if name}
    session = open_session(_with_all_outputs(model, makers).SerializeToString())
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    unknown = []
    for value in session.get_outputs():
        if value.name not in makers:
            continue
        dtypes[value.name] = _dtype(value, makers[value.name])
        if all(isinstance(n, int) and n >= 0 for n in value.shape):
            shapes[value.name] = tuple(value.shape)
        else:
            unknown.append(value.name)
    if unknown:
        shapes |= _observe(session, inputs, unknown, makers)
    types = {name: TensorType(dtype=dtypes[name], shape=shapes[name]) for name in makers}
    for tensor in inputs:
        types[tensor.name] = TensorType(dtype=tensor.dtype, shape=_static(tensor))
    return types


def _with_all_outputs(model: ModelProto, names: Sequence[str] | dict[str, NodeProto]) -> ModelProto:
    """The model with every value of the main graph as an output."""
    exposed = ModelProto()
    exposed.CopyFrom(model)
    del exposed.graph.output[:]
    exposed.graph.output.extend(ValueInfoProto(name=name) for name in names)
    return exposed


def _dtype(value: Any, node: NodeProto) -> str:
    """The plan's dtype name of what ONNX Runtime calls "tensor(float)"."""
    inner: str = value.type.removeprefix("tensor(").removesuffix(")")
    name = _TYPE_NAMES.get(inner, inner)
    if not value.type.startswith("tensor(") or name not in ITEM_NBYTES:
        raise UnsupportedModelError(
            f"node {onnx_file.node_name(node)!r} ({node.op_type}): output {value.name!r} is a {value.type}, "
            f"which a plan cannot hold; only tensors of numbers and bools"
        )
    return name


def _static(tensor: ModelTensor) -> tuple[int, ...]:
    assert tensor.shape is not None
    return tuple(n for n in tensor.shape if n is not None)


def _observe(
    session: Any, inputs: Sequence[ModelTensor], names: Sequence[str], makers: dict[str, NodeProto]
) -> dict[str, tuple[int, ...]]:
    """Shapes that two runs on different inputs agree on."""
    for name in names:
        if makers[name].op_type in SIZED_BY_VALUE:
            raise _sized_by_value(makers[name], name)
    seen: list[list[tuple[int, ...]]] = []
    for seed in range(2):
        try:
            results = session.run(list(names), _draw(inputs, seed))
        except runtime_errors() as exc:
            node = makers[names[0]]
            raise UnsupportedModelError(
                f"node {onnx_file.node_name(node)!r} ({node.op_type}): the shape of output {names[0]!r} is not known "
                f"before a run, and a run on random inputs failed: {exc}"
            ) from exc
        seen.append([np.shape(result) for result in results])
    for name, first, second in zip(names, *seen, strict=True):
        if first != second:
            raise _sized_by_value(makers[name], name)
    return dict(zip(names, seen[0], strict=True))


def _sized_by_value(node: NodeProto, value: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"node {onnx_file.node_name(node)!r} ({node.op_type}): the size of output {value!r} depends on values, and a "
        f"plan's sizes are fixed; cut the model before it"
    )


def _draw(inputs: Sequence[ModelTensor], seed: int) -> dict[str, np.ndarray]:
    """Inputs to observe with: normal floats, integers that are all 0 in one run and 1 in the other."""
    random = np.random.default_rng(seed)
    drawn = {}
    for tensor in inputs:
        dtype = numpy_dtype(tensor.dtype)
        shape = _static(tensor)
        values = np.full(shape, seed) if dtype.kind in "biu" else random.standard_normal(shape)
        drawn[tensor.name] = np.asarray(values).astype(dtype)
    return drawn
