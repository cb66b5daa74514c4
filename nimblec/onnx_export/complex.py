"""Views of complex numbers that torch.onnx.export refuses: a last axis has their real and imaginary parts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core
from torch.onnx._internal.exporter._registration import ONNXRegistry

from nimblec.onnx_export.constants import ints

aten = torch.ops.aten


def unsqueeze(self: Any, dim: int) -> Any:
    """Translate aten.unsqueeze."""
    return op.Unsqueeze(self, ints([_axis(dim)]))


def select(self: Any, dim: int, index: int) -> Any:
    """Translate aten.select.int."""
    axis = _axis(dim)
    return op.Squeeze(op.Gather(self, ints([index]), axis=axis), ints([axis]))


def expand(self: Any, size: Sequence[Any], implicit: bool = False) -> Any:
    """Translate aten.expand."""
    return core.aten_expand(self, [*size, 1], implicit)


def _axis(dim: int) -> int:
    """Return an axis counted with that of the parts."""
    return dim if dim >= 0 else dim - 1


VIEWS: dict[Any, Callable[..., Any]] = {
    aten.unsqueeze.default: unsqueeze,
    aten.select.int: select,
    aten.expand.default: expand,
}


@contextmanager
def complex_views() -> Iterator[None]:
    """Have torch.onnx translate `VIEWS` of complex numbers; a table of translations is for real ones alone."""
    before = vars(ONNXRegistry)["from_torchlib"]
    make = ONNXRegistry.from_torchlib

    def from_torchlib(*args: Any, **options: Any) -> ONNXRegistry:
        registry = make(*args, **options)
        for target, function in VIEWS.items():
            registry.register_op(target, function, is_complex=True)
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = before  # type: ignore[method-assign]
