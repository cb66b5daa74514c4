"""Layer norms and RMS norms that one launch could compute, with the residual before them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.scalars import number, shifted
from nimblec.graph.vocabulary import DTYPES, HALF, is_like
from nimblec.kernels.alone import alone
from nimblec.kernels.images import is_within_reach
from nimblec.kernels.reductions.norm_tilings import WIDEST, Norm

aten = torch.ops.aten

_NORMS = (aten.native_layer_norm.default, aten._fused_rms_norm.default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormRequest:
    """Calls that one launch could compute; ``result`` is the norm.

    ``total`` is the sum of ``x`` and ``residual``, where that is computed too.
    """

    shape: Norm
    eps: float
    x: fx.Node
    residual: fx.Node | None
    total: fx.Node | None
    weight: fx.Node | None
    bias: fx.Node | None
    result: fx.Node
    calls: tuple[fx.Node, ...]

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The values that are read, other than weights."""
        return (self.x,) if self.residual is None else (self.x, self.residual)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The values that are computed."""
        return (self.result,) if self.total is None else (self.result, self.total)

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""
        dtypes = [None if node is None else fake(node).dtype for node in (self.weight, self.bias, self.result)]
        return f"norm {self.shape} {self.eps} {fake(self.x).dtype} {self.residual is not None} {dtypes}"


def requests(module: fx.GraphModule) -> Iterator[NormRequest]:
    """Yield all requests in a graph, in its order.

    Those that a generated kernel would compute together with other calls are left to it.
    """
    rewriter = Rewriter(module)
    rewriter.propagate()
    found: list[NormRequest] = []
    for node in module.graph.nodes:
        request = _request(rewriter, node)
        if request is not None:
            found.append(_with_residual(request, {each.total for each in found}))
    yield from alone(found)


def _request(rewriter: Rewriter, node: fx.Node) -> NormRequest | None:
    """Return the request that begins with the call ``node``: a norm, or the root of a mean of squares."""
    request = None
    if is_call(node, *_NORMS):
        request = _norm(node)
    elif is_call(node, aten.rsqrt.default):
        request = _written_out(rewriter, node)
    return request if request is not None and _is_served(rewriter, request) else None


def _norm(node: fx.Node) -> NormRequest | None:
    given = bound(node)
    result = next((user for user in node.users if user.args[1] == 0), None)
    if result is None or len(node.users) > 1 or not fake(result).numel():
        return None
    if len(given["normalized_shape"]) != 1 or given["eps"] is None:
        return None
    x = given["input"]
    rms = is_call(node, aten._fused_rms_norm.default)
    return NormRequest(
        shape=_shape(x, rms=rms),
        eps=float(given["eps"]),
        x=x,
        residual=None,
        total=None,
        weight=given["weight"],
        bias=given.get("bias"),
        result=result,
        calls=(node, result),
    )


def _shape(x: fx.Node, *, rms: bool) -> Norm:
    return Norm(rows=fake(x).numel() // fake(x).shape[-1], columns=fake(x).shape[-1], rms=rms)


def _written_out(rewriter: Rewriter, root: fx.Node) -> NormRequest | None:
    """Match ``x * rsqrt(mean(x ** 2) + eps) * weight``, cast to float32 before and back after, as models write it."""
    found = _root_mean_square(rewriter, root)
    scaled = only_user(root)
    if found is None or scaled is None or not is_call(scaled, aten.mul.Tensor) or not fake(scaled).numel():
        return None
    wide, eps, squares = found
    x = _uncast(wide)
    (factor,) = (node for node in scaled.args[:2] if node is not root)
    if factor not in {wide, x}:
        return None
    calls = [*({wide} - {x}), *squares, root, scaled]
    back = only_user(scaled)
    if back is not None and is_call(back, aten._to_copy.default):
        calls.append(back)
    product = only_user(calls[-1])
    weight = _weight(rewriter, product, calls[-1])
    if weight is not None and product is not None:
        calls.append(product)
    return NormRequest(
        shape=_shape(x, rms=True),
        eps=eps,
        x=x,
        residual=None,
        total=None,
        weight=weight,
        bias=None,
        result=calls[-1],
        calls=tuple(calls),
    )


def _root_mean_square(rewriter: Rewriter, root: fx.Node) -> tuple[fx.Node, float, tuple[fx.Node, ...]] | None:
    """Return (x, eps, the calls between) where ``root`` is taken of the mean of x ** 2 over the last axis, + eps."""
    (total,) = root.all_input_nodes
    found = shifted(rewriter, total)
    if found is None or only_user(total) is not root:
        return None
    mean, eps = found
    if not is_call(mean, aten.mean.dim) or only_user(mean) is not total:
        return None
    given = bound(mean)
    squares: fx.Node = given["self"]
    rank = fake(squares).dim()
    if not rank or [axis % rank for axis in given["dim"] or ()] != [rank - 1] or not given["keepdim"]:
        return None
    x = _squared(rewriter, squares)
    return (x, eps, (squares, mean, total)) if x is not None and only_user(squares) is mean else None


def _weight(rewriter: Rewriter, product: fx.Node | None, normed: fx.Node) -> fx.Node | None:
    """Return the constant by which ``product`` multiplies each row of ``normed``; None where it does not."""
    if product is None or not is_call(product, aten.mul.Tensor):
        return None
    other: fx.Node
    (other,) = (factor for n in range(2) if (factor := argument(product, n)) is not normed)
    value = rewriter.value(other)
    return other if value is not None and value.shape == fake(normed).shape[-1:] else None


def _squared(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    is_square = (
        is_call(node, aten.square.default)
        or (is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1])
        or (is_call(node, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor) and number(rewriter, node.args[1]) == 2)
    )
    x: fx.Node | None = argument(node, 0) if is_square else None
    return x


def _uncast(node: fx.Node) -> fx.Node:
    """Return the half-precision value that ``node`` is a float32 cast of; else ``node``."""
    if is_call(node, aten._to_copy.default) and fake(node).dtype == torch.float32:
        source: fx.Node = argument(node, 0)
        if fake(source).dtype in HALF and fake(source).shape == fake(node).shape:
            return source
    return node


def _is_served(rewriter: Rewriter, request: NormRequest) -> bool:
    """Return whether rows are contiguous and not too long, dtypes are supported, and weights are constant."""
    x, result = fake(request.x), fake(request.result)
    return (
        x.dtype in DTYPES
        and result.dtype in DTYPES
        and x.shape == result.shape
        and x.is_contiguous()
        and result.is_contiguous()
        and request.shape.columns <= WIDEST
        and is_within_reach(x)
        and all(_is_constant(rewriter, node, request.shape.columns) for node in (request.weight, request.bias))
    )


def _is_constant(rewriter: Rewriter, node: fx.Node | None, columns: int) -> bool:
    if node is None:
        return True
    value = rewriter.value(node)
    return value is not None and value.dtype in DTYPES and tuple(value.shape) == (columns,) and value.is_contiguous()


def _with_residual(request: NormRequest, taken: Collection[fx.Node | None]) -> NormRequest:
    """Add the sum before it, even if others read that too, unless another norm has taken it."""
    total = request.x
    if total in taken or not is_call(total, aten.add.Tensor) or total.kwargs.get("alpha", 1) != 1:
        return request
    terms = [term for term in total.args[:2] if isinstance(term, fx.Node)]
    if len(terms) != 2 or not all(is_like(term, total) and fake(term).is_contiguous() for term in terms):
        return request
    return replace(request, x=terms[0], residual=terms[1], total=total, calls=(total, *request.calls))
