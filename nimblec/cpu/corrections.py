"""Correct operators that ONNX Runtime's kernels compute otherwise than ONNX defines them.

An operator of the table is replaced by other nodes, or refused where ONNX and ONNX Runtime define different results.
The unoptimised session, which every plan is compared with, then runs the corrected model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor
from typing import Any, TypeAlias

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    defs,
    helper,
    inliner,
    numpy_helper,
)
from onnx.external_data_helper import uses_external_data

from nimblec.base.errors import UnsupportedModelError
from nimblec.onnx_import import model_nodes, model_shapes
from nimblert.cpu.onnx_session import onnxruntime

_RIGHT_ATTENTION = (1, 32)
"""The first version of ONNX Runtime whose attention is right for fully masked rows, causal offsets and softcap."""
_SCORES = 3
"""The place of attention's optional output of the scores."""
_DOMAIN = "nimblec.corrected"
"""Of the functions that stand in for operators."""
_ROUNDING = 1e-4
"""A resized length this close to a whole number is one: scales are float32."""


def correct(model: ModelProto) -> None:
    """Correct the operators of a model, in place. Its input shapes are static; external data stay in their files.

    Raises UnsupportedModelError for an operator whose result ONNX and ONNX Runtime define differently.
    """
    if not any(_reads(graph) for graph in (model.graph, *model.functions)):
        return
    if any(_reads(function) for function in model.functions):
        model.CopyFrom(inliner.inline_local_functions(model))
    around = _Scope(types={}, constants={})
    while _correct_graph(model, model.graph, model_shapes.infer_shapes(model).graph, around):
        pass


