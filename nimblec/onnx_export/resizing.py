"""Resizing with antialiasing, of which torch.onnx leaves out scales and computes aligned corners otherwise."""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import nn

from nimblec.onnx_export.constants import like


def _resized(kernel: Any, plainly: Callable[..., Any]) -> Callable[..., Any]:
    """Return a translation by ``plainly``, or by products with the weights of ``kernel`` where ``plainly`` differs."""

    def translated(
        self: Any, output_size: Any, align_corners: bool, scales_h: float | None = None, scales_w: float | None = None
    ) -> Any:
        axes = [*zip(self.shape[2:], output_size, (scales_h, scales_w), strict=True)]
        is_static = all(isinstance(number, int) for size, made, _ in axes for number in (size, made))
        if not is_static or not (align_corners or any(scale and size * scale != made for size, made, scale in axes)):
            return plainly(self, output_size, align_corners, scales_h, scales_w)
        rows, columns = (
            kernel(torch.eye(size, dtype=torch.float64)[None, None], [made, size], align_corners, scale, None)[0, 0]
            for size, made, scale in axes
        )
        return op.MatMul(op.MatMul(like(rows, self), self), like(columns.T, self))

    return translated


RESIZING: dict[Any, Any] = {
    torch.ops.aten._upsample_bilinear2d_aa.default: _resized(
        torch.ops.aten._upsample_bilinear2d_aa.default, nn.aten__upsample_bilinear2d_aa
    ),
    torch.ops.aten._upsample_bicubic2d_aa.default: _resized(
        torch.ops.aten._upsample_bicubic2d_aa.default, nn.aten__upsample_bicubic2d_aa
    ),
}
"""Translations for torch.onnx.export of any model."""
