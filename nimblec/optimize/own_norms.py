"""Layer norms and RMS norms as launches of our own kernel, with the residual before them.

A generated kernel computes them as well, but waits until the one before it has ended; ours start
early. They are worth it between kernels that do so too, and where nothing else would be generated
together with them.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from nimblec.graph.fusible import is_fusible
from nimblec.graph.rewriter import Rewriter, bound, fake, is_call, only_user
from nimblec.graph.scalars import number, shifted
from nimblec.graph.views import is_view
from nimblec.graph.vocabulary import DTYPES, HALF
from nimblec.kernels.choosing import Choice
from nimblec.kernels.compiling import Job
from nimblec.kernels.launching import Trigger
from nimblec.kernels.norm import (
    WIDEST,
    Norm,
    NormTiling,
    add_layer_norm,
    layer_norm,
    norm_candidates,
    norm_job,
    norm_settings,
)
from nimblec.optimize.own_selection import HOPPER, Call, TilingSelector, Times, dtype_name

aten = torch.ops.aten

_NORMS = (aten.native_layer_norm.default, aten._fused_rms_norm.default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """Calls that one launch of ours could compute; the value of ``result`` is the norm's.

    ``total`` is the sum of ``x`` and ``residual`` where that is computed too.
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
    def signature(self) -> str:
        """What tells requests apart."""
        dtypes = [None if node is None else fake(node).dtype for node in (self.weight, self.bias, self.result)]
        return f"norm {self.shape} {self.eps} {fake(self.x).dtype} {self.residual is not None} {dtypes}"


Choose = Callable[[Request], NormTiling | None]
"""How to cut a request's work; None where the calls are to stay."""


def first_candidate(request: Request) -> NormTiling:
    """The most promising tiling, unmeasured."""
    return norm_candidates(request.shape)[0]


def use_own_norms(module: fx.GraphModule, choose: Choose = first_candidate, *, trigger: Trigger = "late") -> None:
    """Replace what ``choose`` gives a tiling; every result keeps its dtype, shape and strides.

    Launches with a ``trigger`` wait for the kernel before them by themselves: compute capability 9.0.
    """
    rewriter = Rewriter(module)
    for request in reversed(list(requests(module))):  # what a later one reads may be what an earlier one replaces
        tiling = choose(request)
        if tiling:
            _replace(rewriter, request, tiling, trigger=trigger)
    rewriter.finish()


def requests(module: fx.GraphModule) -> Iterator[Request]:
    """What `use_own_norms` would ask about, in the order of the graph.

    Those that a generated kernel would compute together with other calls are left to it.
    """
    rewriter = Rewriter(module)
    rewriter.propagate()
    found: list[Request] = []
    for node in module.graph.nodes:
        request = _request(rewriter, node)
        if request is not None:
            found.append(_with_residual(request, {each.total for each in found}))
    while True:
        inside = {call for request in found for call in request.calls}
        alone = [request for request in found if not any(_is_generated(n, inside) for n in _neighbours(request))]
        if len(alone) == len(found):
            yield from found
            return
        found = alone


def _is_generated(node: fx.Node, inside: set[fx.Node]) -> bool:
    return node.op == "call_function" and node not in inside and is_fusible(node)


def _neighbours(request: Request) -> Iterator[fx.Node]:
    """The calls whose results are read, and those that read the results, through views."""
    for source in (request.x, request.residual):
        if source is not None:
            yield _computed(source)
    for result in (request.result, request.total):
        if result is not None:
            yield from _readers(result)


