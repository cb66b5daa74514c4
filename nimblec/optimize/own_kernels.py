"""Convolutions and linears as calls of our own kernels, with what follows them in the same launch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from nimblec.kernels.depthwise import DepthwiseTiling, depthwise, pack_depthwise
from nimblec.kernels.ops import convolution, convolution_shape, linear
from nimblec.kernels.packing import counters, pack_convolution, pack_linear
from nimblec.kernels.shapes import Convolution, Tiling, product
from nimblec.optimize.batch_norm import CONVOLUTION
from nimblec.optimize.cudnn import is_relu
from nimblec.optimize.layout import HALF
from nimblec.optimize.rewriter import Rewriter, bound, fake, is_call, only_user
from nimblec.optimize.simplify import RESHAPES

aten = torch.ops.aten

Kind = Literal["convolution", "linear", "depthwise"]

_CONVOLUTIONS = (CONVOLUTION, aten.cudnn_convolution_relu.default, aten.cudnn_convolution_add_relu.default)
_LINEARS = (aten.addmm.default, aten.mm.default, aten._addmm_activation.default)
_ACTIVATIONS: Mapping[OpOverload, str] = {
    aten.relu6.default: "relu6",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """Calls that one launch of ours could compute: ``nodes`` in their order, the last one's value is the result."""

    kind: Kind
    shape: Convolution
    activation: str
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    residual: fx.Node | None
    nodes: tuple[fx.Node, ...]
    constants: Mapping[fx.Node, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Of everything that is read and written."""
        return self.constants[self.weight].dtype


Choose = Callable[[Request], Tiling | DepthwiseTiling | None]
"""How to cut a request's work; None where the framework's calls are to stay."""


def use_own_kernels(module: fx.GraphModule, choose: Choose, *, programmatic: bool = True) -> None:
    """Replace what ``choose`` finds faster; every result keeps its dtype, shape and strides.

    ``programmatic`` launches wait for the kernel before them by themselves: compute capability 9.0.
    """
    rewriter = Rewriter(module)
    for node in rewriter.calls(*_CONVOLUTIONS, *_LINEARS):
        request = _request(rewriter, node)
        tiling = request and choose(request)
        if request and tiling:
            _replace(rewriter, request, tiling, programmatic=programmatic)
    rewriter.finish()


def requests(module: fx.GraphModule) -> Iterator[Request]:
    """What `use_own_kernels` would ask about, so that it can be prepared all at once."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(*_CONVOLUTIONS, *_LINEARS):
        request = _request(rewriter, node)
        if request:
            yield request


def _request(rewriter: Rewriter, node: fx.Node) -> Request | None:
    first = _convolution(rewriter, node) if is_call(node, *_CONVOLUTIONS) else _linear(rewriter, node)
    if first is None:
        return None
    given = {"activation": "none", "residual": None, **first}
    nodes = [node]
    if given["activation"] == "none":
        _absorb(nodes, given)
    read = dict.fromkeys(source for each in nodes for source in each.all_input_nodes)
    constants = {source: value for source in read if (value := rewriter.value(source)) is not None}
    return Request(nodes=tuple(nodes), constants=constants, **given)


def _convolution(rewriter: Rewriter, node: fx.Node) -> dict[str, Any] | None:
    """What a convolution of images in half precision, channels last, asks for."""
    given = bound(node)
    x, weight, bias = given["input" if "input" in given else "self"], rewriter.value(given["weight"]), given["bias"]
    if weight is None or weight.dim() != 4 or given.get("transposed") or not _is_served(rewriter, node, bias):
        return None
    residual = given.get("z")
    if residual is not None and (given["alpha"] not in {None, 1} or not _is_like(residual, node)):
        return None
    if not _is_channels_last(fake(x)) or fake(node).stride() != _strides(fake(node)):
        return None
    channels = fake(x).shape[1]
    kind = "convolution" if given["groups"] == 1 else "depthwise"
    if kind == "depthwise" and (given["groups"] != channels or tuple(weight.shape[:2]) != (channels, 1)):
        return None
    geometry = (weight.shape[2:], given["stride"], given["padding"], given["dilation"])
    return {
        "kind": kind,
        "shape": convolution_shape(fake(x), weight.shape[0], *geometry),
        "x": x,
        "weight": given["weight"],
        "bias": bias,
        "activation": "none" if is_call(node, CONVOLUTION) else "relu",
        "residual": residual,
    }


def _linear(rewriter: Rewriter, node: fx.Node) -> dict[str, Any] | None:
    """What a product with constant weights in half precision asks for."""
    given = bound(node)
    x, bias = (given["self"], None) if "mat1" not in given else (given["mat1"], given["self"])
    plain = given.get("alpha", 1) == 1 and given.get("beta", 1) == 1
    if rewriter.value(given["mat2"]) is None or not plain or not _is_served(rewriter, node, bias):
        return None
    rows, depth = fake(x).shape
    if (depth > 1 and fake(x).stride(1) != 1) or not fake(node).is_contiguous():
        return None
    activation = "none"
    if is_call(node, aten._addmm_activation.default):
        activation = "gelu_tanh" if given["use_gelu"] else "relu"
    row_stride = fake(x).stride(0) if rows > 1 else depth
    return {
        "kind": "linear",
        "shape": product(rows, depth, fake(node).shape[1], row_stride=row_stride),
        "x": x,
        "weight": given["mat2"],
        "bias": bias,
        "activation": activation,
    }


def _is_served(rewriter: Rewriter, node: fx.Node, bias: fx.Node | None) -> bool:
    """Half precision; the bias, which is read before the wait, must be one that nothing writes."""
    if fake(node).dtype not in HALF or not fake(node).numel():
        return False
    if bias is None:
        return True
    value = rewriter.value(bias)
    return value is not None and value.dtype == fake(node).dtype and value.shape == fake(node).shape[1:2]


def _absorb(nodes: list[fx.Node], given: dict[str, Any]) -> None:
    """Take a residual and an activation after the last of ``nodes`` in, through reshapes after a linear."""
    reached = list(nodes)
    while (user := only_user(reached[-1])) is not None:
        if given["kind"] == "linear" and is_call(user, *RESHAPES) and fake(user).is_contiguous():
            reached.append(user)
            continue
        residual = _other_term(user, reached[-1])
        activation = _activation(user)
        if residual is not None and given["residual"] is None:
            given["residual"] = residual
        elif activation is not None and _is_like(user, reached[-1]):
            given["activation"] = activation
        else:
            return
        reached.append(user)
        nodes[:] = reached
        if activation is not None:
            return


def _other_term(node: fx.Node, term: fx.Node) -> fx.Node | None:
    """What is added to ``term``, if it lies in memory just as that does."""
    if not is_call(node, aten.add.Tensor) or node.kwargs.get("alpha", 1) != 1:
        return None
    others = [other for other in node.args[:2] if other is not term]
    (other,) = others if len(others) == 1 else (None,)
    return other if isinstance(other, fx.Node) and _is_like(other, term) and _is_like(node, term) else None


def _activation(node: fx.Node) -> str | None:
    if is_relu(node):
        return "relu"
    if is_call(node, aten.hardtanh.default, aten.clamp.default):
        given = bound(node)
        low, high = given.get("min_val", given.get("min")), given.get("max_val", given.get("max"))
        return "relu6" if (low, high) == (0, 6) else None
    if is_call(node, aten.gelu.default):
        return "gelu" if bound(node)["approximate"] == "none" else "gelu_tanh"
    return _ACTIVATIONS[node.target] if is_call(node, *_ACTIVATIONS) else None


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values have one dtype and shape, and the same place for the same element."""
    a, b = fake(node), fake(other)
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _strides(images: Tensor) -> tuple[int, ...]:
    """Where our kernels put the results; torch lays images of one pixel or one channel otherwise at times."""
    return torch.empty_like(images, device="meta", memory_format=torch.channels_last).stride()


def _replace(rewriter: Rewriter, request: Request, tiling: Tiling | DepthwiseTiling, *, programmatic: bool) -> None:
    last = request.nodes[-1]
    call = _call(rewriter, request, tiling, programmatic=programmatic)
    if fake(call).shape != fake(last).shape:  # past the reshapes after a linear
        call = rewriter.call(aten.reshape.default, call, list(fake(last).shape), at=last)
    assert _is_like(call, last), f"{last.format_node()} would become {call.format_node()}"
    rewriter.replace(last, call)


def _call(rewriter: Rewriter, request: Request, tiling: Tiling | DepthwiseTiling, *, programmatic: bool) -> fx.Node:
    shape, last = request.shape, request.nodes[-1]
    weight = request.constants[request.weight]
    terms, end = (request.x, request.bias), (request.activation, tiling.numbers, programmatic)
    geometry = [list(pair) for pair in (shape.kernel, shape.stride, shape.padding, shape.dilation)]
    if isinstance(tiling, DepthwiseTiling):
        packed = rewriter.constant(pack_depthwise(weight, tiling), at=last)
        return rewriter.call(depthwise, terms[0], packed, terms[1], request.residual, *geometry, *end, at=last)
    arrived = None
    if tiling.split_k > 1:
        down, across = tiling.tiles(shape)
        arrived = rewriter.constant(counters(down * across, weight.device), at=last)
    if request.kind == "convolution":
        packed = rewriter.constant(pack_convolution(weight, tiling), at=last)
        shared = (terms[0], packed, terms[1], request.residual, arrived, shape.out_channels)
        return rewriter.call(convolution, *shared, *geometry, *end, at=last)
    packed = rewriter.constant(pack_linear(weight, tiling), at=last)
    residual = request.residual
    if residual is not None and fake(residual).dim() != 2:
        residual = rewriter.call(aten.reshape.default, residual, [shape.rows, shape.out_channels], at=last)
    return rewriter.call(linear, terms[0], packed, terms[1], residual, arrived, shape.out_channels, *end, at=last)
