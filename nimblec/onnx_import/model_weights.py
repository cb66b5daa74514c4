"""The initializers of an ONNX model that are weights."""

from onnx import ModelProto, TensorProto

from nimblec.onnx_import import model_nodes

_DTYPES = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16})

_SIZING = frozenset({"Resize", "Upsample", "Range", "OneHot", "Dropout", "Clip", "Pad", "Pow"})
"""Operators whose constant inputs are settings of the computation, not weights."""


def weight_names(model: ModelProto) -> frozenset[str]:
    """The names of the weights: floating-point initializers of one dimension or more.

    Scalars, such as the factor of a GELU, belong to the computation: patterns are recognised by them.
    """
    settled = {name for node in model_nodes.nodes(model.graph) if node.op_type in _SIZING for name in node.input[1:]}
    return frozenset(
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type in _DTYPES and tensor.dims and 0 not in tensor.dims and tensor.name not in settled
    )