def _computed(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and (is_view(node) or node.target is operator.getitem):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and (is_view(user) or user.target is operator.getitem):
            yield from _readers(user)
        else:
            yield user


def _request(rewriter: Rewriter, node: fx.Node) -> Request | None:
    """The request that begins with the call ``node``: a norm, or the root of a mean of squares."""
    request = None
    if is_call(node, *_NORMS):
        request = _norm(node)
    elif is_call(node, aten.rsqrt.default):
        request = _written_out(rewriter, node)
    return request if request is not None and _is_served(rewriter, request) else None


def _norm(node: fx.Node) -> Request | None:
    given = bound(node)
    result = next((user for user in node.users if user.args[1] == 0), None)
    if result is None or len(node.users) > 1 or not fake(result).numel():
        return None
    if len(given["normalized_shape"]) != 1 or given["eps"] is None:
        return None
    x = given["input"]
    rms = is_call(node, aten._fused_rms_norm.default)
    return Request(
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


def _written_out(rewriter: Rewriter, root: fx.Node) -> Request | None:
    """``x * rsqrt(mean(x ** 2) + eps) * weight``, cast to float32 before and back after, as models write it."""
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
    return Request(
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
    """(x, eps, the calls between) where the argument of ``root`` is the mean of x ** 2 over the last axis, + eps."""
    (total,) = root.all_input_nodes
    found = shifted(rewriter, total)
    if found is None or only_user(total) is not root:
        return None
    mean, eps = found
    if not is_call(mean, aten.mean.dim) or only_user(mean) is not total:
        return None
    given = bound(mean)
    squares: fx.Node = given["self"]
    last = fake(squares).dim() - 1
    if [axis % (last + 1) for axis in given["dim"] or ()] != [last] or not given["keepdim"]:
        return None
    x = _squared(rewriter, squares)
    return (x, eps, (squares, mean, total)) if x is not None and only_user(squares) is mean else None


def _weight(rewriter: Rewriter, product: fx.Node | None, normed: fx.Node) -> fx.Node | None:
    """The constant with which ``product`` multiplies each row of ``normed``."""
    if product is None or not is_call(product, aten.mul.Tensor):
        return None
    (other,) = (node for node in product.args[:2] if node is not normed)
    value = rewriter.value(other)
    return other if value is not None and value.shape == fake(normed).shape[-1:] else None  # type: ignore[return-value]


def _squared(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    if is_call(node, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor) and number(rewriter, node.args[1]) == 2:
        return node.args[0]  # type: ignore[return-value]
    if is_call(node, aten.square.default) or (is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]):
        return node.args[0]  # type: ignore[return-value]
    return None


def _uncast(node: fx.Node) -> fx.Node:
    """What was cast up to float32."""
    if is_call(node, aten._to_copy.default) and fake(node).dtype == torch.float32:
        source = node.args[0]
        if fake(source).dtype in HALF and fake(source).shape == fake(node).shape:  # type: ignore[arg-type]
            return source  # type: ignore[return-value]
    return node


def _is_served(rewriter: Rewriter, request: Request) -> bool:
    """Rows without gaps, not too long, floating-point numbers, constant weights."""
    x, result = fake(request.x), fake(request.result)
    return (
        x.dtype in DTYPES
        and result.dtype in DTYPES
        and x.shape == result.shape
        and x.is_contiguous()
        and result.is_contiguous()
        and request.shape.columns <= WIDEST
        and x.numel() < 1 << 31
        and all(_is_constant(rewriter, node, request.shape.columns) for node in (request.weight, request.bias))
    )


def _is_constant(rewriter: Rewriter, node: fx.Node | None, columns: int) -> bool:
    if node is None:
        return True
    value = rewriter.value(node)
    return value is not None and value.dtype in DTYPES and tuple(value.shape) == (columns,) and value.is_contiguous()


def _with_residual(request: Request, taken: Collection[fx.Node | None]) -> Request:
    """With the sum before it, whoever else reads that, unless another norm has taken it."""
    total = request.x
    if total in taken or not is_call(total, aten.add.Tensor) or total.kwargs.get("alpha", 1) != 1:
        return request
    terms = [term for term in total.args[:2] if isinstance(term, fx.Node)]
    if len(terms) != 2 or not all(_is_like(term, total) for term in terms):
        return request
    return replace(request, x=terms[0], residual=terms[1], total=total, calls=(total, *request.calls))


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values have one dtype and shape, both without gaps."""
    a, b = fake(node), fake(other)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.is_contiguous() and b.is_contiguous()


def _replace(rewriter: Rewriter, request: Request, tiling: NormTiling, *, trigger: Trigger) -> None:
    result, total = request.result, request.total
    how = (request.eps, request.shape.rms, fake(result).dtype, tiling.numbers, trigger)
    if total is None:
        call = rewriter.call(layer_norm, request.x, request.weight, request.bias, *how, at=result)
        rewriter.replace(result, call)
        return
    # Where the sum was, which others may read before the norm.
    with rewriter.graph.inserting_before(total):
        weight, bias = (node and rewriter.graph.node_copy(node) for node in (request.weight, request.bias))
    call = rewriter.call(add_layer_norm, request.x, request.residual, weight, bias, *how, at=total)
    normed, added = (rewriter.call(operator.getitem, call, i, at=total) for i in (0, 1))
    rewriter.replace(result, normed)
    rewriter.replace(total, added)


def select_own_norms(
    module: fx.GraphModule, cache: Times | None = None, *, trigger: Trigger = "late"
) -> Mapping[str, Choice]:
    """Put our own norms in, cut as is fastest on this GPU; what was chosen, by request.

    They are not compared with generated kernels: whether they gain shows in the whole network. Times
    that the ``cache`` has are not measured again.
    """
    found = list(requests(module))
    if not found or torch.cuda.get_device_capability() < HOPPER:
        return {}
    selector = NormSelector.prepared(found, "norm", cache, trigger)
    use_own_norms(module, selector, trigger=trigger)
    return selector.choices


class NormSelector(TilingSelector[Request, NormTiling]):
    """A `choose` for `use_own_norms`."""

    def tilings(self, request: Request) -> Sequence[NormTiling]:
        """The candidates."""
        return norm_candidates(request.shape)

    def job(self, request: Request, tiling: NormTiling) -> Job:
        """As our call launches it."""

        def dtype(node: fx.Node | None) -> str | None:
            return None if node is None else dtype_name(fake(node).dtype)

        return norm_job(
            norm_settings(request.shape, tiling, eps=request.eps, trigger=self.trigger),
            dtype=str(dtype(request.x)),
            out_dtype=str(dtype(request.result)),
            weight=dtype(request.weight),
            bias=dtype(request.bias),
            residual=request.residual is not None,
        )

    def theirs(self, request: Request) -> None:
        """A generated kernel, which is not at hand."""

    def ours(self, request: Request, tiling: NormTiling) -> Call:
        """Our call."""

        def example(node: fx.Node | None) -> Tensor | None:
            return (
                None if node is None else torch.randn(fake(node).shape, device=fake(node).device).to(fake(node).dtype)
            )

        read = [example(node) for node in (request.weight, request.bias)]
        how = (request.eps, request.shape.rms, fake(request.result).dtype, tiling.numbers, self.trigger)
        x, residual = example(request.x), example(request.residual)
        if residual is None:
            return lambda _: layer_norm(x, *read, *how)
        return lambda _: add_layer_norm(x, residual, *read, *how)
