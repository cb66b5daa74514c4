"""Pooling and means over images as launches of Triton kernels.

A generated kernel could compute them too, but waits until the one before it has ended, and takes seconds to
compile. They are timed against ATen's kernel; a generated one made no measured network faster.
"""

from collections.abc import Sequence

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, fake
from nimblec.kernels.call import Call, Pool, evaluate, example
from nimblec.kernels.gpu import GPU, Trigger
from nimblec.kernels.reductions.pool_match import PoolRequest, requests
from nimblec.kernels.reductions.pool_op import mean2d, pool2d
from nimblec.kernels.reductions.pool_shapes import Pooling
from nimblec.kernels.reductions.pool_tilings import PoolTiling, mean_candidates, pool_candidates
from nimblec.kernels.selector import Choose, Family, Timed

aten = torch.ops.aten


def use_triton_pools(
    module: fx.GraphModule, choose: Choose[PoolRequest, PoolTiling], trigger: Trigger = "late"
) -> None:
    """Compute pools and means of images with the activation after them by one launch, where it is faster."""
    rewriter = Rewriter(module)
    # A later request may read a value that an earlier one replaces.
    for request in reversed(list(requests(module))):
        tiling = choose(request)
        if tiling is None:
            continue
        at = request.result
        result = call(request, tiling, trigger).put(rewriter, at=at)
        if fake(result).shape != fake(at).shape:
            result = rewriter.call(aten.reshape.default, result, list(fake(at).shape), at=at)
        assert fake(result).stride() == fake(at).stride(), f"{at.format_node()} would become {result.format_node()}"
        rewriter.replace(at, result)
    rewriter.finish()


def tilings(request: PoolRequest, gpu: GPU) -> Sequence[PoolTiling]:
    """Return the candidates of a request."""
    if isinstance(request.shape, Pooling):
        return pool_candidates(request.shape, gpu)
    return mean_candidates(request.shape, gpu, itemsize=request.dtype.itemsize)


def call(request: PoolRequest, tiling: PoolTiling, trigger: Trigger) -> Call:
    """Return the call that computes a request; means have four axes."""
    shape, end = request.shape, (request.activation, tiling.numbers, trigger)
    if not isinstance(shape, Pooling):
        return Call(op=mean2d, args=(request.x, request.channels_last, *end))
    geometry = [list(pair) for pair in (shape.kernel, shape.stride, shape.padding, shape.dilation)]
    return Call(op=pool2d, args=(request.x, request.kind, *geometry, shape.ceil_mode, request.divisor, *end))


def framework(request: PoolRequest, _pool: Pool, _length: int) -> Timed:
    """Return the framework's calls of a request."""
    values = {request.x: example(fake(request.x), fake(request.x).device)}
    return lambda _: evaluate(request.calls, values)


POOL: Family[PoolRequest, PoolTiling] = Family(
    name="pool",
    requests=requests,
    tilings=tilings,
    call=call,
    framework=framework,
    use=use_triton_pools,
    templates=("nimblec.kernels.reductions.pool_template",),
    reason="products have fused the activations that they read; a pool fuses one that is left",
)
