"""Convolutions of 8 bit integers as Triton kernels, which multiply integers on tensor cores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.quantized import MOST_PRODUCTS, quantized_convolution
from nimblec.graph.rewriter import Rewriter, bound, fake
from nimblec.kernels.call import Call, Made, Pool
from nimblec.kernels.gpu import GPU, Trigger
from nimblec.kernels.images import convolution_shape, is_read_well, is_within_reach
from nimblec.kernels.products.gemm_tilings import Tiling, candidates
from nimblec.kernels.products.packing import counters_of, pack_convolution
from nimblec.kernels.products.quantized_op import convolution_of_integers, zero_sums
from nimblec.kernels.selector import Choose, Family, Timed
from nimblec.kernels.shapes import Convolution


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedRequest:
    """A convolution of integers: its call ``node``, the arguments of the call by name, and the constants of these."""

    node: fx.Node
    given: Mapping[str, Any]
    constants: Mapping[str, Tensor]
    shape: Convolution

    @property
    def has_zero(self) -> bool:
        """Whether padding reads a zero point other than 0."""
        return self.given["zero"] != 0 and any(self.shape.padding)

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""
        return f"{self.shape} {fake(self.given['x']).dtype} {self.given['dtype']} {self.has_zero}"


def requests(module: fx.GraphModule) -> Iterator[QuantizedRequest]:
    """Yield the convolutions of integers in a graph that the kernel can compute."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(quantized_convolution):
        given = bound(node)
        values = {name: rewriter.value(given[name]) for name in ("weight", "factors", "bias")}
        constants = {name: value for name, value in values.items() if value is not None}
        x = fake(given["x"])
        if len(constants) < len(values) or not is_read_well(x) or not is_within_reach(x, fake(node)):
            continue
        out_channels, _, *kernel = constants["weight"].shape
        shape = convolution_shape(x, out_channels, kernel, given["stride"], given["padding"], given["dilation"])
        if shape.depth <= MOST_PRODUCTS:
            yield QuantizedRequest(node=node, given=given, constants=constants, shape=shape)


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


def tilings(request: QuantizedRequest, gpu: GPU) -> Sequence[Tiling]:
    """Return the candidates of a request."""
    return candidates(request.shape, gpu, itemsize=1)


def call(request: QuantizedRequest, tiling: Tiling, trigger: Trigger) -> Call:
    """Return the call that computes a request."""
    given, shape, weight = request.given, request.shape, request.constants["weight"]
    x, limits = given["x"], torch.iinfo(given["dtype"])
    bias = request.constants["bias"] - zero_sums(weight, given["zero"], fake(x).dtype)
    numbers = [given["zero"], given["out_zero"], limits.min, limits.max]
    levels = torch.tensor(numbers, dtype=torch.int32, device=weight.device)
    made = (Made(source=each, make=Tensor.contiguous, role="factors") for each in (bias, levels))
    geometry = [list(pair) for pair in (shape.kernel, shape.stride, shape.padding, shape.dilation)]
    packed = Made(source=weight, make=partial(pack_convolution, tiling=tiling), role="weights")
    counters = counters_of(tiling, shape, weight.device)
    read = (x, packed, given["factors"], *made, counters, shape.out_channels)
    how = (request.has_zero, given["dtype"], tiling.numbers, trigger)
    return Call(op=convolution_of_integers, args=(*read, *geometry, *how))


def _framework(_request: QuantizedRequest, _pool: Pool, _length: int) -> Timed | None:
    """Return None: the framework computes integers in float64, which no network gains by."""
    return None


QUANTIZED: Family[QuantizedRequest, Tiling] = Family(
    name="quantized",
    requests=requests,
    tilings=tilings,
    call=call,
    framework=_framework,
    use=use_integer_kernels,
    templates=("nimblec.kernels.products.quantized_template",),
    reason="no other family computes integers",
)
