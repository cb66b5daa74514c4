"""Convolutions of 8 bit integers, and the calls after them that quantise their results again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from nimblec.graph.quantized import EIGHT_BITS, MOST_PRODUCTS, quantized_convolution
from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.scalars import number
from nimblec.kernels.images import convolution_shape, is_read_well, is_within_reach
from nimblec.kernels.products.quantized_op import Levels
from nimblec.kernels.shapes import Convolution

aten = torch.ops.aten

_CAST = aten._to_copy.default
_QUANTIZATION = (aten.div.Tensor, aten.round.default, aten.add.Tensor, aten.clamp.default, _CAST)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedRequest:
    """A convolution of integers: the arguments of its call by name, and the constants among these.

    ``node`` is the result: of the call, or of those that quantise its result again, with a ``residual`` if any.
    """

    node: fx.Node
    given: Mapping[str, Any]
    constants: Mapping[str, Tensor]
    shape: Convolution
    levels: Levels
    residual: fx.Node | None = None
    is_requantized: bool = False

    @property
    def has_zero(self) -> bool:
        """Whether padding reads a zero point other than 0."""
        return self.given["zero"] != 0 and any(self.shape.padding)

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""
        dtypes = [fake(each).dtype for each in (self.given["x"], self.node, self.residual) if each is not None]
        return f"{self.shape} {dtypes} {self.has_zero} {self.is_requantized}"


def requests(module: fx.GraphModule) -> Iterator[QuantizedRequest]:
    """Yield the convolutions of integers that the kernel can compute; none depends on the choice for another.

    Each is made from the graph as it is by then. Of two convolutions whose sum is quantised, the first adds the result
    of the other.
    """
    rewriter = Rewriter(module)
    taken: set[fx.Node] = set()
    for node in rewriter.calls(quantized_convolution):
        request = _request(rewriter, node)
        if request is not None:
            longer = _requantized(rewriter, request)
            request = request if longer is None or longer.node in taken else longer
            taken.add(request.node)
            yield request


def _request(rewriter: Rewriter, node: fx.Node) -> QuantizedRequest | None:
    given = bound(node)
    values = {name: rewriter.value(given[name]) for name in ("weight", "factors", "bias")}
    constants = {name: value for name, value in values.items() if value is not None}
    x = fake(given["x"])
    if len(constants) < len(values) or not is_read_well(x) or not is_within_reach(x, fake(node)):
        return None
    out_channels, _, *kernel = constants["weight"].shape
    shape = convolution_shape(x, out_channels, kernel, given["stride"], given["padding"], given["dilation"])
    if shape.depth > MOST_PRODUCTS:
        return None
    limits = torch.iinfo(given["dtype"])
    levels = Levels(x_zero=given["zero"], own_zero=given["out_zero"], own_low=limits.min, own_high=limits.max)
    return QuantizedRequest(node=node, given=given, constants=constants, shape=shape, levels=levels)


def _requantized(rewriter: Rewriter, request: QuantizedRequest) -> QuantizedRequest | None:
    """Add the calls that quantise again what the result stands for, a residual added and bounded by a ReLU or not."""
    last, residual, levels = request.node, None, request.levels
    for _ in range(3):
        user = only_user(last)
        if user is None:
            return None
        last = user
    own = _dequantized(last)
    if own is None or own.integers is not request.node:
        return None
    levels = replace(levels, own_scale=own.scale)
    user = only_user(last)
    if user is not None and is_call(user, aten.add.Tensor) and not user.kwargs:
        added = next((found for each in user.args if each is not last and (found := _dequantized(each))), None)
        if added is None or fake(added.integers).stride() != fake(request.node).stride():
            return None
        last, residual = user, added.integers
        levels = replace(levels, residual_zero=added.zero, residual_scale=added.scale)
    user = only_user(last)
    is_bounded = user is not None and is_call(user, aten.relu.default)
    quantized = _quantized(rewriter, user if user is not None and is_bounded else last)
    if quantized is None or fake(quantized.integers).stride() != fake(request.node).stride():
        return None
    low = max(quantized.low, quantized.zero) if is_bounded else quantized.low
    levels = replace(levels, scale=quantized.scale, zero=quantized.zero, low=low, high=quantized.high)
    return replace(request, node=quantized.integers, residual=residual, levels=levels, is_requantized=True)


class _Scheme(NamedTuple):
    """Integers that stand for ``(integers - zero) * scale``, and the limits that quantisation sets them."""

    integers: fx.Node
    scale: float
    zero: float
    low: float = 0.0
    high: float = 0.0


def _dequantized(value: Any) -> _Scheme | None:
    """Return what a value is dequantised from in float32; None where it is not, or not from 8 bits."""
    if not is_call(value, aten.mul.Tensor) or not is_call(value.args[0], aten.sub.Tensor):
        return None
    difference, scale = value.args
    cast, zero = difference.args
    if not is_call(cast, _CAST) or difference.kwargs or fake(value).dtype != torch.float32:
        return None
    integers = argument(cast, 0)
    are_numbers = isinstance(scale, float) and isinstance(zero, float)
    is_served = fake(integers).dtype in EIGHT_BITS and fake(integers).shape == fake(value).shape
    return _Scheme(integers, scale, zero) if are_numbers and is_served else None


def _quantized(rewriter: Rewriter, value: fx.Node) -> _Scheme | None:
    """Return what a value becomes if it is only quantised, to 8 bits."""
    calls = [value]
    for target in _QUANTIZATION:
        user = only_user(calls[-1])
        if user is None or not is_call(user, target):
            return None
        calls.append(user)
    _, division, _, shift, limit, cast = calls
    if fake(cast).dtype not in EIGHT_BITS:
        return None
    scale, zero, limits = number(rewriter, division.args[1]), shift.args[1], torch.iinfo(fake(cast).dtype)
    is_limited = limit.args[1:] == (limits.min, limits.max) and fake(value).dtype == torch.float32
    if division.args[0] is not value or scale is None or not isinstance(zero, float) or not is_limited:
        return None
    return _Scheme(cast, scale, zero, limits.min, limits.max)
