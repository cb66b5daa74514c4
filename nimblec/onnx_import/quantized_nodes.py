"""Products between DequantizeLinear and QuantizeLinear as the operators of integers that they stand for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnx import NodeProto, helper
from torch import Tensor

from nimblec.graph.quantized import EIGHT_BITS
from nimblec.onnx_import.model_nodes import plain_domain, read_names
from nimblec.onnx_import.tensors import attribute_of
from nimblec.onnx_ops.table import MICROSOFT

OPSETS = {MICROSOFT: 1}
"""The opsets of the operators that `multiply_integers` writes, besides those of the model."""


def multiply_integers(
    nodes: Sequence[NodeProto], constants: Mapping[str, Tensor], outputs: Sequence[str]
) -> list[NodeProto]:
    """Return ``nodes`` with each quantised product as one QLinearConv, QGemm or QLinearMatMul.

    Such a product is a Conv of images, Gemm or MatMul of dequantised 8 bit integers, whose weights are constant and
    have no zero point. QuantizeLinear alone reads it, or a Relu before QuantizeLinear whose zero point is the lowest
    number. The sums are then exact, where floats round them. ``outputs`` are the names of the outputs of the graph.
    """
    graph = _Graph(nodes, constants, outputs)
    replaced = {}
    for node in nodes:
        is_product = plain_domain(node.domain) == "" and node.op_type in {"Conv", "Gemm", "MatMul"}
        if is_product and (made := graph.product(node)) is not None:
            replaced[made.output[0]] = made
    return [replaced.get(node.output[0], node) if node.output else node for node in nodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """The integers, scale and zero point that a dequantised value is made of: names, and constant values."""

    names: tuple[str, str, str]
    scale: Tensor
    zero: Tensor
    axis: int


class _Graph:
    """The nodes of a graph by what they make and read."""

    def __init__(self, nodes: Sequence[NodeProto], constants: Mapping[str, Tensor], outputs: Sequence[str]) -> None:
        self._constants = constants
        self._makers = {name: node for node in nodes for name in node.output}
        self._readers = {name: node for node in nodes for name in read_names(node)}
        self._reads = Counter(name for node in nodes for name in read_names(node)) + Counter(outputs)

    def product(self, node: NodeProto) -> NodeProto | None:
        """Return the operator of integers that a product stands for; None where there is none."""
        quantize = self._quantization(node.output[0])
        schemes = [self._scheme(name) for name in node.input if name]
        if quantize is None or len(schemes) < 2 or None in schemes:
            return None
        x, w, *rest = (scheme for scheme in schemes if scheme is not None)
        how: dict[str, Any] = {a.name: attribute_of(a) for a in node.attribute}
        is_convolution = node.op_type == "Conv"
        channels = 0 if is_convolution or how.pop("transB", 0) else 1
        has_factors = how.pop("alpha", 1.0) != 1 or how.pop("beta", 1.0) != 1
        is_plain = how.get("group", 1) == 1 and not has_factors and not how.pop("transA", 0)
        is_exact = x.scale.numel() == 1 and all(self._fits(bias, x, w) for bias in rest)
        if not is_plain or not is_exact or not self._is_weight(w, 4 if is_convolution else 2, channels):
            return None
        y, bias = quantize.input[1:], [each.names[0] for each in rest]
        if is_convolution:
            return helper.make_node("QLinearConv", [*x.names, *w.names, *y, *bias], quantize.output, node.name, **how)
        if node.op_type == "MatMul":
            return helper.make_node("QLinearMatMul", [*x.names, *w.names, *y], quantize.output, node.name)
        inputs, transposed = [*x.names, *w.names, *(bias or [""]), *y], int(channels == 0)
        return helper.make_node("QGemm", inputs, quantize.output, node.name, domain=MICROSOFT, transB=transposed)

    def _scheme(self, name: str) -> _Scheme | None:
        """Return what a value is dequantised from, with a constant scale and zero point."""
        node = self._makers.get(name)
        if node is None or node.op_type != "DequantizeLinear" or len(node.input) != 3:
            return None
        how: dict[str, Any] = {a.name: attribute_of(a) for a in node.attribute}
        scale, zero = (self._constants.get(each) for each in node.input[1:])
        if scale is None or zero is None or scale.dtype != torch.float32 or how.get("block_size"):
            return None
        integers, of_scale, of_zero = node.input
        return _Scheme(names=(integers, of_scale, of_zero), scale=scale, zero=zero, axis=how.get("axis", 1))

    def _quantization(self, name: str) -> NodeProto | None:
        """Return the only reader of a value, through a Relu without effect, if it quantises to 8 bits."""
        node = self._only_reader(name)
        is_bounded = node is not None and node.op_type == "Relu"
        if node is not None and is_bounded:
            node = self._only_reader(node.output[0])
        if node is None or node.op_type != "QuantizeLinear" or len(node.input) != 3:
            return None
        scale, zero = (self._constants.get(each) for each in node.input[1:])
        if scale is None or zero is None or scale.numel() != 1 or scale.dtype != torch.float32 or zero.numel() != 1:
            return None
        if zero.dtype not in EIGHT_BITS:
            return None
        return node if not is_bounded or int(zero) == torch.iinfo(zero.dtype).min else None

    def _only_reader(self, name: str) -> NodeProto | None:
        return self._readers.get(name) if self._reads[name] == 1 else None

    def _is_weight(self, w: _Scheme, rank: int, channels: int) -> bool:
        """Return whether integers are constant, without a zero point, and of one scale or one for each channel.

        ``channels`` is the axis of the channels of the result.
        """
        values = self._constants.get(w.names[0])
        if values is None or values.dtype != torch.int8 or values.dim() != rank or w.zero.any():
            return False
        return w.scale.numel() == 1 or (w.scale.dim() == 1 and w.axis % rank == channels)

    def _fits(self, bias: _Scheme, x: _Scheme, w: _Scheme) -> bool:
        """Return whether a bias is constant and in the scale of the sums, to which it is then added."""
        values, scale = self._constants.get(bias.names[0]), (x.scale * w.scale).reshape(-1)
        if values is None or values.dtype != torch.int32 or bias.zero.any():
            return False
        sizes = {1, scale.numel()}
        return bias.scale.numel() in sizes and torch.allclose(bias.scale.reshape(-1), scale, rtol=1e-5, atol=0)
