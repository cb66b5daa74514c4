"""Convolutions and products as Triton kernels, with the calls around them in the same launch."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, fake, is_call
from nimblec.graph.views import viewed_alike
from nimblec.graph.vocabulary import WHOLE_VIEWS
from nimblec.kernels.call import AsBytes, AsStored, Call, Leaf, Made, Pool, evaluate, example
from nimblec.kernels.compiling import Compile
from nimblec.kernels.gpu import GPU, Trigger
from nimblec.kernels.products.concatenation import concatenate_in_place
from nimblec.kernels.products.depthwise_op import depthwise, depthwise_into, pack_depthwise
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling, depthwise_candidates
from nimblec.kernels.products.fp8 import factors_of, note_product
from nimblec.kernels.products.gemm_match import ProductRequest, requests
from nimblec.kernels.products.gemm_op import convolution, convolution_into, linear
from nimblec.kernels.products.gemm_tilings import Fp8Tiling, Tiling, candidates, row_candidates
from nimblec.kernels.products.packing import (
    counters_of,
    for_tensor_cores,
    join_groups,
    pack_convolution,
    pack_fp8,
    pack_linear,
)
from nimblec.kernels.products.siblings import join_siblings
from nimblec.kernels.selector import Choose, Family, Timed

aten = torch.ops.aten

AnyTiling = Tiling | DepthwiseTiling


def use_triton_kernels(
    module: fx.GraphModule, choose: Choose[ProductRequest, AnyTiling], trigger: Trigger = "late"
) -> None:
    """Compute convolutions and products with the calls around them by one launch, where ``choose`` finds it faster."""
    rewriter = Rewriter(module)
    for request in requests(module):
        tiling = choose(request)
        if tiling is not None:
            _replace(rewriter, request, call(request, tiling, trigger))
    rewriter.finish()


def _replace(rewriter: Rewriter, request: ProductRequest, call: Call) -> None:
    last = request.nodes[-1]
    after = request.nodes[request.nodes.index(request.head) :]
    views = [node for node in after if is_call(node, *WHOLE_VIEWS)]
    result = call.put(rewriter, at=last)
    note_product(result, last, request.constants[request.weight] if "factors" in call.kwargs else None)
    if request.activated is None:
        result = viewed_alike(rewriter, result, views, at=last)
    else:
        result = rewriter.call(aten.reshape.default, result, list(fake(last).shape), at=last)
    assert fake(result).stride() == fake(last).stride(), f"{last.format_node()} would become {result.format_node()}"
    rewriter.replace(last, result)


def tilings(request: ProductRequest, gpu: GPU) -> Sequence[AnyTiling]:
    """Return the candidates of a request."""
    if request.kind == "depthwise":
        return depthwise_candidates(request.shape, gpu)
    of_rows = row_candidates(request.shape) if request.shape.rows == 1 else []
    if request.activated is not None:
        return of_rows or candidates(request.shape, gpu, itemsize=request.dtype.itemsize, splits=(1,))
    found = [*of_rows, *candidates(request.shape, gpu, itemsize=request.dtype.itemsize)]
    if request.largest is None or of_rows:
        return found
    return [*(Fp8Tiling.of(tiling.numbers) for tiling in candidates(request.shape, gpu, itemsize=1)), *found]


def call(request: ProductRequest, tiling: AnyTiling, trigger: Trigger) -> Call:
    """Return the call that computes a request."""
    shape, source = request.shape, request.constants[request.weight]
    end = (request.activation, tiling.numbers, trigger)
    geometry = [list(pair) for pair in (shape.kernel, shape.stride, shape.padding, shape.dilation)]
    how = _prologue(request)
    if isinstance(tiling, DepthwiseTiling):
        weight = Made(source=source, make=partial(pack_depthwise, tiling=tiling), role="weights")
        read = (request.x, weight, request.bias, request.residual, shape.out_channels)
        if request.into is None:
            return Call(op=depthwise, args=(*read, *geometry, *end), kwargs=how)
        return Call(op=depthwise_into, args=(*read, *geometry, *end), kwargs={**how, "out": request.into})
    arithmetic = request.arithmetic if tiling.block_m > 1 else "tf32x3"
    how = {"arithmetic": arithmetic, **how}
    is_rounded = source.dtype is torch.float32 and arithmetic == "tf32"
    pack = partial(_packed, request, tiling, is_rounded)
    weight = Made(source=source, make=pack, role="weights")
    counters = counters_of(tiling, shape, source.device)
    x: Leaf = request.x if request.before is None else _as_read(request, request.x)
    bias: fx.Node | Made | None = request.bias
    if request.bias is not None and request.activated is not None:
        pair = partial(_paired, request.activated)
        bias = Made(source=request.constants[request.bias], make=pair, role="factors")
    if request.activated is not None:
        how["gated"] = True
    if isinstance(tiling, Fp8Tiling):
        assert request.largest is not None
        # Rounding x in each block that reads it would take longer than products of e4m3 save.
        x = AsBytes(node=request.x)
        weight = Made(source=source, make=partial(pack_fp8, tiling=tiling), role="weights")
        how["factors"] = Made(source=source, make=partial(factors_of, largest=request.largest), role="factors")
    if shape.groups > 1:
        how["groups"] = shape.groups
    shared = (x, weight, bias, _residual(request), counters, shape.out_channels)
    if request.kind == "linear":
        return Call(op=linear, args=(*shared, *end), kwargs=how)
    if request.into is None:
        return Call(op=convolution, args=(*shared, *geometry, *end), kwargs=how)
    return Call(op=convolution_into, args=(*shared, *geometry, *end), kwargs={**how, "out": request.into})


def _packed(request: ProductRequest, tiling: Tiling, is_rounded: bool, weight: Tensor) -> Tensor:
    if request.activated is not None:
        weight = _paired(request.activated, weight)
    if is_rounded:
        weight = for_tensor_cores(weight)
    if request.kind == "linear":
        return pack_linear(weight, tiling)
    return pack_convolution(join_groups(weight, request.shape), tiling)


def _paired(activated: int, tensor: Tensor) -> Tensor:
    """Return the columns of both halves in pairs, the ``activated`` half's first."""
    first, second = tensor.chunk(2, -1)[:: -1 if activated else 1]
    return torch.stack((first, second), -1).flatten(-2)


