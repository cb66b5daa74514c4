"""Norms between Triton products: the first stores the moments of its rows, the second corrects its sums by them.

So a norm costs no launch, and the normalised rows are never written (`nimblec.kernels.products.gemm_template`).
Its weights are multiplied into those of the products that read it.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, times_read
from nimblec.graph.views import is_view
from nimblec.graph.vocabulary import HALF, WHOLE_VIEWS
from nimblec.kernels.compiling import Compile
from nimblec.kernels.launch import jobs
from nimblec.kernels.products.fp8 import FP8, column_factors, factors_of, largest_result, weight_of
from nimblec.kernels.products.gemm_op import linear, linear_and_moments
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.packing import pack_fp8, pack_rows, unpack_rows
from nimblec.kernels.reductions.norm_match import NormRequest, requests
from nimblec.kernels.shapes import next_power_of_2

_MOST_MOMENTS = 64
"""The most moments that a thread may hold while it multiplies, beside its share of the sum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Normed:
    """A product ``reader`` of a norm of a product ``maker``; ``weight`` (out channels, columns) includes the norm's."""

    request: NormRequest
    maker: fx.Node
    reader: fx.Node
    weight: Tensor
    bias: Tensor | None


def fold_norms_into_products(module: fx.GraphModule, compile_jobs: Compile) -> None:
    """Fold norms in half precision that only the kernels' products read, and of which one computes the argument.

    The kernels that the graph then launches are compiled by ``compile_jobs``.
    """
    rewriter = Rewriter(module)
    found = [normed for request in requests(module) for normed in _normed(rewriter, request)]
    if not found:
        return
    calls = {maker: _leaving_moments(rewriter, maker) for maker in {normed.maker: None for normed in found}}
    for normed in found:
        _correct(rewriter, normed, calls.get(normed.reader, normed.reader), calls[normed.maker])
    rewriter.finish()
    changed = [*rewriter.calls(linear_and_moments), *(n for n in rewriter.calls(linear) if bound(n)["moments"])]
    compile_jobs(jobs(changed))


def _normed(rewriter: Rewriter, request: NormRequest) -> Iterator[_Normed]:
    """Yield the products that read a norm; none where the norm cannot be folded."""
    x, result, maker = fake(request.x), fake(request.result), _maker(request.x)
    if maker is None or request.residual is not None or x.dtype not in HALF or result.dtype != x.dtype:
        return
    columns, width = request.shape.columns, Tiling.of(bound(maker)["tiling"]).block_n
    if fake(maker).shape[1] != columns or columns % width:
        return
    readers = list(whole_readers(request.result))
    if not all(_is_product_of(reader, rows) for reader, rows in readers):
        return
    if largest_result(maker) is None and any(weight_of(reader) is not None for reader, _ in readers):
        return
    if any(_moments_of_a_thread(reader, columns // width) > _MOST_MOMENTS for reader, _ in readers):
        return
    found = [_with_weights(rewriter, request, maker, reader) for reader, _ in readers]
    folded = [tensor for normed in found for tensor in (normed.weight, normed.bias) if tensor is not None]
    if all(bool(tensor.isfinite().all()) for tensor in folded):
        yield from found


def _maker(node: fx.Node) -> fx.Node | None:
    """Return the product of whose whole result the value is a view; None where it is no product."""
    while is_call(node, *WHOLE_VIEWS) and is_view(node):
        node = argument(node, 0)
    return node if is_call(node, linear) and not bound(node)["gated"] else None


def whole_readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the readers of a value and of its whole views, each with the value or view that it reads."""
    for user in node.users:
        if is_call(user, *WHOLE_VIEWS) and is_view(user):
            yield from whole_readers(user)
        else:
            yield user, node


def _is_product_of(reader: fx.Node, rows: fx.Node) -> bool:
    is_product = is_call(reader, linear) and reader.args[0] is rows and fake(rows).is_contiguous()
    return is_product and times_read(rows, reader) == 1 and bound(reader)["gate"] is None


def _moments_of_a_thread(reader: fx.Node, parts: int) -> float:
    tiling = Tiling.of(bound(reader)["tiling"])
    return 2 * tiling.block_m * next_power_of_2(parts) / (32 * tiling.num_warps)


def _with_weights(rewriter: Rewriter, request: NormRequest, maker: fx.Node, reader: fx.Node) -> _Normed:
    given = bound(reader)
    packed, bias = rewriter.value(given["weight"]), rewriter.value(given["bias"])
    scale, shift = rewriter.value(request.weight), rewriter.value(request.bias)
    assert packed is not None
    dtype, source = fake(reader).dtype, weight_of(reader)
    rows = unpack_rows(packed, given["out_channels"], request.shape.columns) if source is None else source.t()
    weight = rows.float()
    if shift is not None:
        added = weight @ shift.float()
        bias = (added if bias is None else added + bias.float()).to(dtype)
    if scale is not None:
        weight = weight * scale.float()
    return _Normed(request=request, maker=maker, reader=reader, weight=weight.to(dtype), bias=bias)


def _leaving_moments(rewriter: Rewriter, maker: fx.Node) -> fx.Node:
    """Replace a product by a call that also returns the moments of its result."""
    call = rewriter.call(linear_and_moments, *maker.args, at=maker, **maker.kwargs)
    rewriter.replace(maker, rewriter.call(operator.getitem, call, 0, at=maker))
    return call


def _correct(rewriter: Rewriter, normed: _Normed, reader: fx.Node, maker: fx.Node) -> None:
    """Make ``reader`` take the rows of ``maker`` themselves, and normalise them."""
    (rows,) = (user for user in maker.users if user.args[1] == 0)
    tiling = Tiling.of(bound(reader)["tiling"])
    largest, weight, factors = largest_result(normed.maker), normed.weight, None
    packed = pack_rows(weight, tiling)
    if weight_of(normed.reader) is not None and largest is not None:
        packed, factors = pack_fp8(weight.t(), tiling), factors_of(weight.t(), largest)
        weight = unpack_rows(packed, *weight.shape).view(FP8).float() * column_factors(weight.t())[:, None]
    bias = None if normed.bias is None else rewriter.constant(normed.bias, at=reader)
    norm: dict[str, Any] = {
        "moments": rewriter.call(operator.getitem, maker, 1, at=reader),
        "column_sums": rewriter.constant(weight.float().sum(1), at=reader),
        "factors": None if factors is None else rewriter.constant(factors, at=reader),
        "eps": normed.request.eps,
        "rms": normed.request.shape.rms,
    }
    reader.args = (rows, rewriter.constant(packed, at=reader), bias, *reader.args[3:])
    reader.kwargs = {**reader.kwargs, **norm}
