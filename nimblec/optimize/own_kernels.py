"""Convolutions and linears as calls of our own kernels, with what follows them in the same launch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, bound, fake, is_call, only_user
from nimblec.graph.views import as_stored, is_view, viewed_alike
from nimblec.graph.vocabulary import CONVOLUTION, DTYPES, HALF, WHOLE_VIEWS, activation_of
from nimblec.kernels.depthwise import DepthwiseTiling, depthwise, pack_depthwise
from nimblec.kernels.launching import Arithmetic, Trigger
from nimblec.kernels.ops import (
    convolution,
    convolution_into,
    convolution_shape,
    is_read_well,
    linear,
    pixel_stride,
    product_shape,
)
from nimblec.kernels.packing import counters, for_tensor_cores, pack_convolution, pack_linear
from nimblec.kernels.parts import place
from nimblec.kernels.shapes import Convolution, Tiling
from nimblec.optimize.own_kernels_prologue import Before, prologues

aten = torch.ops.aten

Kind = Literal["convolution", "linear", "depthwise"]

_CONVOLUTIONS = (CONVOLUTION, aten.cudnn_convolution_relu.default, aten.cudnn_convolution_add_relu.default)
_LINEARS = (aten.addmm.default, aten.mm.default, aten._addmm_activation.default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """Calls that one launch of ours could compute: ``nodes`` in their order, the last one's value is the result.

    It is written ``into`` part of larger images where there are any.
    """

    kind: Kind
    shape: Convolution
    activation: str
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    residual: fx.Node | None
    nodes: tuple[fx.Node, ...]
    constants: Mapping[fx.Node, Tensor]
    arithmetic: Arithmetic
    before: Before | None = None
    into: fx.Node | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of everything that is read and written."""
        return self.constants[self.weight].dtype

    @property
    def has(self) -> frozenset[str]:
        """The names of the optional tensors that there are."""
        named: dict[str, object] = {"bias": self.bias, "residual": self.residual}
        if self.before is not None:
            named |= {"scale": self.before.scale, "shift": self.before.shift, "gate": self.before.gate}
        return frozenset(name for name, value in named.items() if value is not None)

    @property
    def signature(self) -> str:
        """What tells requests apart."""
        calls = " ".join(str(node.target) for node in self.nodes)
        before = self.before and (self.before.activation, self.before.sharers)
        parts = (self.dtype, self.arithmetic, sorted(self.has), before, self.activation)
        return f"{self.kind} {self.shape} {parts} {calls}"


Choose = Callable[[Request], Tiling | DepthwiseTiling | None]
"""How to cut a request's work; None where the framework's calls are to stay."""


def use_own_kernels(module: fx.GraphModule, choose: Choose, *, trigger: Trigger = "late") -> None:
    """Replace what ``choose`` finds faster; every result keeps its dtype, shape and strides.

    Launches with a ``trigger`` wait for the kernel before them by themselves: compute capability 9.0.
    """
    rewriter = Rewriter(module)
    shares = _shares(rewriter)
    for node in shares.heads:
        request = _request(rewriter, node, shares)
        tiling = request and choose(request)
        if request and tiling:
            _replace(rewriter, request, tiling, trigger)
    rewriter.finish()


def requests(module: fx.GraphModule) -> Iterator[Request]:
    """What `use_own_kernels` will ask about, so that it can be prepared all at once."""
    rewriter = Rewriter(module)
    shares = _shares(rewriter)
    for node in shares.heads:
        request = _request(rewriter, node, shares)
        if request:
            yield request


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """Which calls belong to which launch, so that no choice for one changes what another one is.

    ``heads`` are the convolutions and products, ``owners`` the ones whose launch computes a call
    after them, ``before`` what they compute while they read.
    """

    heads: tuple[fx.Node, ...]
    owners: Mapping[fx.Node, fx.Node]
    before: Mapping[fx.Node, Before]


def _shares(rewriter: Rewriter) -> _Shares:
    heads = rewriter.calls(*_CONVOLUTIONS, *_LINEARS)
    owners: dict[fx.Node, fx.Node] = {}
    readers = []
    for head in heads:
        given = _given(rewriter, head)
        if given is not None:
            owners |= dict.fromkeys(_absorbed(head, given, owners)[1:], head)
            readers += [head] if given["kind"] != "linear" else []
    return _Shares(heads=tuple(heads), owners=owners, before=prologues(rewriter, readers, owners))


