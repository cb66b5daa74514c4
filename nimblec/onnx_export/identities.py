"""Sums and products that torch.onnx.export drops because they change nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from onnxscript.rewriter._pattern_ir import Constant
from onnxscript.rewriter.rules.common import _no_op


@contextmanager
def exact_identities() -> Iterator[None]:
    """Make onnxscript's optimiser drop x + c only where c is exactly zero, and x * c only where it is exactly one.

    Within its tolerances 1e-8 counts as zero: the eps of a divisor was dropped, and 0 / 0 gave NaN.
    """
    found = (value for rule in _no_op.rules for node in rule._target_pattern for value in node.inputs)
    constants = [value for value in found if isinstance(value, Constant)]
    before = [(value._rel_tol, value._abs_tol) for value in constants]
    for value in constants:
        value._rel_tol = value._abs_tol = 0.0
    try:
        yield
    finally:
        for value, (relative, absolute) in zip(constants, before, strict=True):
            value._rel_tol, value._abs_tol = relative, absolute
