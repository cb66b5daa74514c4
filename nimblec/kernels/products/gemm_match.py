"""Convolutions and products that one launch could compute, with calls before and after them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.views import is_view
from nimblec.graph.vocabulary import (
    CONVOLUTION,
    CONVOLUTIONS,
    DTYPES,
    HALF,
    PRODUCTS,
    WHOLE_VIEWS,
    activation_of,
    is_like,
)
from nimblec.kernels.images import convolution_shape, is_read_well, is_within_reach, pixel_stride, product_shape
from nimblec.kernels.products.fp8 import largest_read
from nimblec.kernels.products.gated import gate_after
from nimblec.kernels.products.gemm_op import Arithmetic
from nimblec.kernels.products.gemm_tilings import row_candidates
from nimblec.kernels.products.packing import kernel_groups
from nimblec.kernels.products.parts import place
from nimblec.kernels.products.prologue import PrologueMatch, prologues, row_prologue
from nimblec.kernels.shapes import Convolution

aten = torch.ops.aten

Kind = Literal["convolution", "linear", "depthwise"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductRequest:
    """Calls that one launch could compute: ``nodes`` in their order, of which the last is the result.

    The result is written ``into`` part of larger images, if any. ``constants`` are all that the calls read. Where a
    half of a product's columns is ``activated``, number 0 or 1, the result is the activation times the other half.
    ``largest`` is the largest magnitude that a product read in calibration; None keeps it from fp8.
    """

    kind: Kind
    shape: Convolution
    activation: str
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    residual: fx.Node | None
    nodes: tuple[fx.Node, ...]
    arithmetic: Arithmetic
    constants: Mapping[fx.Node, Tensor]
    before: PrologueMatch | None = None
    into: fx.Node | None = None
    activated: int | None = None
    largest: float | None = None

    @property
    def head(self) -> fx.Node:
        """The convolution or product itself."""
        return next(node for node in self.nodes if is_call(node, *CONVOLUTIONS, *PRODUCTS))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of everything that is read and written."""
        return fake(self.nodes[-1]).dtype

    @property
    def tensors(self) -> tuple[fx.Node, ...]:
        """The values read, other than weights, the result, and the larger images that it is part of."""
        others = (node for node in (self.residual, self.into) if node is not None)
        return (self.x, self.nodes[-1], *others)

    @property
    def has(self) -> frozenset[str]:
        """The names of the optional tensors that are present."""
        named: dict[str, object] = {"bias": self.bias, "residual": self.residual}
        if self.before is not None:
            named |= {"scale": self.before.scale, "shift": self.before.shift, "gate": self.before.gate}
        return frozenset(name for name, value in named.items() if value is not None)

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""
        calls = " ".join(str(node.target) for node in self.nodes)
        before = self.before and (self.before.activation, self.before.sharers)
        parts = (self.dtype, self.arithmetic, sorted(self.has), before, self.activation)
        fp8 = " fp8" if self.largest is not None else ""
        return f"{self.kind} {self.shape} {parts} {calls}{fp8}"


def requests(module: fx.GraphModule) -> Iterator[ProductRequest]:
    """Yield all requests in a graph, each made from it as it is by then; none depends on the choice for another."""
    rewriter = Rewriter(module)
    shares = _shares(rewriter)
    for head in shares.heads:
        request = _request(rewriter, head, shares)
        if request is not None and is_within_reach(*(fake(node) for node in request.tensors)):
            yield request


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """Which calls belong to which launch, so that no request depends on the choice for another.

    ``heads`` are the convolutions and products, ``owners`` maps a call after one of them to the head whose
    launch computes it, and ``before`` maps a head to its prologue.
    """

    heads: tuple[fx.Node, ...]
    owners: Mapping[fx.Node, fx.Node]
    before: Mapping[fx.Node, PrologueMatch]


