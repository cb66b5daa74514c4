"""Convolutions of trained weights, and gradients of convolutions, as Triton kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, fake
from nimblec.kernels.call import Call, Made, Pool, evaluate, example
from nimblec.kernels.gpu import GPU, Trigger
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.packing import counters_of
from nimblec.kernels.products.trained_match import TrainedRequest, requests
from nimblec.kernels.products.trained_op import (
    depthwise_convolution,
    depthwise_image_gradient,
    depthwise_weight_gradient,
    image_gradient,
    trained_convolution,
    weight_gradient,
)
from nimblec.kernels.products.trained_tilings import (
    DepthwiseSum,
    depthwise_forward_candidates,
    depthwise_image_candidates,
    depthwise_weight_candidates,
    forward_candidates,
    image_candidates,
    image_product,
    weight_candidates,
    weight_product,
)
from nimblec.kernels.selector import Choose, Family, Timed

aten = torch.ops.aten

AnyTiling = Tiling | DepthwiseSum | DepthwiseTiling


def use_trained_kernels(
    module: fx.GraphModule, choose: Choose[TrainedRequest, AnyTiling], trigger: Trigger = "late"
) -> None:
    """Compute convolutions of trained weights and their gradients by one launch each, where it is faster."""
    rewriter = Rewriter(module)
    for request in requests(module):
        tiling = choose(request)
        if tiling is None:
            continue
        at = request.nodes[-1]
        result = call(request, tiling, trigger).put(rewriter, at=at)
        # Strides of axes of length 1 may differ.
        if fake(result).stride() != fake(at).stride():
            flat = rewriter.call(aten.reshape.default, result, [fake(result).numel()], at=at)
            result = rewriter.call(aten.reshape.default, flat, list(fake(at).shape), at=at)
        assert fake(result).stride() == fake(at).stride(), f"{at.format_node()} would become {result.format_node()}"
        rewriter.replace(at, result)
    rewriter.finish()


def tilings(request: TrainedRequest, gpu: GPU) -> Sequence[AnyTiling]:
    """Return the candidates of a request."""
    if request.kind == "depthwise weights":
        return depthwise_weight_candidates(request.shape, gpu)
    finders: dict[str, Callable[..., Sequence[AnyTiling]]] = {
        "forward": forward_candidates,
        "images": image_candidates,
        "weights": weight_candidates,
        "depthwise": depthwise_forward_candidates,
        "depthwise images": depthwise_image_candidates,
    }
    return finders[request.kind](request.shape, gpu, itemsize=request.dtype.itemsize)


def call(request: TrainedRequest, tiling: AnyTiling, trigger: Trigger) -> Call:
    """Return the call that computes a request."""
    shape = request.shape
    end = ([*shape.stride, *shape.padding, *shape.dilation], tiling.numbers, trigger)
    size, read = [shape.height, shape.width], (request.first, request.second)
    if isinstance(tiling, DepthwiseTiling):
        if request.kind == "depthwise":
            return Call(op=depthwise_convolution, args=(*read, request.bias, *end))
        return Call(op=depthwise_image_gradient, args=(*read, size, *end))
    counted = _counters(request, tiling)
    if request.kind == "depthwise weights":
        return Call(op=depthwise_weight_gradient, args=(*read, counted, list(shape.kernel), *end))
    how = {"arithmetic": request.arithmetic}
    if request.kind == "forward":
        return Call(op=trained_convolution, args=(*read, request.bias, counted, *end), kwargs=how)
    if request.kind == "images":
        return Call(op=image_gradient, args=(*read, counted, size, *end), kwargs=how)
    return Call(op=weight_gradient, args=(*read, counted, list(shape.kernel), *end), kwargs=how)


def _counters(request: TrainedRequest, tiling: Tiling | DepthwiseSum) -> Made | None:
    products = {"images": image_product, "weights": weight_product}
    shape = products[request.kind](request.shape) if request.kind in products else request.shape
    return counters_of(tiling, shape, fake(request.first).device)


def framework(request: TrainedRequest, _pool: Pool, _length: int) -> Timed:
    """Return the framework's calls of a request."""
    values = {node: example(fake(node), fake(node).device) for node in request.nodes[0].all_input_nodes}
    return lambda _: evaluate(request.nodes, values)


TRAINED: Family[TrainedRequest, AnyTiling] = Family(
    name="trained",
    requests=requests,
    tilings=tilings,
    call=call,
    framework=framework,
    use=use_trained_kernels,
    templates=("nimblec.kernels.products.trained_template",),
    reason="convolutions with constant weights have been replaced by now; the others are trained",
)
