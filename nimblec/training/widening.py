"""Running code for float32 in float64: what it casts to other floats, or holds in them, is in float64, too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

T = TypeVar("T")

_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})


@contextmanager
def in_float64() -> Iterator[None]:
    """Have what the block makes without a dtype, as a first hidden state, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widened(code: Callable[..., T]) -> Callable[..., T]:
    """Return ``code`` with the floats that it reads, and casts to, in float64; what it writes into keeps its dtype."""

    @wraps(code)
    def run(*args: Any, **kwargs: Any) -> T:
        with _Widening():
            return code(*args, **kwargs)

    return run


class _Widening(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        count = _writes(func)
        written, read = args[:count], pytree.tree_map(wide, args[count:])
        named = pytree.tree_map(wide, {name: value for name, value in (kwargs or {}).items() if name != "out"})
        if kwargs and "out" in kwargs:
            named["out"] = kwargs["out"]
        return (Tensor.double if func in _CASTS else func)(*written, *read, **named)


def wide(value: Any) -> Any:
    """Return a tensor of floats in float64, float64 for the dtype of floats; anything else as it is."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _writes(func: Any) -> int:
    """Return how many first arguments a function writes into, by its name: add_, __iadd__, __setitem__ into one."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return int(name.startswith(("__i", "__set")))
    return int(name.endswith("_"))