def _shares(rewriter: Rewriter) -> _Shares:
    heads = rewriter.calls(*CONVOLUTIONS, *PRODUCTS)
    owners: dict[fx.Node, fx.Node] = {}
    found = {head: alone for head in heads if (alone := _alone(rewriter, head)) is not None}
    for head, alone in found.items():
        owners |= dict.fromkeys(_with_followers(alone, owners).nodes[1:], head)
    readers = [head for head, alone in found.items() if alone.kind != "linear" and alone.shape.groups == 1]
    of_rows = {h: row_prologue(r.x, owners) for h, r in found.items() if r.kind == "linear" and r.shape.rows == 1}
    before = {head: match for head, match in of_rows.items() if match is not None}
    return _Shares(heads=tuple(heads), owners=owners, before=before | prologues(rewriter, readers, owners))


def _request(rewriter: Rewriter, head: fx.Node, shares: _Shares) -> ProductRequest | None:
    alone = _alone(rewriter, head)
    if alone is None:
        return None
    request = _with_followers(alone, shares.owners)
    if request.kind != "linear" and request.residual is not None and not _is_like(request.residual, head):
        shape = replace(request.shape, residual_stride=pixel_stride(fake(request.residual)))
        request = replace(request, shape=shape)
    before = shares.before.get(head)
    if before is not None:
        nodes = (*before.nodes, *before.views, *request.nodes)
        request = replace(request, before=before, x=before.x, nodes=nodes)
        if request.kind != "linear":
            shape = replace(request.shape, pixel_stride=pixel_stride(fake(before.x)))
            request = replace(request, shape=shape)
    read = dict.fromkeys(source for each in request.nodes for source in each.all_input_nodes)
    constants = {source: value for source in read if (value := rewriter.value(source)) is not None}
    return replace(request, constants=constants)


def _alone(rewriter: Rewriter, node: fx.Node) -> ProductRequest | None:
    """Return the request of a call by itself, without constants; None where the kernels cannot compute it."""
    return _convolution(rewriter, node) if is_call(node, *CONVOLUTIONS) else _linear(rewriter, node)


def _convolution(rewriter: Rewriter, node: fx.Node) -> ProductRequest | None:
    """Return the request of a convolution of images, channels last."""
    given = bound(node)
    x, weight = given["input" if "input" in given else "self"], rewriter.value(given["weight"])
    if weight is None or weight.dim() != 4 or given.get("transposed") or not _is_served(rewriter, node, given["bias"]):
        return None
    is_depthwise = 1 < given["groups"] == fake(x).shape[1]
    residual = given.get("z")
    if residual is not None and (given["alpha"] not in {None, 1} or not _is_residual(residual, node)):
        return None
    if not is_read_well(fake(x)) or fake(node).stride() != _strides(fake(node)):
        return None
    groups = 1 if is_depthwise else kernel_groups(weight, given["groups"])
    geometry = (weight.shape[2:], given["stride"], given["padding"], given["dilation"])
    return ProductRequest(
        kind="depthwise" if is_depthwise else "convolution",
        arithmetic=arithmetic_of(fake(node).dtype, torch.backends.cudnn.conv),  # type: ignore[attr-defined]
        shape=convolution_shape(fake(x), weight.shape[0], *geometry, groups=groups),
        x=x,
        weight=given["weight"],
        bias=given["bias"],
        activation="none" if is_call(node, CONVOLUTION) else "relu",
        residual=residual,
        nodes=(node,),
        constants={},
    )


def _linear(rewriter: Rewriter, node: fx.Node) -> ProductRequest | None:
    """Return the request of a product with constant weights."""
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
    return ProductRequest(
        kind="linear",
        arithmetic=arithmetic_of(fake(node).dtype, torch.backends.cuda.matmul),
        shape=product_shape(fake(x), fake(node).shape[1]),
        x=x,
        weight=given["mat2"],
        bias=bias,
        activation=activation,
        residual=None,
        nodes=(node,),
        constants={},
        largest=largest_read(node),
    )