def _request(rewriter: Rewriter, node: fx.Node, shares: _Shares) -> Request | None:
    given = _given(rewriter, node)
    if given is None:
        return None
    before = shares.before.get(node)
    nodes = (*(before.nodes if before else ()), *_absorbed(node, given, shares.owners))
    if before is not None:
        given["x"] = before.x
        given["shape"] = replace(given["shape"], pixel_stride=pixel_stride(fake(before.x)))
    read = dict.fromkeys(source for each in nodes for source in each.all_input_nodes)
    constants = {source: value for source in read if (value := rewriter.value(source)) is not None}
    return Request(nodes=nodes, constants=constants, before=before, **given)


def _given(rewriter: Rewriter, node: fx.Node) -> dict[str, Any] | None:
    """What a call asks for by itself; None where ours could not compute it."""
    given = _convolution(rewriter, node) if is_call(node, *_CONVOLUTIONS) else _linear(rewriter, node)
    return given and {"activation": "none", "residual": None, "into": None, **given}


def _convolution(rewriter: Rewriter, node: fx.Node) -> dict[str, Any] | None:
    """What a convolution of images, channels last, asks for."""
    given = bound(node)
    x, weight, bias = given["input" if "input" in given else "self"], rewriter.value(given["weight"]), given["bias"]
    if weight is None or weight.dim() != 4 or given.get("transposed") or not _is_served(rewriter, node, bias):
        return None
    is_depthwise = given["groups"] > 1
    residual = given.get("z")
    if residual is not None and (given["alpha"] not in {None, 1} or not _is_like(residual, node)):
        return None
    if not is_read_well(fake(x)) or fake(node).stride() != _strides(fake(node)):
        return None
    channels = fake(x).shape[1]
    if is_depthwise and given["groups"] != channels:
        return None
    geometry = (weight.shape[2:], given["stride"], given["padding"], given["dilation"])
    return {
        "kind": "depthwise" if is_depthwise else "convolution",
        "arithmetic": _arithmetic(fake(node).dtype, torch.backends.cudnn.conv),
        "shape": convolution_shape(fake(x), weight.shape[0], *geometry),
        "x": x,
        "weight": given["weight"],
        "bias": bias,
        "activation": "none" if is_call(node, CONVOLUTION) else "relu",
        "residual": residual,
    }


def _linear(rewriter: Rewriter, node: fx.Node) -> dict[str, Any] | None:
    """What a product with constant weights asks for."""
    given = bound(node)
    x, bias = (given["self"], None) if "mat1" not in given else (given["mat1"], given["self"])
    plain = given.get("alpha", 1) == 1 and given.get("beta", 1) == 1
    if rewriter.value(given["mat2"]) is None or not plain or not _is_served(rewriter, node, bias):
        return None
    if (fake(x).shape[1] > 1 and fake(x).stride(1) != 1) or not fake(node).is_contiguous():
        return None
    activation = "none"
    if is_call(node, aten._addmm_activation.default):
        activation = "gelu_tanh" if given["use_gelu"] else "relu"
    return {
        "kind": "linear",
        "arithmetic": _arithmetic(fake(node).dtype, torch.backends.cuda.matmul),
        "shape": product_shape(fake(x), fake(node).shape[1]),
        "x": x,
        "weight": given["mat2"],
        "bias": bias,
        "activation": activation,
    }


def _arithmetic(dtype: torch.dtype, library: Any) -> Arithmetic:
    """How to multiply; ``library`` holds torch's setting for float32."""
    return "tf32" if dtype in HALF or library.fp32_precision == "tf32" else "tf32x3"


def _is_served(rewriter: Rewriter, node: fx.Node, bias: fx.Node | None) -> bool:
    """Numbers that ours compute with; the bias, which is read before the wait, must be one that nothing writes."""
    if fake(node).dtype not in DTYPES or not fake(node).numel():
        return False
    if bias is None:
        return True
    value = rewriter.value(bias)
    return value is not None and value.dtype == fake(node).dtype and value.shape == fake(node).shape[1:2]


