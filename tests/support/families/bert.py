"""BERT (Devlin et al. 2019): token and position embeddings, post-norm transformer encoder blocks."""

import torch
from torch import nn


class Encoder(nn.Module):
    """Self-attention and a feed-forward network, each with a shortcut and a layer norm after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Map (N, tokens, width) to the same; ``bias`` (N, 1, 1, tokens) is added to the attention scores."""
        batch, tokens, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5 + bias
        mixed = (torch.softmax(scores, -1) @ value).transpose(1, 2).reshape(batch, tokens, width)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.feed_forward(x))


class Bert(nn.Module):
    """Token ids and attention mask, both (N, tokens) int64, to states (N, tokens, width) and a pooled one."""

    def __init__(self, vocabulary: int = 30522, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Encoder(width, heads) for _ in range(layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last hidden states and the pooled first one."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.positions(positions))
        bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        return x, torch.tanh(self.pooler(x[:, 0]))


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Build two narrow layers and 16 tokens, the last three of them masked."""
    mask = torch.ones(1, 16, dtype=torch.int64)
    mask[:, -3:] = 0
    return Bert(vocabulary=100, width=64, heads=4, layers=2).eval(), (torch.randint(100, (1, 16)), mask)
