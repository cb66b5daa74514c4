"""The surroundings of every torch.onnx.export: its errors as ours, its faults mended, less work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nimblec.onnx_export.angles import exact_angles
from nimblec.onnx_export.complex import complex_views
from nimblec.onnx_export.history import short_histories
from nimblec.onnx_export.identities import exact_identities
from nimblec.onnx_export.numbers import exact_numbers
from nimblec.onnx_export.promotion import even_types
from nimblec.onnx_export.rules import rules_by_operator
from nimblec.pytorch.export_errors import exporting


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
