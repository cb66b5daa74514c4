"""Operators of ONNX Runtime that may write over what they read: output and operand are the same bytes.

Its own memory planner gives an output the memory of an operand for these (`MayInplace` in onnxruntime/core/providers/
cpu), so their kernels allow it; tests compare each with a run out of place. Everywhere else a kernel may read
on while it writes. The output of a few others is the memory of what they are given (`Alias`), which they only
call by another shape.
"""

from nimblert.embedded.onnx_model import Node

_OPERANDS = {
    "Add": (0, 1),
    "Sub": (0, 1),
    "Mul": (0, 1),
    "Div": (0, 1),
    "ScatterElements": (0,),
    "ScatterND": (0,),
}
"""The operands that output 0 may lie over, where they have its dtype and shape."""

OPERATORS = frozenset(_OPERANDS)

_VIEWS = frozenset(
    {("", "Flatten"), ("", "Identity"), ("", "Reshape"), ("", "Squeeze"), ("", "Unsqueeze")}
    | {("com.microsoft", "ExpandDims")}
)


def operands(domain: str, operator: str) -> tuple[int, ...]:
    """The positions of the operands that the output of an operator may lie over, of its dtype and shape."""
    return () if domain else _OPERANDS.get(operator, ())


def may_overlap(node: Node, operand: str) -> bool:
    """Whether the output of a node may lie over an operand of its dtype and shape, by its name in the node.

    Where it is several operands at once, it may if it may over each.
    """
    positions = {position for position, name in enumerate(node.input) if name == operand}
    return positions <= set(operands(node.domain or "", node.op_type or ""))


def is_view(node: Node) -> bool:
    """Whether ONNX Runtime leaves the first operand where it is and calls it the output."""
    return (node.domain or "", node.op_type or "") in _VIEWS
