"""Torch's float32 precision for the duration of a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nimblec.base.options import Precision
from nimblec.pytorch.model import set_arithmetic


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Apply `set_arithmetic` in the block; restore the previous precision."""
    libraries: tuple[Any, ...] = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [library.allow_tf32 for library in libraries]
    set_arithmetic(precision)
    try:
        yield
    finally:
        for library, allowed in zip(libraries, before, strict=True):
            library.allow_tf32 = allowed
