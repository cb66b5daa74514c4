"""Functions as modules."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Calling(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        """Return what the function returns."""
        return self.function(x)
