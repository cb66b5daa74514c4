"""Layer norms and RMS norms as launches of one Triton kernel, with the residual before them.

A generated kernel could compute them too, but waits until the one before it has ended; this one starts
early. It gains between kernels that also start early, and where no other call would be generated
together with it. The generated kernel, which made no measured network faster, is not timed against it.
"""

import operator
from dataclasses import replace

from torch import fx

from nimblec.graph.rewriter import Rewriter, fake
from nimblec.kernels.call import Call
from nimblec.kernels.gpu import Trigger
from nimblec.kernels.reductions.norm_folding import fold_norms_into_products
from nimblec.kernels.reductions.norm_match import NormRequest, requests
from nimblec.kernels.reductions.norm_op import add_layer_norm, layer_norm
from nimblec.kernels.reductions.norm_tilings import NormTiling, norm_candidates
from nimblec.kernels.selector import Choose, Family


def use_triton_norms(
    module: fx.GraphModule, choose: Choose[NormRequest, NormTiling], trigger: Trigger = "late"
) -> None:
    """Compute layer norms and RMS norms with the sum before them by one launch, with a tiling that is chosen."""
    rewriter = Rewriter(module)
    # A later request may read a value that an earlier one replaces.
    for request in reversed(list(requests(module))):
        tiling = choose(request)
        if tiling is not None:
            _replace(rewriter, request, tiling, trigger)
    rewriter.finish()


def _replace(rewriter: Rewriter, request: NormRequest, tiling: NormTiling, trigger: Trigger) -> None:
    result, total = request.result, request.total
    if total is None:
        rewriter.replace(result, call(request, tiling, trigger).put(rewriter, at=result))
        return
    # At the place of the sum, which others may read before the norm; the weights may stand after it.
    with rewriter.graph.inserting_before(total):
        weight, bias = (node and rewriter.graph.node_copy(node) for node in (request.weight, request.bias))
    both = call(replace(request, weight=weight, bias=bias), tiling, trigger).put(rewriter, at=total)
    normed, added = (rewriter.call(operator.getitem, both, i, at=total) for i in (0, 1))
    rewriter.replace(result, normed)
    rewriter.replace(total, added)


def call(request: NormRequest, tiling: NormTiling, trigger: Trigger) -> Call:
    """Return the call that computes a request: the norm, and its argument where that is a sum with a residual."""
    dtype = fake(request.result).dtype
    how = (request.weight, request.bias, request.eps, request.shape.rms, dtype, tiling.numbers, trigger)
    if request.residual is None:
        return Call(op=layer_norm, args=(request.x, *how))
    return Call(op=add_layer_norm, args=(request.x, request.residual, *how))


NORM: Family[NormRequest, NormTiling] = Family(
    name="norm",
    requests=requests,
    tilings=lambda request, gpu: norm_candidates(request.shape, gpu),
    call=call,
    use=use_triton_norms,
    templates=("nimblec.kernels.reductions.norm_template",),
    reason="norms are folded into products, which must be Triton kernels by then",
    prepare=fold_norms_into_products,
)