def arithmetic_of(dtype: torch.dtype, library: Any) -> Arithmetic:
    """Return the arithmetic for a dtype; ``library`` holds torch's setting for float32."""
    return "tf32" if dtype in HALF or library.fp32_precision == "tf32" else "tf32x3"


def _is_served(rewriter: Rewriter, node: fx.Node, bias: fx.Node | None) -> bool:
    """Return whether dtype and bias are supported; a bias is contiguous and, as it is read early, constant."""
    if fake(node).dtype not in DTYPES or not fake(node).numel():
        return False
    if bias is None:
        return True
    value = rewriter.value(bias)
    if value is None or not value.is_contiguous():
        return False
    return value.dtype == fake(node).dtype and value.shape == fake(node).shape[1:2]


def _with_followers(request: ProductRequest, owners: Mapping[fx.Node, fx.Node]) -> ProductRequest:
    """Add the calls after it that its launch computes: a residual, an activation, a `place`; none that others own.

    A linear is followed through views: the residual then has its order in memory.
    """
    is_plain = request.kind == "linear" and request.activation == "none"
    # No tiling of a row fits some depths, and none of e4m3 computes a gate.
    is_served = request.largest is None if request.shape.rows > 1 else bool(row_candidates(request.shape))
    gate = gate_after(request.head) if is_plain and is_served else None
    if gate is not None and all(owners.get(node, request.head) is request.head for node in gate.nodes):
        nodes = (*request.nodes, *gate.nodes)
        return replace(request, nodes=nodes, activation=gate.activation, activated=gate.activated)
    reached = request.nodes
    while request.activation == "none" and (user := only_user(reached[-1])) is not None:
        if owners.get(user, request.head) is not request.head:
            break
        if request.kind == "linear" and is_call(user, *WHOLE_VIEWS) and is_view(user):
            reached = (*reached, user)
            continue
        longer = _with_follower(request, reached[-1], user)
        if longer is None:
            break
        reached = (*reached, user)
        request = replace(longer, nodes=reached)
    user = only_user(request.nodes[-1])
    if request.kind == "linear" or user is None or not is_call(user, place):
        return request
    shape = replace(request.shape, out_stride=pixel_stride(fake(user)))
    into: fx.Node = argument(user, 0)
    return replace(request, into=into, shape=shape, nodes=(*request.nodes, user))


def _with_follower(request: ProductRequest, last: fx.Node, user: fx.Node) -> ProductRequest | None:
    """Add ``user``, which reads ``last``, as residual or activation; None where it is neither."""
    alike = _is_like if request.kind == "linear" else _is_residual
    residual, activation = _other_term(user, last, alike), activation_of(user)
    if residual is not None and request.residual is None:
        return replace(request, residual=residual)
    if activation is not None and _is_like(user, last):
        return replace(request, activation=activation)
    return None


def _other_term(node: fx.Node, term: fx.Node, alike: Callable[[fx.Node, fx.Node], bool]) -> fx.Node | None:
    """Return the other term of a sum, if it is ``alike`` to ``term``."""
    if not is_call(node, aten.add.Tensor) or node.kwargs.get("alpha", 1) != 1:
        return None
    others = [other for other in node.args[:2] if other is not term]
    (other,) = others if len(others) == 1 else (None,)
    return other if isinstance(other, fx.Node) and alike(other, term) and _is_like(node, term) else None


def _is_residual(node: fx.Node, other: fx.Node) -> bool:
    """Return whether a value has the dtype and shape of ``other``, and its strides, or those of a slice of images."""
    return _is_like(node, other) or (is_like(node, other) and is_read_well(fake(node)))


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two values have the same dtype, shape and strides."""
    a, b = fake(node), fake(other)
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def _strides(images: Tensor) -> tuple[int, ...]:
    """Return the strides of the kernels' results; torch may choose others for images of one pixel or one channel."""
    return torch.empty_like(images, device="meta", memory_format=torch.channels_last).stride()