def _absorbed(head: fx.Node, given: dict[str, Any], owners: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """``head`` and the calls after it that its launch computes; notes a residual and an activation in ``given``.

    Views of a linear are passed by: what is added lies in memory as the product does.
    """
    nodes, reached = [head], [head]
    while given["activation"] == "none" and (user := only_user(reached[-1])) is not None:
        if owners.get(user, head) is not head:
            break
        if given["kind"] == "linear" and is_call(user, *WHOLE_VIEWS) and is_view(user):
            reached.append(user)
            continue
        residual = _other_term(user, reached[-1])
        activation = activation_of(user)
        if residual is not None and given["residual"] is None:
            given["residual"] = residual
        elif activation is not None and _is_like(user, reached[-1]):
            given["activation"] = activation
        else:
            break
        reached.append(user)
        nodes = list(reached)
    user = only_user(nodes[-1])
    if given["kind"] == "convolution" and is_call(user, place):
        given["into"] = user.args[0]
        given["shape"] = replace(given["shape"], out_stride=pixel_stride(fake(user)))
        nodes.append(user)
    return nodes


def _other_term(node: fx.Node, term: fx.Node) -> fx.Node | None:
    """What is added to ``term``, if it lies in memory just as that does."""
    if not is_call(node, aten.add.Tensor) or node.kwargs.get("alpha", 1) != 1:
        return None
    others = [other for other in node.args[:2] if other is not term]
    (other,) = others if len(others) == 1 else (None,)
    return other if isinstance(other, fx.Node) and _is_like(other, term) and _is_like(node, term) else None


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values have one dtype and shape, and the same place for the same element."""
    a, b = fake(node), fake(other)
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def _strides(images: Tensor) -> tuple[int, ...]:
    """Where our kernels put the results; torch lays images of one pixel or one channel otherwise at times."""
    return torch.empty_like(images, device="meta", memory_format=torch.channels_last).stride()


def _replace(rewriter: Rewriter, request: Request, tiling: Tiling | DepthwiseTiling, trigger: Trigger) -> None:
    last = request.nodes[-1]
    call = _call(rewriter, request, tiling, trigger)
    views = [node for node in request.nodes if is_call(node, *WHOLE_VIEWS)]
    call = viewed_alike(rewriter, call, views, at=last)
    assert _is_like(call, last), f"{last.format_node()} would become {call.format_node()}"
    rewriter.replace(last, call)


def _call(rewriter: Rewriter, request: Request, tiling: Tiling | DepthwiseTiling, trigger: Trigger) -> fx.Node:
    shape, last = request.shape, request.nodes[-1]
    weight = request.constants[request.weight]
    terms, end = (request.x, request.bias), (request.activation, tiling.numbers, trigger)
    geometry = [list(pair) for pair in (shape.kernel, shape.stride, shape.padding, shape.dilation)]
    before = _before(rewriter, request)
    if isinstance(tiling, DepthwiseTiling):
        packed = rewriter.constant(pack_depthwise(weight, tiling), at=last)
        shared = (terms[0], packed, terms[1], request.residual, shape.out_channels)
        return rewriter.call(depthwise, *shared, *geometry, *end, at=last, **before)
    if weight.dtype is torch.float32 and request.arithmetic == "tf32":
        weight = for_tensor_cores(weight)
    arrived = None
    if tiling.split_k > 1:
        down, across = tiling.tiles(shape)
        arrived = rewriter.constant(counters(down * across, weight.device), at=last)
    if request.kind == "convolution":
        packed = rewriter.constant(pack_convolution(weight, tiling), at=last)
        shared = (terms[0], packed, terms[1], request.residual, arrived, shape.out_channels)
        op, out = (convolution, {}) if request.into is None else (convolution_into, {"out": request.into})
        how = {"arithmetic": request.arithmetic, **before, **out}
        return rewriter.call(op, *shared, *geometry, *end, at=last, **how)
    packed = rewriter.constant(pack_linear(weight, tiling), at=last)
    residual = request.residual
    if residual is not None:
        residual = as_stored(rewriter, residual, [shape.rows, shape.out_channels], at=last)
    shared = (terms[0], packed, terms[1], residual, arrived, shape.out_channels)
    return rewriter.call(linear, *shared, *end, at=last, arithmetic=request.arithmetic)


def _before(rewriter: Rewriter, request: Request) -> dict[str, Any]:
    """The prologue as the ops take it."""
    before, last = request.before, request.nodes[-1]
    if before is None:
        return {}
    given: dict[str, Any] = {"before": before.activation}
    if before.gate is not None:
        given["gate"] = before.gate
    for name, value in (("scale", before.scale), ("shift", before.shift)):
        if value is not None:
            given[name] = rewriter.constant(value.float().contiguous(), at=last)
    return given
