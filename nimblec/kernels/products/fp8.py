"""Products of e4m3, numbers of 8 bits with 4 bits of exponent and 3 of fraction (OCP 8-bit Floating Point, 2023).

Each column of weights has a factor of its own. What a product reads is multiplied by a power of two that fits the range
found in calibration: that is exact, and another factor would not make floating-point numbers more accurate. A plan
holds e4m3 as bytes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.definitions import Interpreter
from nimblec.graph.rewriter import argument, is_call
from nimblec.graph.vocabulary import PRODUCTS

FP8 = torch.float8_e4m3fn
_MOST = torch.finfo(FP8).max
_EXPONENTS = -14, 15
"""Of the powers of two that float16 holds to full precision."""
_RESULT, _READ, _WEIGHT = "largest result", "largest read", "weight before rounding"
"""What nodes have in their ``meta``."""


def calibrate(module: fx.GraphModule, args: Sequence[Tensor]) -> None:
    """Note the largest magnitude of what products read in a run on ``args``; without these, as in loops, none is known.

    That of every other value in float16 is noted too, as a norm may be folded into the product that reads it.
    """
    if not args:
        return
    with torch.no_grad():
        _Ranges(module).run(*args)
    for node in module.graph.nodes:
        if is_call(node, *PRODUCTS):
            node.meta[_READ] = largest_result(argument(node, -2))


class _Ranges(Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.dtype is torch.float16 and result.numel():
            largest = float(result.abs().max())
            n.meta[_RESULT] = largest if math.isfinite(largest) else None
        return result


def largest_read(product: fx.Node) -> float | None:
    """Return the largest magnitude that a product read in calibration; None where that is not known."""
    return product.meta.get(_READ)


def largest_result(node: fx.Node) -> float | None:
    """Return the largest magnitude of a value in calibration; None where that is not known."""
    return node.meta.get(_RESULT)


def weight_of(call: fx.Node) -> Tensor | None:
    """Return the weights (depth, columns) of a product of e4m3 before they were rounded; None of other calls."""
    return call.meta.get(_WEIGHT)


def note_product(call: fx.Node, replaced: fx.Node, weight: Tensor | None) -> None:
    """Note the range of a kernel's call, which replaces ``replaced``, and the weight that it has rounded to e4m3."""
    call.meta |= {_RESULT: largest_result(replaced), _WEIGHT: weight}


def as_fp8(x: Tensor) -> Tensor:
    """Round to e4m3, and numbers beyond its range to its ends."""
    return x.clamp(-_MOST, _MOST).to(FP8)


def to_bytes(x: Tensor, factor: Tensor) -> Tensor:
    """Round ``x * factor`` to the bytes of e4m3."""
    return as_fp8(x.float() * factor).view(torch.uint8)


def column_factors(weight: Tensor) -> Tensor:
    """Return the factor of each column of weights (depth, columns), in float32: the largest becomes the end of e4m3."""
    largest = weight.abs().amax(0).float()
    return torch.where(largest > 0, largest / _MOST, 1)


def factors_of(weight: Tensor, largest: float) -> Tensor:
    """Return the factors (1 + columns) of a product that reads numbers up to ``largest``: of these, and of its sums."""
    low, high = _EXPONENTS
    exponent = math.floor(math.log2(_MOST / largest)) if largest else 0
    factor = 2.0 ** max(low, min(high, exponent))
    columns = column_factors(weight)
    return torch.cat([columns.new_full((1,), factor), columns / factor])
