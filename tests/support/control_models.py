"""Modules with loops and branches, each with its example inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan

Made = tuple[nn.Module, tuple[Tensor, ...]]


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=like.device)


class Counted(nn.Module):
    """A loop of a run-time count over a linear layer; the counter and the value are results."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, count: Tensor) -> Any:
        """Return the number of trips and the value after them."""

        def goes_on(step: Tensor, _value: Tensor) -> Tensor:
            return step < count

        def trip(step: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return step + 1, torch.tanh(self.linear(value)) + x

        return torch.while_loop(goes_on, trip, (_zero(x), x.clone()))


class Branch(nn.Module):
    """A branch by the sign of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return a layer's values, or twice the argument."""
        found: Tensor = torch.cond(x.sum() > 0, self.linear, lambda value: value * 2, (x,))
        return found


class Scanned(nn.Module):
    """A scan over rows."""

    def forward(self, x: Tensor) -> Any:
        """Return the last sum and the products of each."""
        first = torch.zeros(x.shape[1], device=x.device)
        return scan(lambda total, row: (total + row, torch.tanh(total * row)), first, x)


class Mapped(nn.Module):
    """A map over rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return twice the softmax of each row."""

        def twice(row: Tensor) -> Tensor:
            return torch.softmax(row, -1) * 2

        rows: Tensor = map_rows(twice, x)  # type: ignore[arg-type]
        return rows


class Nested(nn.Module):
    """A loop in a loop, and a branch in it."""

    def forward(self, x: Tensor, count: Tensor) -> Any:
        """Return the number of trips and the value after them."""

        def trip(step: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            def inner(at: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
                return at + 1, held * 1.5 + x

            _, grown = torch.while_loop(lambda at, _held: at < step, inner, (_zero(x), value.clone()))
            shrunk = torch.cond(grown.sum() > 5, lambda held: held - 1, lambda held: held + 0.5, (grown,))
            return step + 1, shrunk

        return torch.while_loop(lambda step, _value: step < count, trip, (_zero(x), x.clone()))


class Swapped(nn.Module):
    """A loop that swaps what it carries."""

    def forward(self, first: Tensor, second: Tensor, count: Tensor) -> Any:
        """Return both, swapped ``count`` times."""

        def trip(step: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return step + 1, b.clone(), a.clone()

        return torch.while_loop(lambda step, _a, _b: step < count, trip, (_zero(first), first.clone(), second.clone()))


class Late(nn.Module):
    """A loop that reads old values after it has computed the new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, count: Tensor) -> Any:
        """Return the number of trips and the three values after them."""

        def trip(step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            first = torch.tanh(self.linear(a))
            second = torch.sin(first + b) * step
            return step + 1, first, second, torch.softmax(second, -1) @ a.T @ b + c

        values = (_zero(x), x.clone(), x + 1, x - 1)
        return torch.while_loop(lambda step, _a, _b, _c: step < count, trip, values)


class Totalled(nn.Module):
    """A loop in a module that keeps the sum of its results."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 64))

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        """Return the argument times a power of two, and add it to the sum."""

        def trip(step: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return step + 1, value * 2

        found: Tensor = torch.while_loop(lambda step, _value: step < count, trip, (_zero(x), x.clone()))[1]
        self.total.add_(found)
        return found


def _rows() -> Tensor:
    return torch.randn(3, 64)


MODELS: dict[str, Callable[[], Made]] = {
    "counted": lambda: (Counted(), (_rows(), torch.tensor(5))),
    "branch": lambda: (Branch(), (_rows(),)),
    "scanned": lambda: (Scanned(), (torch.randn(7, 16),)),
    "mapped": lambda: (Mapped(), (torch.randn(7, 16),)),
    "nested": lambda: (Nested(), (_rows(), torch.tensor(4))),
    "late": lambda: (Late(), (_rows(), torch.tensor(3))),
    "totalled": lambda: (Totalled(), (_rows(), torch.tensor(3))),
    "swapped": lambda: (Swapped(), (_rows(), _rows(), torch.tensor(3))),
}


def counted() -> Made:
    """Return `Counted` with inputs, for a reference of the command line."""
    return MODELS["counted"]()
