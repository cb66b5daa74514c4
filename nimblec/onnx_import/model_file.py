"""Load an ONNX file, and check its opsets, operators and tensors.

Both targets start here: the CPU target, and the translation of ONNX to ATen. Every error is one
sentence that names the input, node or file at fault.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.onnx_import import model_nodes
from nimblec.onnx_import.external_data import check_external_data, read_external_data
from nimblec.onnx_import.model_nodes import (
    copy_returned_inputs,
    drop_omitted_tails,
    node_name,
    nodes,
    plain_domain,
    return_scores,
    subgraphs,
)
from nimblert.plan import ITEM_NBYTES

_DTYPES: dict[int, str] = {
    TensorProto.BOOL: "bool",
    TensorProto.UINT8: "uint8",
    TensorProto.INT8: "int8",
    TensorProto.UINT16: "uint16",
    TensorProto.INT16: "int16",
    TensorProto.UINT32: "uint32",
    TensorProto.INT32: "int32",
    TensorProto.UINT64: "uint64",
    TensorProto.INT64: "int64",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.COMPLEX64: "complex64",
    TensorProto.COMPLEX128: "complex128",
}
assert set(_DTYPES.values()) == set(ITEM_NBYTES)

_SCHEMA_DOMAINS = ("", "ai.onnx.ml")
_RUNTIME_DOMAINS = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")
"""ONNX Runtime's own operators, including those that its optimiser creates; onnx has no schemas of them."""

_RUNTIME_OPERATORS = frozenset(
    {
        "Affine",
        "Crop",
        "DynamicSlice",
        "ImageScaler",
        "LayerNormalization",
        "MeanVarianceNormalization",
        "ParametricSoftplus",
        "Scale",
        "ScaledTanh",
        "SimplifiedLayerNormalization",
        "ThresholdedRelu",
    }
)
"""Operators that ONNX Runtime has in ONNX's domain, and ONNX lacks or has only in later opsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """An input or output of an ONNX model.

    ``shape`` is None where the rank is not known, and has None for each dimension that is not.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


def load(path: str | PathLike[str], *, external_data: bool = True) -> ModelProto:
    """Return the model in the file ``path``, with its operators checked.

    External data are found beside the file and checked for size; they are read into the model
    unless ``external_data`` is false. Raises CompileError for a file that is missing or not ONNX,
    UnsupportedModelError for a model with unknown operators.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # reading a pipe may never end
        raise CompileError(f"{path}: is not a regular file")
    try:
        model = onnx.load(path, load_external_data=False)
    except FileNotFoundError as exc:
        raise CompileError(f"{path}: no such file") from exc
    except OSError as exc:
        raise CompileError(f"{path}: cannot be read ({exc.strerror})") from exc
    except DecodeError as exc:
        raise CompileError(f"{path}: not an ONNX file") from exc
    if not (model.ir_version and model.opset_import and model.HasField("graph")):
        raise CompileError(f"{path}: not an ONNX file")
    _check_outputs(model, path)
    if not all(isinstance(text, str) for text in _names(model)):
        raise CompileError(f"{path}: damaged: a name in it is not UTF-8")
    _check_opsets(model)
    check_operators(model)
    for tensor in tensors(model):
        if any(size < 0 for size in tensor.dims):
            shape = "x".join(map(str, tensor.dims))
            raise CompileError(f"{path}: damaged: tensor {tensor.name!r} has the shape {shape}")
    check_functions(model)
    check_external_data(model, path)
    drop_omitted_tails(model)
    copy_returned_inputs(model)
    return_scores(model)
    if external_data:
        read_external_data(model, path.parent)
    return model


def dtype_name(element_type: int) -> str | None:
    """Return a plan's name of an ONNX element type; None if plans lack it (strings, 8-bit floats)."""
    return _DTYPES.get(element_type)


def element_type(dtype: str) -> int:
    """Return the ONNX element type of a plan's dtype name."""
    return next(number for number, name in _DTYPES.items() if name == dtype)


def inputs(model: ModelProto) -> tuple[ModelTensor, ...]:
    """Return the inputs that a caller gives: graph inputs that are not initializers."""
    constant = {tensor.name for tensor in model.graph.initializer}
    constant.update(sparse.values.name for sparse in model.graph.sparse_initializer)
    return tuple(_tensor("input", value) for value in model.graph.input if value.name not in constant)


def outputs(model: ModelProto) -> tuple[ModelTensor, ...]:
    """Return the outputs, with the dtypes that the file declares."""
    return tuple(_tensor("output", value) for value in model.graph.output)


def _check_outputs(model: ModelProto, path: Path) -> None:
    """Raise CompileError where there are none, UnsupportedModelError where two have one name."""
    counts = Counter(value.name for value in model.graph.output)
    if not counts:
        raise CompileError(f"{path}: the graph has no outputs, and a plan computes nothing else")
    for name, count in counts.items():
        if count > 1:
            raise UnsupportedModelError(f"output {name!r} is listed twice: list it once")


def _check_opsets(model: ModelProto) -> None:
    """Raise UnsupportedModelError for an opset newer than the onnx package knows."""
    newest = {domain: last for domain, (_, last) in onnx.defs.C.schema_version_map().items()}
    for opset in model.opset_import:
        domain = plain_domain(opset.domain)
        if opset.version > newest.get(domain, opset.version):
            raise UnsupportedModelError(
                f"the model needs opset {opset.version} of {domain or 'ONNX'}: the newest that onnx {onnx.__version__} "
                f"knows is {newest[domain]}: export the model for that one, or an older one"
            )


