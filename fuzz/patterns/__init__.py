"""Small graphs of the kinds that optimisers rewrite, each with a detail or two changed.

A pattern is a function of a `Draft`: it adds nodes, and returns the value that the next pattern may take.
"""

from collections.abc import Callable
from random import Random

from onnx import ModelProto, NodeProto

from fuzz.patterns import arithmetic, layouts, norms, products, quantised
from fuzz.patterns.draft import Draft

_MODULES = (arithmetic, norms, products, quantised, layouts)
_DRAWN = tuple(pattern for module in _MODULES for pattern in module.PATTERNS)
"""Patterns to draw from; some are listed twice."""

PATTERNS: dict[str, Callable[[Draft], str]] = {pattern.__name__: pattern for pattern in _DRAWN}
_NEWEST_OPSET = 22
"""The newest that the lowest supported ONNX has."""


def draw_model(rng: Random, pattern: str | None = None) -> ModelProto:
    """Return a model of one to three patterns, named after them; ``pattern`` is the first.

    The types of its outputs are not set. A draw may be invalid, or raise ValueError.
    """
    draft = Draft(
        rng, rng.choice((11, 12, 12, 13, 15, 17, 17, 18, 20, 21, 21, _NEWEST_OPSET)), rng.choice((0.0, 0.05, 0.1, 0.25))
    )
    names = []
    for number in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
        made = PATTERNS[pattern] if pattern and not number else rng.choice(_DRAWN)
        first = len(draft.nodes)
        value = made(draft)
        names.append(made.__name__)
        if rng.random() < 0.08:
            _repeat(draft, first)
        if rng.random() < 0.4:
            value = _glue(draft, value)
        draft.hand_on(value)
    outputs = draft.dangling()
    inner = [name for node in draft.nodes if node.op_type != "Constant" for name in node.output if name not in outputs]
    if inner and rng.random() < 0.15:
        outputs.append(rng.choice(inner))
    model = draft.model(outputs)
    model.graph.name = "+".join(names)
    return model


def _repeat(draft: Draft, first: int) -> None:
    """Repeat the nodes from ``first`` on with the same operands."""
    copies: dict[str, str] = {}
    for node in draft.nodes[first:]:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [copies.get(name, name) for name in node.input]
        copy.output[:] = [f"{name}_again" for name in node.output]
        copies.update(zip(node.output, copy.output, strict=True))
        draft.nodes.append(copy)


def _glue(draft: Draft, x: str) -> str:
    """Return one or two operations of one operand, of the dtype and shape of ``x`` for the most part."""
    for _ in range(draft.any_of(1, 1, 2)):
        found = draft.find_type(x)
        if found is None:
            return x
        dtype, shape = found
        if dtype == "bool":
            return draft.node(draft.any_of("Not", "Identity"), x)
        form = draft.rng.randrange(7)
        if form == 0:
            x = draft.node("Identity", x)
        elif form == 1 and dtype in {"float32", "float16", "float64"}:
            x = draft.node(draft.any_of("Relu", "Sigmoid", "Tanh", "Neg"), x)
        elif form == 2 and dtype in {"float32", "float16", "float64", "int32", "int64"}:
            x = draft.swapped(draft.any_of("Add", "Mul"), x, draft.scalar(draft.any_of(1, 2, 0.5, 0), dtype))
        elif form == 3 and shape:
            x = draft.node("Transpose", x, perm=list(reversed(range(len(shape)))))
        elif form == 4:
            x = draft.node("Reshape", x, draft.fixed([-1]))
        elif form == 5 and dtype != "float64":
            x = draft.cast(x, "float32")
        elif dtype in {"float32", "int32", "int64"}:
            x = draft.node("Add", x, x)
    return x
