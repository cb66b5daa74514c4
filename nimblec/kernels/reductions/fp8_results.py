"""Results in e4m3 between kernels: half the bytes, and products that read them need not round them in each block."""

from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, bound, is_call, times_read
from nimblec.kernels.products.gemm_op import linear, linear_and_moments
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.norm_folding import whole_readers


def write_fp8(module: fx.GraphModule) -> None:
    """Have launches write e4m3 where nothing but products of e4m3 reads their results."""
    rewriter = Rewriter(module)
    for maker in rewriter.calls(linear, attention):
        factors = [_factor(rewriter, reader, rows) for reader, rows in whole_readers(maker)]
        known = {float(factor): factor for factor in factors if factor is not None}
        if len(known) == 1 and None not in factors:
            (factor,) = known.values()
            maker.kwargs = {**maker.kwargs, "out_factor": rewriter.constant(factor, at=maker)}
    rewriter.propagate()
    rewriter.finish()


def _factor(rewriter: Rewriter, reader: fx.Node, rows: fx.Node) -> Tensor | None:
    """Return what a product of e4m3 multiplies ``rows`` by, (1,); None where it reads them otherwise, or is another."""
    if not is_call(reader, linear, linear_and_moments) or reader.args[0] is not rows or times_read(rows, reader) > 1:
        return None
    factors = rewriter.value(bound(reader)["factors"])
    return None if factors is None else factors[:1].clone()
