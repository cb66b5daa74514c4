"""Operators of ONNX Runtime that work in place: the output may have the bytes of an operand.

ONNX Runtime's memory planner does so for these (`MayInplace` in onnxruntime/core/providers/cpu), so their kernels allow
it; tests compare each with a run out of place. Other kernels may still read their operands while they write. A few
operators are views (`Alias`): their output is the operand's memory with another shape.
"""

from nimblert.check.onnx_model import Node

_OPERANDS = {
    "Add": (0, 1),
    "Sub": (0, 1),
    "Mul": (0, 1),
    "Div": (0, 1),
    "ScatterElements": (0,),
    "ScatterND": (0,),
}
"""The operands that output 0 may overwrite, if they have its dtype and shape."""

OPERATORS = frozenset(_OPERANDS)

_VIEWS = frozenset(
    {("", "Flatten"), ("", "Identity"), ("", "Reshape"), ("", "Squeeze"), ("", "Unsqueeze")}
    | {("com.microsoft", "ExpandDims")}
)


def operands(domain: str, operator: str) -> tuple[int, ...]:
    """The positions of the operands that an operator's output may overwrite, if they have its dtype and shape."""
    return () if domain else _OPERANDS.get(operator, ())


def may_overlap(node: Node, operand: str) -> bool:
    """Whether the output of a node may overwrite an operand of its dtype and shape, given by its name in the node.

    A name that stands for several operands must be allowed for each. No such operator has more than three.
    """
    if len(node.input) > 3:
        return False
    positions = {position for position, name in enumerate(node.input) if name == operand}
    return positions <= set(operands(node.domain or "", node.op_type or ""))


def is_view(node: Node) -> bool:
    """Return whether ONNX Runtime uses the memory of the first operand as the output."""
    return (node.domain or "", node.op_type or "") in _VIEWS
