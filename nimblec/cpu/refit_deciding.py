"""Weights by whose values a model might decide: others close to them do not show what follows from these."""

from collections.abc import Collection, Mapping

from onnx import GraphProto, NodeProto, TensorProto

from nimblec.onnx_import import model_nodes

_CHANGING = frozenset({
    "Abs", "Add", "BatchNormalization", "Concat", "Conv", "ConvTranspose", "CumSum",
    "DequantizeLinear", "Div", "Einsum", "Exp", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Gemm",
    "Identity", "Log", "MatMul", "Mean", "Mul", "Neg", "Pad", "Pow", "QuantizeLinear", "Reciprocal", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare",
    "Reshape", "ScatterElements", "ScatterND", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tile",
    "Transpose", "Trilu", "Unsqueeze",
})  # fmt: skip
"""Operators whose outputs change with any of their numbers, if by a little."""

_FROM_SECOND = slice(1, None)
_STRUCTURAL = {
    **dict.fromkeys((
        "Expand", "Gather", "GatherElements", "GatherND", "Pad", "ReduceL1", "ReduceL2", "ReduceLogSum",
        "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Reshape", "Slice", "Split",
        "Squeeze", "Tile", "Unsqueeze",
    ), _FROM_SECOND),
    "If": slice(0, 1),
    "Loop": slice(0, 2),
}  # fmt: skip
"""By operator, the inputs that are sizes, places or conditions rather than numbers."""

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})
SIZES = frozenset({"Shape", "Size"})
"""Operators whose outputs depend on no number."""
_NONE: frozenset[str] = frozenset()


def deciding_weights(graph: GraphProto, weights: Collection[str]) -> frozenset[str]:
    """Return the weights from which constants are computed that need not change with them.

    Such is the sign of a weight, a comparison, an integer, a saturated sigmoid, or what is used as a size or an index.
    """
    found: set[str] = set()
    _walk(graph, {name: frozenset({name}) for name in weights}, found)
    return frozenset(found)


def _walk(graph: GraphProto, outer: Mapping[str, frozenset[str]], found: set[str]) -> None:
    """Add the weights to ``found``; ``outer`` has those from which each constant outside the graph is computed."""
    origins = {**{tensor.name: _NONE for tensor in graph.initializer}, **outer}
    for node in graph.node:
        roles = _STRUCTURAL.get(node.op_type, slice(0, 0))
        found |= _NONE.union(*(origins.get(name, _NONE) for name in node.input[roles]))
        bodies = model_nodes.subgraphs(node)
        for body in bodies:
            _walk(body, origins, found)
        given = [name for name in node.input if name]
        if bodies or not all(name in origins for name in given):
            continue
        of = _NONE if node.op_type in SIZES else _NONE.union(*(origins[name] for name in given))
        if not _changes(node):
            found |= of
        origins |= dict.fromkeys(node.output, of)


def _changes(node: NodeProto) -> bool:
    if node.op_type == "Cast":
        return any(attribute.name == "to" and attribute.i in _FLOATS for attribute in node.attribute)
    return model_nodes.plain_domain(node.domain) == "" and node.op_type in _CHANGING
