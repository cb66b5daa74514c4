"""PyTorch modules with dynamic sizes, and the dynamic shapes for torch.export."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

TOKENS = 64


class Layer(nn.Module):
    """Attention and a feed-forward network, each added to its input and normalised."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Map (batch, length, width) to the same; ``bias`` is added to the attention scores."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias, -1)
        x = self.norm(x + self.out((weights @ v).transpose(1, 2).flatten(2)))
        result: Tensor = self.last_norm(x + self.outer(nn.functional.gelu(self.inner(x))))
        return result


class Encoder(nn.Module):
    """A transformer's encoder of tokens under a mask (both batch x length): each token's features, and a verdict."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(torch.randn(128, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.verdict = nn.Linear(width, 3)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both."""
        x = self.embedding(tokens) + self.places[: tokens.shape[1]]
        bias = (1.0 - attention_mask.to(x.dtype))[:, None, None, :] * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias)
        return x, self.verdict(x[:, 0])


def encoder() -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """Build an encoder, arguments of a call, and dynamic shapes."""
    torch.manual_seed(0)
    shapes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=128)}
    tokens = torch.arange(TOKENS).reshape(2, -1)
    return Encoder().eval(), (tokens, torch.ones_like(tokens)), {"tokens": shapes, "attention_mask": shapes}


def images() -> tuple[nn.Module, tuple[Tensor], Any]:
    """Build a convolutional network with batch norms in inference mode."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(8), nn.BatchNorm2d(16)]
    for norm in norms:
        for name, statistics in norm.named_buffers():
            if name != "num_batches_tracked":
                statistics.uniform_(1, 2)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norms[0], nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), norms[1], nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    ).eval()  # fmt: skip
    return module, (torch.randn(2, 3, 16, 16),), ({0: Dim("batch", min=1, max=64)},)


class Averaging(nn.Module):
    """A linear layer minus the running mean of its rows."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and update the mean."""
        self.count += 1
        y: Tensor = self.linear(x)
        self.mean.mul_(0.5).add_(y.mean(0), alpha=0.5)
        return y - self.mean


class Previous(nn.Module):
    """The sum of its input and that of the call before, which has as many rows."""

    previous: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("previous", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and keep the rows."""
        y: Tensor = x + self.previous
        self.previous.copy_(x)
        return y
