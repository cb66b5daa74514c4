"""Rewrite rules of onnxscript that are tried at fewer nodes make the same model."""

from typing import Any

import onnx
import onnx_ir
import onnxscript
import pytest
import torch
from onnxscript.rewriter import RewriteRule
from torch import Tensor, nn

from nimblec.onnx_export.exporting import rules_by_operator


class Rewritten(nn.Module):
    """Calls that rules drop, join and split, in a branch, too."""

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the results of several rules."""
        turned = x.transpose(0, 1).transpose(0, 1) + 0.0
        parts = [turned[:, :3], turned[:, 3:]]
        chosen = torch.cond(y.sum() > 0, lambda a: (a * 1.0).exp()[None, None], lambda a: a.exp()[None, None], (x,))
        return [*parts, chosen, (x @ y).clamp(0, 2).clamp(1, 3), x.reshape(4, 6).reshape(2, 12).relu().relu()]


def optimized(given: bytes) -> tuple[bytes, list[str]]:
    """Return the optimised model, and the calls that rules replaced."""
    model, applied, before = onnx_ir.from_proto(onnx.load_model_from_string(given)), [], RewriteRule.try_rewrite

    def try_rewrite(rule: RewriteRule, *args: Any, **options: Any) -> Any:
        found = before(rule, *args, **options)
        if found is not None:
            applied.append(args[-1].op_type)
        return found

    RewriteRule.try_rewrite = try_rewrite
    try:
        onnxscript.optimizer.optimize_ir(model)
    finally:
        RewriteRule.try_rewrite = before
    return onnx_ir.to_proto(model).SerializeToString(deterministic=True), applied


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch 2.11, in its own code
def test_rules_that_are_skipped_would_not_apply() -> None:
    given = torch.ones(4, 6), torch.ones(6, 6)
    program = torch.onnx.export(Rewritten().eval(), given, dynamo=True, verbose=False, optimize=False)
    assert program is not None
    before = program.model_proto.SerializeToString()
    wanted, applied = optimized(before)
    assert {*applied} == {"Transpose", "Add", "Mul", "Unsqueeze", "Min", "Clip", "Relu"}
    with rules_by_operator():
        assert optimized(before) == (wanted, applied)
