"""The schemas of the onnx package: the types of an operator's inputs, and its function body."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import onnx
from onnx import FunctionProto, NodeProto
from torch import Tensor

from nimblec.onnx_ops.creation import ELEMENT_TYPES


@lru_cache(maxsize=4096)
def _schema(domain: str, name: str, opset: int) -> Any | None:
    """Return the schema; onnx's annotations lack its properties of functions."""
    try:
        return onnx.defs.get_schema(name, opset, domain)
    except onnx.defs.SchemaError:
        return None


def with_body(domain: str, name: str, opset: int) -> Any | None:
    """Return the schema of an operator that has a function body at ``opset``; None for others."""
    schema = _schema(domain, name, opset)
    if schema is not None and (schema.has_function or schema.has_context_dependent_function):
        return schema
    return None


def body(schema: Any, proto: NodeProto, inputs: Sequence[Any], opset: int) -> FunctionProto:
    """Return the function body that ``schema`` gives an operator, for these inputs."""
    if schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= opset] or schema.function_opset_versions
        serialized = schema.get_function_with_opset_version(max(versions))
    else:
        versions = schema.context_dependent_function_opset_versions
        chosen = max([v for v in versions if v <= opset] or versions)
        numbers = {dtype: number for number, dtype in ELEMENT_TYPES.items()}
        protos = (
            onnx.helper.make_tensor_type_proto(numbers[value.dtype], tuple(value.shape))
            if isinstance(value, Tensor)
            else onnx.TypeProto()
            for value in inputs
        )
        types = [proto.SerializeToString() for proto in protos]
        node = proto.SerializeToString()
        serialized = schema.get_context_dependent_function_with_opset_version(chosen, node, types)
    function = FunctionProto()
    function.ParseFromString(serialized)
    return function


@lru_cache(maxsize=4096)
def typed_inputs(domain: str, name: str, opset: int, count: int) -> tuple[tuple[str, bool], ...]:
    """Return the type parameter of each of ``count`` inputs, and whether all inputs that share it have one dtype."""
    schema = _schema(domain, name, opset)
    if schema is None or not schema.inputs:
        return ()
    formal = [schema.inputs[min(i, len(schema.inputs) - 1)] for i in range(count)]
    return tuple((parameter.type_str, parameter.is_homogeneous) for parameter in formal)