def _reads(graph: GraphProto | FunctionProto) -> bool:
    """Return whether a graph has an operator of the table, a pool only with ceil_mode."""
    names = ((node, model_nodes.operator_name(node)) for node in model_nodes.nodes(graph))
    return any(name in _CORRECTIONS and (name not in _POOLS or _ceil_mode(node)) for node, name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """Types and small constants of a graph and of those around it, by name."""

    types: Mapping[str, TypeProto]
    constants: Mapping[str, TensorProto]

    def inside(self, graph: GraphProto, inferred: GraphProto) -> "_Scope":
        """Return the scope of a graph; ``inferred`` is the same graph with the types of its values."""
        values = (*inferred.input, *inferred.output, *inferred.value_info)
        held = {tensor.name: tensor for tensor in graph.initializer}
        made = {node.output[0]: a.t for node in graph.node if node.op_type == "Constant" for a in node.attribute}
        fixed = {n: helper.make_tensor_type_proto(t.data_type, tuple(t.dims)) for n, t in {**held, **made}.items()}
        return _Scope(
            types={**self.types, **fixed, **{value.name: value.type for value in values}},
            constants={**self.constants, **held, **made},
        )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value; None if it is not known."""
        tensor = self.types.get(name, TypeProto()).tensor_type
        if not tensor.HasField("shape") or not all(size.HasField("dim_value") for size in tensor.shape.dim):
            return None
        return tuple(size.dim_value for size in tensor.shape.dim)

    def array(self, name: str) -> np.ndarray | None:
        """Return the value of a constant that is in the model; None for others."""
        tensor = self.constants.get(name)
        return None if tensor is None or uses_external_data(tensor) else numpy_helper.to_array(tensor)


def _correct_graph(model: ModelProto, graph: GraphProto, inferred: GraphProto, around: _Scope) -> bool:
    """Correct a graph and its nodes' bodies; ``inferred`` is the same graph with the types of its values.

    Return True, before the rest is corrected, where a correction changes shapes that were inferred.
    """
    scope = around.inside(graph, inferred)
    for node, typed in zip(graph.node, inferred.node, strict=True):
        correction = _CORRECTIONS.get(model_nodes.operator_name(node))
        if correction is not None and correction(model, node, scope):
            return True
        bodies = zip(model_nodes.subgraphs(node), model_nodes.subgraphs(typed), strict=True)
        if any(_correct_graph(model, body, typed_body, scope) for body, typed_body in bodies):
            return True
    return False


def _expand_attention(model: ModelProto, node: NodeProto, scope: _Scope) -> None:
    """Write attention as the function that ONNX defines it by.

    ONNX Runtime's scores have the lowest number where ONNX's have -infinity. Before `_RIGHT_ATTENTION`, its result is
    wrong, too, for rows that are fully masked and for capped scores.
    """
    version = tuple(map(int, onnxruntime().__version__.split(".")[:2]))
    asks_scores = len(node.output) > _SCORES and node.output[_SCORES]
    if version < _RIGHT_ATTENTION or asks_scores:
        _call_definition(model, node, scope)


def _call_definition(model: ModelProto, node: NodeProto, scope: _Scope) -> None:
    """Let a node call a function of the model: the definition of its operator for these operands."""
    opset = next(entry.version for entry in model.opset_import if entry.domain == node.domain)
    # onnx annotates no function bodies.
    schema: Any = defs.get_schema(node.op_type, opset, node.domain)
    types = [scope.types.get(name, TypeProto()).SerializeToString() for name in node.input]
    if any(name and name not in scope.types for name in node.input):
        raise UnsupportedModelError(f"{model_nodes.describe(node)}: the types of its inputs are not known")
    newest = max(schema.context_dependent_function_opset_versions)
    definition = FunctionProto.FromString(
        schema.get_context_dependent_function_with_opset_version(newest, node.SerializeToString(), types)
    )
    definition.domain, definition.name = _DOMAIN, f"{node.op_type}_{len(model.functions)}"
    for formal, given in ((definition.input, node.input), (definition.output, node.output)):
        # An omitted input or output has the name "".
        pairs = [(name, other) for name, other in zip(formal, given, strict=False) if other]
        formal[:], given[:] = [name for name, _ in pairs], [name for _, name in pairs]
    model.functions.append(definition)
    if not any(entry.domain == _DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    node.domain, node.op_type = definition.domain, definition.name
    del node.attribute[:]


def _check_resize(model: ModelProto, node: NodeProto, scope: _Scope) -> None:
    """Refuse scales that give a fraction of an element, where the length of the result counts.

    ONNX takes the fraction for the length, ONNX Runtime and PyTorch the whole number below it.
    """
    mode = next((a.s for a in node.attribute if a.name == "coordinate_transformation_mode"), b"").decode()
    exported = model.producer_name == "pytorch" and mode == "align_corners"
    if mode not in {"align_corners", "tf_crop_and_resize"} or exported or len(node.input) <= _SCALES:
        return
    shape, scales = scope.shape(node.input[0]), scope.array(node.input[_SCALES])
    if shape is None or scales is None or not scales.size:
        return
    axes = next((list(a.ints) for a in node.attribute if a.name == "axes"), range(len(shape)))
    for axis, scale in zip(axes, scales.tolist(), strict=True):
        length = shape[axis] * scale
        if abs(length - round(length)) > _ROUNDING and (floor(length) > 1 or mode != "align_corners"):
            raise UnsupportedModelError(
                f"{model_nodes.describe(node)}: scale {scale:.6g} makes {length:.6g} elements of {shape[axis]}; with "
                f"{mode}, ONNX computes with the fraction, and ONNX Runtime with the whole number below: give sizes "
                "instead of scales"
            )


_SCALES = 2
"""The place of Resize's input of that name."""


def _check_unpooling(_model: ModelProto, node: NodeProto, scope: _Scope) -> None:
    """Refuse an output_shape other than that which follows from the kernel.

    Indices count in the shape that follows from the kernel by ONNX's definition, in output_shape by ONNX Runtime's.
    """
    if len(node.input) <= _OUTPUT_SHAPE or not node.input[_OUTPUT_SHAPE]:
        return
    shape = scope.shape(node.input[0])
    array = scope.array(node.input[_OUTPUT_SHAPE])
    wanted = scope.shape(node.output[0]) if array is None else tuple(array.tolist())
    if shape is None or wanted is None:
        return
    numbers = {a.name: list(a.ints) for a in node.attribute}
    kernel = numbers.get("kernel_shape", [])
    strides, pads = numbers.get("strides", [1] * len(kernel)), numbers.get("pads", [0] * 2 * len(kernel))
    # ONNX Runtime refuses a damaged one, with a sentence.
    if not len(shape) - 2 == len(kernel) == len(strides) == len(pads) // 2:
        return
    sizes = zip(shape[2:], strides, kernel, pads[: len(kernel)], pads[len(kernel) :], strict=True)
    expected = (*shape[:2], *((size - 1) * stride + width - a - b for size, stride, width, a, b in sizes))
    if wanted != expected:
        raise UnsupportedModelError(
            f"{model_nodes.describe(node)}: output_shape is {wanted}, expected {expected}, in which ONNX counts the "
            "indices: leave output_shape out and pad the result"
        )


_OUTPUT_SHAPE = 2
"""The place of MaxUnpool's input of that name."""


def _drop_windows(_model: ModelProto, node: NodeProto, scope: _Scope) -> bool:
    """Leave out the windows that ceil_mode adds and that begin in the padding at the end.

    ONNX and ONNX Runtime's kernels leave them out; shape inference counts them. Return whether the node has changed.
    It stays where one axis keeps its added window, and another has a stride beyond its window.
    """
    shape, mode = scope.shape(node.input[0]), _ceil_mode(node)
    numbers = {a.name: list(a.ints) for a in node.attribute}
    padding = next((a.s for a in node.attribute if a.name == "auto_pad"), b"NOTSET")
    if shape is None or mode is None or padding.startswith(b"SAME"):
        return False
    kernel = numbers.get("kernel_shape", [])
    rank = len(kernel)
    strides, dilations = numbers.get("strides", [1] * rank), numbers.get("dilations", [1] * rank)
    pads = numbers.get("pads", [0] * 2 * rank) if padding == b"NOTSET" else [0] * 2 * rank
    # ONNX Runtime refuses a damaged pool, with a sentence.
    if not len(shape) - 2 == rank == len(strides) == len(dilations) == len(pads) // 2 or min(strides, default=0) < 1:
        return False
    is_kept = []
    for axis, (size, stride) in enumerate(zip(shape[2:], strides, strict=True)):
        begun = size + pads[axis]
        count, rest = divmod(begun + pads[rank + axis] - dilations[axis] * (kernel[axis] - 1) - 1, stride)
        if rest:
            is_kept.append((count + 1) * stride < begun)
            pads[rank + axis] -= 0 if is_kept[-1] else rest
    if all(is_kept) or (any(is_kept) and min(pads) < 0):
        return False
    if any(is_kept):
        next(a for a in node.attribute if a.name == "pads").ints[:] = pads
    else:
        mode.i = 0
    return True


def _ceil_mode(node: NodeProto) -> AttributeProto | None:
    """Return the attribute where it is set."""
    return next((a for a in node.attribute if a.name == "ceil_mode" and a.i), None)


_POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_Correction: TypeAlias = Callable[[ModelProto, NodeProto, _Scope], bool | None]
_CORRECTIONS: Mapping[str, _Correction] = {
    "Attention": _expand_attention,
    "MaxUnpool": _check_unpooling,
    "Resize": _check_resize,
    **dict.fromkeys(_POOLS, _drop_windows),
}
"""Operators by name, and what is done about each. A correction returns True where it changes shapes."""
