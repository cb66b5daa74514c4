"""An activation that is written out as products and sums becomes one call."""

import math

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, fake, is_call, only_user
from nimblec.graph.scalars import number, scaled, shifted
from nimblec.graph.vocabulary import is_like

aten = torch.ops.aten


def recognize_activations(module: fx.GraphModule) -> None:
    """Replace ``0.5 x (1 + erf(x / sqrt 2))``, and the same by tanh, by ``gelu``, and ``x sigmoid(c x)`` by ``silu``.

    The order of factors does not matter. With a ``c``, as in CLIP, products before and after may take it in:
    ``silu(c x) / c``.
    """
    rewriter = Rewriter(module)
    for node in reversed(rewriter.calls(aten.mul.Tensor)):
        activated = _activated(rewriter, node) if fake(node).dtype.is_floating_point else None
        if activated is not None:
            rewriter.replace(node, activated)
    rewriter.finish()


def _activated(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """Return the same value as an activation; None where ``node`` is none."""
    factor, parts = _factors(rewriter, node)
    for x, gate in (parts, parts[::-1]) if len(parts) == 2 else ():
        if not is_like(x, node):
            continue
        if (approximate := _gelu(rewriter, factor, x, gate)) is not None:
            return rewriter.call(aten.gelu.default, x, approximate=approximate, at=node)
        if (read := _silu(rewriter, x, gate)) is not None:
            scaled_x, scale = read
            result = rewriter.call(aten.silu.default, scaled_x, at=node)
            return result if factor == scale else rewriter.call(aten.mul.Tensor, result, factor / scale, at=node)
    return None


def _silu(rewriter: Rewriter, x: fx.Node, gate: fx.Node) -> tuple[fx.Node, float] | None:
    """Return ``c x`` and ``c`` where ``gate`` is ``sigmoid(c x)``."""
    if not is_call(gate, aten.sigmoid.default) or only_user(gate) is None:
        return None
    read = argument(gate, 0)
    if read is x:
        return x, 1.0
    found = scaled(rewriter, read)
    return (read, found[1]) if found is not None and found[0] is x and found[1] > 0 else None


def _gelu(rewriter: Rewriter, factor: float, x: fx.Node, gate: fx.Node) -> str | None:
    """Return how a GELU is approximated that is ``factor * x * gate``; None where that is none."""
    opened = shifted(rewriter, gate)
    if opened is None or only_user(gate) is None:
        return None
    curve, one = opened
    if not (_near(factor, 0.5, x) and _near(one, 1.0, x)):
        return None
    if is_call(curve, aten.erf.default) and _is_multiple(rewriter, argument(curve, 0), x, math.sqrt(0.5)):
        return "none"
    if is_call(curve, aten.tanh.default) and _is_cubic(rewriter, argument(curve, 0), x):
        return "tanh"
    return None


def _factors(rewriter: Rewriter, node: fx.Node) -> tuple[float, list[fx.Node]]:
    """Return the number and the tensors that ``node`` is the product of."""
    plain = scaled(rewriter, node)
    if plain is not None:
        x, factor = plain
        inner, parts = _inner_factors(rewriter, x)
        return factor * inner, parts
    left, right = (_inner_factors(rewriter, argument(node, n)) for n in range(2))
    return left[0] * right[0], left[1] + right[1]


def _inner_factors(rewriter: Rewriter, node: fx.Node) -> tuple[float, list[fx.Node]]:
    if only_user(node) is not None and (scaled(rewriter, node) or is_call(node, aten.mul.Tensor)):
        return _factors(rewriter, node)
    return 1.0, [node]


def _is_cubic(rewriter: Rewriter, node: fx.Node, x: fx.Node) -> bool:
    """Return whether ``node`` is ``sqrt(2 / pi) (x + 0.044715 x ** 3)``."""
    outer = scaled(rewriter, node)
    if outer is None or not _near(outer[1], math.sqrt(2 / math.pi), x) or not is_call(outer[0], aten.add.Tensor):
        return False
    terms = list(outer[0].args[:2])
    if x not in terms or outer[0].kwargs.get("alpha", 1) != 1:
        return False
    terms.remove(x)
    cube = scaled(rewriter, terms[0])
    return cube is not None and _near(cube[1], 0.044715, x) and _is_cube(rewriter, cube[0], x)


def _is_cube(rewriter: Rewriter, node: fx.Node, x: fx.Node) -> bool:
    if is_call(node, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor):
        return argument(node, 0) is x and number(rewriter, argument(node, 1)) == 3
    return is_call(node, aten.mul.Tensor) and _factors(rewriter, node) == (1.0, [x, x, x])


def _is_multiple(rewriter: Rewriter, node: fx.Node, x: fx.Node, factor: float) -> bool:
    found = scaled(rewriter, node)
    return found is not None and found[0] is x and _near(found[1], factor, x)


def _near(value: float, wanted: float, like: fx.Node) -> bool:
    """Return whether two numbers are equal within the precision of the dtype of ``like``."""
    return abs(value - wanted) <= torch.finfo(fake(like).dtype).eps * wanted
