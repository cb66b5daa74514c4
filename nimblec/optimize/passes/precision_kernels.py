"""Which calls the device has a kernel for in half precision: found by making them."""

from typing import Any

import torch
from torch import fx

from nimblec.graph.definitions import DEFINITIONS
from nimblec.optimize.passes.precision_nodes import dtypes_of


class Kernels:
    """Support for one half precision, ``dtype``; each call is tried once for its dtypes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._half = dtype
        self._served: dict[tuple[Any, ...], bool] = {}

    def serve(self, node: fx.Node) -> bool:
        """Whether the device computes a call in the dtypes of its arguments, tried on zeros."""
        key = node.target, tuple(dtypes_of(n.meta["val"]) for n in node.all_input_nodes)
        if all(self._half not in dtypes for dtypes in key[1]):
            return True
        if key not in self._served:
            self._served[key] = _can_be_called(node)
        return self._served[key]


def _can_be_called(node: fx.Node) -> bool:
    function: Any = DEFINITIONS.get(node.target, node.target)
    args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda n: _zeros(n.meta["val"]))
    try:
        with torch.no_grad():
            function(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # mostly "not implemented for 'Half'"
        return False
    return True


def _zeros(value: Any) -> Any:
    """A real tensor of zeros like a fake one."""
    if isinstance(value, (list, tuple)):
        return [_zeros(part) for part in value]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()
