"""Modules whose runs write their buffers."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu


class Statistics(torch.nn.Module):
    """Counts calls, keeps a running mean, a history whose newest row is the first, and the last input."""

    count: torch.Tensor
    mean: torch.Tensor
    history: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.register_buffer("history", torch.zeros(3, 4))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the change of these 4 values since the last call, and one number from all that is kept."""
        self.count += 1
        self.mean.mul_(0.9).add_(x, alpha=0.1)
        self.history[1:] = self.history[:-1].clone()
        self.history[0] = x
        change = x - self.last
        self.last.copy_(x)
        return change, self.mean.sum() * self.count + self.history.sum()


class Exchange(torch.nn.Module):
    """Two tensors that are swapped, and one whose old value is returned."""

    left: torch.Tensor
    right: torch.Tensor
    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(("left", "right", "kept")):
            self.register_buffer(name, torch.full((4,), float(number)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the 4 values of the call before, and those of this one plus the new right tensor."""
        before, left = self.kept.clone(), self.left.clone()
        self.kept.copy_(x)
        self.left.copy_(self.right)
        self.right.copy_(left)
        return before, x + self.right


class Normalised(torch.nn.Module):
    """Batch norm in training mode."""

    def __init__(self, *, affine: bool) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3, affine=affine)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """Map (n, 3, m) to (n, 3, m)."""
        return (self.norm(x),)


class Assigning(torch.nn.Module):
    """Assigns a new tensor to its buffer in each call."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """Return half of the kept values plus these 4."""
        self.kept = self.kept / 2 + x
        return (self.kept * 1,)


class Returning(torch.nn.Module):
    """Returns its state itself, one tensor of it twice."""

    total: torch.Tensor
    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(4))
        self.register_buffer("rows", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sum including these 4 values, twice, and the rows, of which the second is the values."""
        self.total.add_(x)
        self.rows[1] = x
        return self.total, self.total, self.rows


class _Attention(torch.nn.Module):
    """Attention of one new token to those before it, whose keys and values are kept."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.inside = torch.nn.Linear(width, 3 * width, bias=False)
        self.outside = torch.nn.Linear(width, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, width // heads), persistent=False)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Map (1, n, width) rows at ``position``, (n,), to (1, n, width)."""
        _, rows, width = x.shape
        q, k, v = (
            part.view(1, rows, self.heads, width // self.heads).transpose(1, 2)
            for part in self.inside(x).chunk(3, dim=-1)
        )
        self.keys.index_copy_(2, position, k)
        self.values[:, :, position] = v
        seen = torch.arange(self.keys.shape[2], device=position.device) <= position[:, None]
        attended = scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        projected: torch.Tensor = self.outside(attended.transpose(1, 2).reshape(1, rows, width))
        return projected


class Decoder(torch.nn.Module):
    """A small language model with a key-value cache: logits of the tokens that it is given."""

    def __init__(self, vocabulary: int = 50, width: int = 32, heads: int = 4, length: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Embedding(length, width)
        self.attention = torch.nn.ModuleList(_Attention(width, heads, length) for _ in range(2))
        self.wide = torch.nn.ModuleList(torch.nn.Linear(width, 2 * width) for _ in range(2))
        self.narrow = torch.nn.ModuleList(torch.nn.Linear(2 * width, width) for _ in range(2))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(4))
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Map (n,) tokens at (n,) positions to (n, vocabulary)."""
        x = (self.tokens(token) + self.positions(position))[None]
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x), position)
            x = x + self.narrow[i](silu(self.wide[i](self.norms[2 * i + 1](x))))
        logits: torch.Tensor = self.head(x)[0]
        return logits


def decoder() -> dict[str, Any]:
    """Build a decoder that takes a prompt of 8 tokens, or one token."""
    model = Decoder().eval()
    return {
        "prefill": (model, (torch.arange(8), torch.arange(8))),
        "decode": (model, (torch.tensor([1]), torch.tensor([0]))),
    }


def one_token() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Build a decoder that takes one token."""
    return Decoder().eval(), (torch.tensor([1]), torch.tensor([0]))


def statistics() -> tuple[torch.nn.Module, torch.Tensor]:
    """Build a model that keeps statistics, and 4 numbers."""
    return Statistics().eval(), torch.ones(4)


def normalising() -> tuple[torch.nn.Module, torch.Tensor]:
    """Build a norm by the statistics of two images, of which it keeps a running mean."""
    torch.manual_seed(0)
    return torch.nn.BatchNorm2d(4), torch.randn(2, 4, 8, 8)


CACHES = [f"attention.{i}.{name}" for i in range(2) for name in ("keys", "values")]
"""The state of a `Decoder`."""