def check_operators(model: ModelProto) -> None:
    """Raise UnsupportedModelError, listing every node with an unknown operator."""
    versions = {plain_domain(opset.domain): opset.version for opset in model.opset_import}
    functions = {(plain_domain(f.domain), f.name) for f in model.functions}
    unknown = []
    for node in _all_nodes(model):
        domain = plain_domain(node.domain)
        is_runtimes_own = domain in _RUNTIME_DOMAINS or (not domain and node.op_type in _RUNTIME_OPERATORS)
        if (domain, node.op_type) in functions or is_runtimes_own:
            continue
        if domain not in _SCHEMA_DOMAINS or not _has_schema(node.op_type, versions.get(domain, 1), domain):
            full = f"{domain}.{node.op_type}" if domain else node.op_type
            opset = versions.get(domain, "not imported")
            unknown.append(f"node {node_name(node)!r}: unknown operator {full} (opset {opset})")
    if unknown:
        raise UnsupportedModelError("; ".join(unknown))


def _has_schema(op_type: str, version: int, domain: str) -> bool:
    if not onnx.defs.has(op_type, max_inclusive_version=version, domain=domain):
        return False
    return not onnx.defs.get_schema(op_type, max_inclusive_version=version, domain=domain).deprecated


def _all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    yield from nodes(model.graph)
    for function in model.functions:
        yield from nodes(function)


def _names(model: ModelProto) -> Iterator[str]:
    """Yield every name in the model: str, or bytes where protobuf could not decode one."""
    yield from (opset.domain for opset in model.opset_import)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output, *function.attribute)
    graphs = [model.graph]
    for node in _all_nodes(model):
        graphs.extend(subgraphs(node))
        yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
        yield from (text for attribute in node.attribute for text in (attribute.name, attribute.ref_attr_name))
    for graph in graphs:
        yield from (value.name for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer))
        yield from (dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim)


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield every tensor stored in the model: initializers and attributes, also of subgraphs."""
    graphs = [model.graph]
    for node in _all_nodes(model):
        graphs.extend(subgraphs(node))
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
    for graph in graphs:
        yield from graph.initializer


def _tensor(role: str, value: ValueInfoProto) -> ModelTensor:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        what = kind.removesuffix("_type").replace("_", " ") if kind else "value without a type"
        found = f"{role} {value.name!r} is {'an' if what == 'optional' else 'a'} {what}"
        raise UnsupportedModelError(f"{found}, expected a tensor")
    tensor = value.type.tensor_type
    dtype = dtype_name(tensor.elem_type)
    if dtype is None:
        known = tensor.elem_type in TensorProto.DataType.values()
        shown = TensorProto.DataType.Name(tensor.elem_type).lower() if known else str(tensor.elem_type)
        raise UnsupportedModelError(
            f"{role} {value.name!r} has the dtype {shown}, which a plan cannot hold: convert it in the model"
        )
    if not tensor.HasField("shape"):
        return ModelTensor(name=value.name, dtype=dtype, shape=None)
    shape = tuple(d.dim_value if is_static(d) else None for d in tensor.shape.dim)
    return ModelTensor(name=value.name, dtype=dtype, shape=shape)


def is_static(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Return whether a dimension has a size."""
    return dim.HasField("dim_value") and dim.dim_value >= 0


_MOST_NODES = 1_000_000
_DEEPEST = 100

_Key: TypeAlias = tuple[str, str, str]
"""Domain, name and overload."""


def check_functions(model: ModelProto) -> None:
    """Raise UnsupportedModelError if functions recurse, or expand to more nodes than can be compiled."""
    counter = _Counter({(function.domain, function.name, function.overload): function for function in model.functions})
    counter.count(model_nodes.nodes(model.graph), ())


class _Counter:
    def __init__(self, functions: dict[_Key, FunctionProto]) -> None:
        self._functions = functions
        self._counts: dict[_Key, int] = {}

    def count(self, nodes: Iterator[NodeProto], callers: tuple[_Key, ...]) -> int:
        """Count the nodes that ``nodes`` expand to; ``callers`` are the functions around them, outermost first."""
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            total += self._of_function(key, callers) if key in self._functions else 1
            if total > _MOST_NODES:
                raise UnsupportedModelError(
                    f"{_name(callers)} expands to more than {_MOST_NODES:,} nodes once the functions that it "
                    "calls are inlined: export the model with fewer or smaller functions"
                )
        return total

    def _of_function(self, key: _Key, callers: tuple[_Key, ...]) -> int:
        if key in self._counts:
            return self._counts[key]
        if key in callers:
            raise UnsupportedModelError(f"{_name((key,))} calls itself, which ONNX does not allow")
        if len(callers) >= _DEEPEST:
            raise UnsupportedModelError(f"{_name((key,))}: functions call each other more than {_DEEPEST} levels deep")
        inner = self._functions[key]
        self._counts[key] = self.count(model_nodes.nodes(inner), (*callers, key))
        return self._counts[key]


def _name(callers: tuple[_Key, ...]) -> str:
    return f"function {'.'.join(filter(None, callers[-1]))!r}" if callers else "the model"
