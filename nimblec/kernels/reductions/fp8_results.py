"""Results in e4m3 between kernels: half the bytes, and products that read them need not round them in each block."""

import operator
from collections.abc import Sequence

from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, argument, bound, is_call, times_read
from nimblec.graph.views import viewed_alike
from nimblec.kernels.products.gemm_op import linear, linear_and_moments, linear_moments_and_fp8
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.norm_folding import whole_readers
from nimblec.kernels.reductions.norm_op import layer_norm, layer_norm_and_fp8

_PRODUCTS = linear, linear_and_moments, linear_moments_and_fp8


def write_fp8(module: fx.GraphModule) -> None:
    """Have launches write the e4m3 that products read, and float16 only where something else reads the result, too."""
    rewriter = Rewriter(module)
    rewriter.propagate()
    for maker in rewriter.calls(linear, linear_and_moments, attention, layer_norm):
        result = maker
        if is_call(maker, linear_and_moments):
            (result,) = (user for user in maker.users if user.args[1] == 0)
        readers, factors = _products(rewriter, result)
        if len(factors) != 1:
            continue
        factor = rewriter.constant(factors.pop(), at=maker)
        if is_call(maker, layer_norm):
            call = rewriter.call(layer_norm_and_fp8, *maker.args, factor, at=maker)
            _let_read(rewriter, readers, result, rewriter.call(operator.getitem, call, 1, at=maker))
            rewriter.replace(maker, rewriter.call(operator.getitem, call, 0, at=maker))
        elif is_call(maker, linear_and_moments):
            given = {**maker.kwargs, "out_factor": factor}
            call = rewriter.call(linear_moments_and_fp8, *maker.args, at=maker, **given)
            _let_read(rewriter, readers, result, rewriter.call(operator.getitem, call, 2, at=maker))
            maker.replace_all_uses_with(call)
            rewriter.graph.erase_node(maker)
        elif len(readers) == len([*whole_readers(result)]):
            maker.kwargs = {**maker.kwargs, "out_factor": factor}
    rewriter.propagate()
    rewriter.finish()


_Readers = Sequence[tuple[fx.Node, fx.Node]]
"""Calls that read a value, each with the value or the view of it that it reads."""


def _products(rewriter: Rewriter, result: fx.Node) -> tuple[_Readers, list[Tensor]]:
    """Return the products of e4m3 that read a result, and the different factors (1,) that they multiply it by."""
    found = [(reader, rows, _factor(rewriter, reader, rows)) for reader, rows in whole_readers(result)]
    factors = {float(factor): factor for *_, factor in found if factor is not None}
    return [(reader, rows) for reader, rows, factor in found if factor is not None], [*factors.values()]


def _factor(rewriter: Rewriter, reader: fx.Node, rows: fx.Node) -> Tensor | None:
    """Return what a product of e4m3 multiplies ``rows`` by, (1,); None where it reads them otherwise, or is another."""
    if not is_call(reader, *_PRODUCTS) or reader.args[0] is not rows or times_read(rows, reader) > 1:
        return None
    factors = rewriter.value(bound(reader)["factors"])
    return None if factors is None else factors[:1].clone()


def _let_read(rewriter: Rewriter, readers: _Readers, result: fx.Node, copy: fx.Node) -> None:
    """Let products read the ``copy`` of a ``result``."""
    for reader, rows in readers:
        chain: list[fx.Node] = []
        source = rows
        while source is not result:
            chain, source = [source, *chain], argument(source, 0)
        reader.args = (viewed_alike(rewriter, copy, chain, at=reader), *reader.args[1:])
