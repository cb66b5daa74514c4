"""Results in e4m3 between kernels: half the bytes, and products that read them need not round them in each block."""

import operator
from collections.abc import Sequence

from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, argument, bound, is_call, times_read
from nimblec.graph.views import viewed_alike
from nimblec.kernels.products.gemm_op import linear, linear_and_moments
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.norm_folding import whole_readers
from nimblec.kernels.reductions.norm_op import layer_norm, layer_norm_and_fp8


def write_fp8(module: fx.GraphModule) -> None:
    """Have launches write e4m3 for products of e4m3, norms besides float16, and others where nothing else reads it."""
    rewriter = Rewriter(module)
    rewriter.propagate()
    for maker in rewriter.calls(linear, attention, layer_norm):
        read = [(reader, rows, _factor(rewriter, reader, rows)) for reader, rows in whole_readers(maker)]
        factors = {float(factor): factor for *_, factor in read if factor is not None}
        if len(factors) != 1:
            continue
        factor = rewriter.constant(factors.popitem()[1], at=maker)
        if is_call(maker, layer_norm):
            _copy(rewriter, maker, factor, [(reader, rows) for reader, rows, found in read if found is not None])
        elif all(found is not None for *_, found in read):
            maker.kwargs = {**maker.kwargs, "out_factor": factor}
    rewriter.propagate()
    rewriter.finish()


def _factor(rewriter: Rewriter, reader: fx.Node, rows: fx.Node) -> Tensor | None:
    """Return what a product of e4m3 multiplies ``rows`` by, (1,); None where it reads them otherwise, or is another."""
    if not is_call(reader, linear, linear_and_moments) or reader.args[0] is not rows or times_read(rows, reader) > 1:
        return None
    factors = rewriter.value(bound(reader)["factors"])
    return None if factors is None else factors[:1].clone()


def _copy(rewriter: Rewriter, norm: fx.Node, factor: fx.Node, readers: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Have a norm write its result in e4m3 too, for ``readers`` of it or of views of it."""
    call = rewriter.call(layer_norm_and_fp8, *norm.args, factor, at=norm)
    copy = rewriter.call(operator.getitem, call, 1, at=norm)
    for reader, rows in readers:
        chain: list[fx.Node] = []
        source = rows
        while source is not norm:
            chain, source = [source, *chain], argument(source, 0)
        reader.args = (viewed_alike(rewriter, copy, chain, at=reader), *reader.args[1:])
    rewriter.replace(norm, rewriter.call(operator.getitem, call, 0, at=norm))