def _residual(request: ProductRequest) -> fx.Node | AsStored | None:
    if request.residual is None or request.kind != "linear":
        return request.residual
    return AsStored(node=request.residual, shape=(request.shape.rows, request.shape.out_channels))


def _as_read(request: ProductRequest, node: fx.Node) -> fx.Node | AsStored:
    """Return what a prologue reads as the kernel takes it: a product's as one row."""
    return node if request.kind != "linear" else AsStored(node=node, shape=(1, request.shape.depth))


def _prologue(request: ProductRequest) -> dict[str, Any]:
    """Return the prologue as arguments of the ops."""
    before = request.before
    if before is None:
        return {}
    given: dict[str, Any] = {"before": before.activation}
    if before.gate is not None:
        given["gate"] = _as_read(request, before.gate)
    for name, value in (("scale", before.scale), ("shift", before.shift)):
        if value is not None:
            given[name] = Made(source=value, make=lambda vector: vector.float().contiguous(), role="factors")
    return given


def framework(request: ProductRequest, pool: Pool, length: int) -> Timed | None:
    """Return the framework's calls of a request; None for a row, whose kernels also save what lies between them."""
    if request.shape.rows == 1 and request.kind == "linear":
        return None
    weight = request.constants[request.weight]
    copies = [pool.take(weight) for _ in range(length)]
    # A generated kernel computes a whole gate, as long as the framework takes for its last call.
    calls = request.nodes if request.activated is None else (request.head, request.nodes[-1])
    values = {node: _value(request, node) for node in _read(calls)}
    before = request.before
    if before is None:
        return lambda n: evaluate(calls, values | {request.weight: copies[n]})
    rest = request.nodes[len(before.nodes) :]
    values[before.nodes[-1]] = evaluate(before.nodes, values)

    def call(n: int) -> object:
        """Call the kernel; compute a prologue that ``sharers`` requests share only in every ``sharers``-th call."""
        pays = n % before.sharers == 0
        return evaluate(request.nodes if pays else rest, values | {request.weight: copies[n]})

    return call


def _read(calls: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield the values that calls read from outside."""
    for node in calls:
        yield from (source for source in node.all_input_nodes if source not in calls)


def _value(request: ProductRequest, node: fx.Node) -> Tensor:
    """Return the value of a constant; random numbers for anything else."""
    if node in request.constants:
        return request.constants[node]
    return example(fake(node), request.constants[request.weight].device)


def _prepare(module: fx.GraphModule, _compile_jobs: Compile) -> None:
    join_siblings(module)
    concatenate_in_place(module)


GEMM: Family[ProductRequest, AnyTiling] = Family(
    name="gemm",
    requests=requests,
    tilings=tilings,
    call=call,
    framework=framework,
    use=use_triton_kernels,
    templates=("nimblec.kernels.products.gemm_template", "nimblec.kernels.products.depthwise_template"),
    reason="it takes in calls around products, and leaves the rest of them to regions",
    prepare=_prepare,
)
