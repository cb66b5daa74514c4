"""Models of several entries, as "package.module:callable" names them."""

from typing import Any

import torch


class Head(torch.nn.Module):
    """A large product, then a small one, over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = torch.nn.Linear(16, 64)
        self.narrow = torch.nn.Linear(64, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map (n, 16) rows to logits (n, 4)."""
        return self.narrow(torch.relu(self.wide(rows)))


class Probabilities(torch.nn.Module):
    """The probabilities from a `Head`, which it shares."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, row: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Map a (1, 16) row to (1, 4)."""
        return torch.softmax(self.head(row) / temperature, -1)


class Counter(torch.nn.Module):
    """Adds its input to a sum that outlives the call."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add these 4 values to the sum, and return it."""
        self.total += values
        return self.total * 1


class Total(torch.nn.Module):
    """Reads the sum of a `Counter`."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the sum, scaled."""
        return self.counter.total * scale


def head() -> dict[str, Any]:
    """Return entries for rows, and for one row with its probabilities."""
    shared = Head().eval()
    rows = torch.linspace(-1, 1, 48).reshape(3, 16)
    return {
        "rows": (shared, (rows,)),
        "probabilities": (Probabilities(shared).eval(), rows[:1], {"temperature": torch.tensor(2.0)}),
    }


def counting() -> dict[str, Any]:
    """Return entries that share state: one writes it, another reads it."""
    counter = Counter().eval()
    return {"add": (counter, torch.ones(4)), "total": (Total(counter).eval(), torch.tensor(1.0))}


def none() -> dict[str, Any]:
    """Return no entries."""
    return {}


def unnamed() -> dict[Any, Any]:
    """Return an entry whose name is no string."""
    return {1: (Head(), torch.zeros(1, 16))}


def without_inputs() -> dict[str, Any]:
    """Return an entry that is a module alone."""
    return {"rows": Head()}
