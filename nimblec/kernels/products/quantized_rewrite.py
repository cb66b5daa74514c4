"""Convolutions of 8 bit integers as Triton kernels, which multiply integers on tensor cores.

The framework computes integers in float64, which no network gains by.
"""

from functools import partial

from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, fake
from nimblec.kernels.call import Call, Made
from nimblec.kernels.gpu import Trigger
from nimblec.kernels.products.gemm_tilings import Tiling, candidates
from nimblec.kernels.products.packing import counters_of, pack_convolution
from nimblec.kernels.products.quantized_match import QuantizedRequest, requests
from nimblec.kernels.products.quantized_op import convolution_of_integers, zero_sums
from nimblec.kernels.selector import Choose, Family


def use_integer_kernels(
    module: fx.GraphModule, choose: Choose[QuantizedRequest, Tiling], trigger: Trigger = "late"
) -> None:
    """Compute convolutions of 8 bit integers by one launch each, with the tiling that ``choose`` gives."""
    rewriter = Rewriter(module)
    for request in requests(module):
        tiling = choose(request)
        if tiling is not None:
            node = request.node
            rewriter.replace(node, call(request, tiling, trigger).put(rewriter, at=node))
    rewriter.finish()


def call(request: QuantizedRequest, tiling: Tiling, trigger: Trigger) -> Call:
    """Return the call that computes a request."""
    given, shape, weight = request.given, request.shape, request.constants["weight"]
    x, device = given["x"], weight.device
    total_bias = request.constants["bias"] - zero_sums(weight, given["zero"], fake(x).dtype)
    vectors = total_bias, request.levels.tensor(device)
    bias, levels = (Made(source=each, make=Tensor.contiguous, role="factors") for each in vectors)
    geometry = [list(pair) for pair in (shape.kernel, shape.stride, shape.padding, shape.dilation)]
    packed = Made(source=weight, make=partial(pack_convolution, tiling=tiling), role="weights")
    counters = counters_of(tiling, shape, device)
    read = (x, packed, given["factors"], bias, request.residual, levels, counters, shape.out_channels)
    how = (request.has_zero, request.is_requantized, fake(request.node).dtype, tiling.numbers, trigger)
    return Call(op=convolution_of_integers, args=(*read, *geometry, *how))


QUANTIZED: Family[QuantizedRequest, Tiling] = Family(
    name="quantized",
    requests=requests,
    tilings=lambda request, gpu: candidates(request.shape, gpu, itemsize=1),
    call=call,
    use=use_integer_kernels,
    templates=("nimblec.kernels.products.quantized_template",),
    reason="no other family computes integers",
)
