"""Functions as modules, a module that decides by value, and modules with the arguments of one call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nimblec.pytorch.model import TorchModel, bind, place_call


class Calling(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        """Return what the function returns."""
        return self.function(x)


class Looking(nn.Module):
    """Decides by value: no graph of pure calls."""

    def forward(self, x: Tensor) -> Tensor:
        """Map any shape to the same."""
        return x + 1 if x.sum() > 0 else x - 1


def place(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> TorchModel:
    """Return a module and the arguments of one call, on the CPU."""
    return place_call(bind(module, args, kwargs), device="cpu")
