"""The surroundings of every torch.onnx.export: its errors as ours, its faults mended, less work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nimblec.frontend.pytorch.export_errors import exporting
from nimblec.frontend.pytorch.onnx_angles import exact_angles
from nimblec.frontend.pytorch.onnx_complex import complex_views
from nimblec.frontend.pytorch.onnx_history import short_histories
from nimblec.frontend.pytorch.onnx_identities import exact_identities
from nimblec.frontend.pytorch.onnx_numbers import exact_numbers
from nimblec.frontend.pytorch.onnx_promotion import even_types
from nimblec.frontend.pytorch.onnx_rules import rules_by_operator


@contextmanager
def exporting_onnx(name: str) -> Iterator[None]:
    """Run torch.onnx.export for the model ``name``. Raises TraceError for what it raises."""
    with (
        exporting(name, "torch.onnx.export"),
        torch.no_grad(),  # with gradients torch 2.11 refuses a parameter times a number
        exact_identities(),
        exact_angles(),
        exact_numbers(),
        even_types(),
        complex_views(),
        rules_by_operator(),
        short_histories(),
    ):
        yield
