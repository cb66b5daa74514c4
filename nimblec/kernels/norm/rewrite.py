"""Layer norms and RMS norms as launches of one Triton kernel, with the residual before them.

A generated kernel computes them as well, but waits until the one before it has ended; this one starts
early. It is worth it between kernels that do so too, and where nothing else would be generated
together with it.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from nimblec.graph.rewriter import Rewriter, fake
from nimblec.kernels.core.call import Call, Pool
from nimblec.kernels.core.gpu import GPU, Trigger
from nimblec.kernels.core.selector import Choose, Family
from nimblec.kernels.norm.folding import fold_norms_into_products
from nimblec.kernels.norm.match import Request, requests
from nimblec.kernels.norm.op import add_layer_norm, layer_norm
from nimblec.kernels.norm.tilings import NormTiling, norm_candidates


def use_triton_norms(module: fx.GraphModule, choose: Choose[Request, NormTiling], trigger: Trigger = "late") -> None:
    """Layer norms and RMS norms are one launch with the sum before them, cut as ``choose`` says.

    Every result keeps its dtype, shape and strides. Launches with a ``trigger`` wait for the kernel before them by
    themselves: `GPU.has_programmatic_launch`.
    """
    rewriter = Rewriter(module)
    for request in reversed(list(requests(module))):  # what a later one reads may be what an earlier one replaces
        tiling = choose(request)
        if tiling is not None:
            _replace(rewriter, request, tiling, trigger)
    rewriter.finish()


def _replace(rewriter: Rewriter, request: Request, tiling: NormTiling, trigger: Trigger) -> None:
    result, total = request.result, request.total
    if total is None:
        rewriter.replace(result, call(request, tiling, trigger).put(rewriter, at=result))
        return
    # Where the sum was, which others may read before the norm; the weights may come after it.
    with rewriter.graph.inserting_before(total):
        weight, bias = (node and rewriter.graph.node_copy(node) for node in (request.weight, request.bias))
    both = call(replace(request, weight=weight, bias=bias), tiling, trigger).put(rewriter, at=total)
    normed, added = (rewriter.call(operator.getitem, both, i, at=total) for i in (0, 1))
    rewriter.replace(result, normed)
    rewriter.replace(total, added)


def tilings(request: Request, gpu: GPU) -> Sequence[NormTiling]:
    """The candidates of a request."""
    return norm_candidates(request.shape, gpu)


def call(request: Request, tiling: NormTiling, trigger: Trigger) -> Call:
    """What computes a request: the norm, and the sum that it is of where there is a residual."""
    dtype = fake(request.result).dtype
    how = (request.weight, request.bias, request.eps, request.shape.rms, dtype, tiling.numbers, trigger)
    if request.residual is None:
        return Call(op=layer_norm, args=(request.x, *how))
    return Call(op=add_layer_norm, args=(request.x, request.residual, *how))


def framework(_request: Request, _pool: Pool, _length: int) -> None:
    """A generated kernel, which is not at hand: whether these gain shows in the whole plan."""


NORM: Family[Request, NormTiling] = Family(
    name="norm",
    requests=requests,
    tilings=tilings,
    call=call,
    framework=framework,
    use=use_triton_norms,
    templates=("nimblec.kernels.norm.template",),
    reason="norms go into products, which must be Triton kernels by then",
    prepare=fold_norms_into_products,
    needs_whole_plan=True,
)
