"""Results in e4m3 between kernels: half the bytes, and products that read them need not round them in each block."""

import operator

from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, argument, bound, is_call, times_read
from nimblec.graph.views import viewed_alike
from nimblec.kernels.products.gemm_op import linear, linear_and_moments, linear_moments_and_fp8
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.norm_folding import whole_readers
from nimblec.kernels.reductions.norm_op import layer_norm, layer_norm_and_fp8

_PRODUCTS = linear, linear_and_moments, linear_moments_and_fp8


def write_fp8(module: fx.GraphModule) -> None:
    """Have launches write e4m3 for products of e4m3: instead of float16 where nothing else reads it, or besides."""
    rewriter = Rewriter(module)
    rewriter.propagate()
    for maker in rewriter.calls(linear, linear_and_moments, attention, layer_norm):
        result = maker
        if is_call(maker, linear_and_moments):
            (result,) = (user for user in maker.users if user.args[1] == 0)
        found = [(reader, rows, _factor(rewriter, reader, rows)) for reader, rows in whole_readers(result)]
        factors = {float(factor): factor for *_, factor in found if factor is not None}
        if len(factors) != 1:
            continue
        factor = rewriter.constant(factors.popitem()[1], at=maker)
        if is_call(maker, linear, attention):
            if all(each is not None for *_, each in found):
                maker.kwargs = {**maker.kwargs, "out_factor": factor}
            continue
        if is_call(maker, layer_norm):
            call = rewriter.call(layer_norm_and_fp8, *maker.args, factor, at=maker)
        else:
            given = {**maker.kwargs, "out_factor": factor}
            call = rewriter.call(linear_moments_and_fp8, *maker.args, at=maker, **given)
        copy = rewriter.call(operator.getitem, call, 1 if is_call(maker, layer_norm) else 2, at=maker)
        for reader, rows, each in found:
            if each is not None:
                _let_read(rewriter, reader, rows, result, copy)
        if is_call(maker, layer_norm):
            rewriter.replace(maker, rewriter.call(operator.getitem, call, 0, at=maker))
        else:
            maker.replace_all_uses_with(call)
            rewriter.graph.erase_node(maker)
    rewriter.propagate()
    rewriter.finish()


def _factor(rewriter: Rewriter, reader: fx.Node, rows: fx.Node) -> Tensor | None:
    """Return what a product of e4m3 multiplies ``rows`` by, (1,); None where it reads them otherwise, or is another."""
    if not is_call(reader, *_PRODUCTS) or reader.args[0] is not rows or times_read(rows, reader) > 1:
        return None
    factors = rewriter.value(bound(reader)["factors"])
    return None if factors is None else factors[:1].clone()


def _let_read(rewriter: Rewriter, reader: fx.Node, rows: fx.Node, result: fx.Node, copy: fx.Node) -> None:
    """Let a product read the ``copy`` of a ``result`` in the place of ``rows``, which is the result or a view of it."""
    chain: list[fx.Node] = []
    while rows is not result:
        chain, rows = [rows, *chain], argument(rows, 0)
    reader.args = (viewed_alike(rewriter, copy, chain, at=reader), *reader.args[1:])
