"""Small networks with one dynamic dimension for bench.sizes_peer, in float32."""

import torch
from torch import Tensor, nn

from bench.models.sized import Sized, of_tokens


def rows() -> Sized:
    """Build a convolutional network of images, for any batch up to 16."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return Sized(module=module.eval(), args=(torch.randn(2, 3, 16, 16),), axis=0, largest=16, bounds={})


class _Tokens(nn.Module):
    """The features of each token plus their mean under the mask, and that mean."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.inner = nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.inner(self.embedding(input_ids)))
        weights = attention_mask.to(x.dtype)[..., None]
        mean = (x * weights).sum(1) / weights.sum(1)
        return x + mean[:, None], mean


def tokens() -> Sized:
    """Build an encoder of masked tokens, for any length up to 32."""
    return of_tokens(_Tokens(100, 16).eval(), 100, 32)
