"""One step of a decoder, its cache of keys and values as state; seeded weights.

Root mean square norms, rotary embeddings, grouped queries, gated products (Touvron et al., 2023). A step reads 1.24
billion weights with the shape of Llama 3.2 1B (``bf16``), 1.03 with that of TinyLlama 1.1B (``tiny``). The output
matrix is the embedding with permuted rows, so that the highest logit is highest by far, as in a trained model: random
logits would be closer to each other than bfloat16 can tell.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

_THETA = 500_000.0
_SEED = 0
_SCALE = 0.02
"""The standard deviation of matrices; that of embeddings is 1."""

Example = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder; ``length`` is the number of positions in its cache."""

    layers: int = 16
    width: int = 2048
    wide: int = 8192
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128_256
    length: int = 256

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.width // self.heads


LARGE = Shape()
TINY = Shape(layers=22, wide=5632, key_heads=4, vocabulary=32_000)
SMALL = Shape(layers=2, width=64, wide=128, heads=4, key_heads=2, vocabulary=97, length=32)


class Norm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., width)."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Attention of one new token to earlier ones, whose keys and values are kept."""

    keys: Tensor
    values: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        narrow = shape.key_heads * shape.head
        self.query, self.outside = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, narrow, bias=False) for _ in range(2))
        for name in ("keys", "values"):
            kept = torch.zeros(1, shape.key_heads, shape.length, shape.head)
            self.register_buffer(name, kept, persistent=False)

    def rows(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Query (1, heads, 1, head), key and value (1, key heads, 1, head) of the token."""
        query, key, value = (
            part(x).view(1, 1, -1, self.shape.head).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return _turned(query, turns), _turned(key, turns), value

    def forward(self, x: Tensor, position: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """Map (1, 1, width) to the same; write key and value of the token at ``position``."""
        query, key, value = self.rows(x, turns)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        return self.attended(query, self.keys, self.values, seen)

    def attended(self, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """Return the attention of the query to the keys that are ``seen``, projected."""
        found = scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
        result: Tensor = self.outside(found.transpose(1, 2).reshape(1, 1, self.shape.width))
        return result


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding: rotate pairs from both halves of a head by the position's angles."""
    cos, sin = turns
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    """Attention, and a gated product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before, self.between = Norm(shape.width), Norm(shape.width)
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.width, shape.wide, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.wide, shape.width, bias=False)

    def forward(self, x: Tensor, position: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """Map (1, 1, width) to the same; write the token's keys and values."""
        return self.product(x + self.attention(self.before(x), position, turns, seen))

    def product(self, x: Tensor) -> Tensor:
        """Return the gated product after attention."""
        y = self.between(x)
        result: Tensor = x + self.down(silu(self.gate(y)) * self.up(y))
        return result


class Decoder(nn.Module):
    """Logits (1, vocabulary) of the token after ``token`` (1,) at ``position`` (1,)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.next = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(shape.length, shape.head), persistent=False)

    @torch.no_grad()
    def fill(self) -> None:
        """Give weights, angles and cache their first values."""
        seeded = torch.Generator().manual_seed(_SEED)
        for tensor in self.parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, _SCALE, generator=seeded)
            else:
                tensor.fill_(1)
        nn.init.normal_(self.tokens.weight, generator=seeded)
        self.next.weight.copy_(self.tokens.weight[torch.randperm(self.shape.vocabulary, generator=seeded)])
        for buffer in self.buffers():
            buffer.zero_()
        speeds = _THETA ** -(torch.arange(0, self.shape.head, 2) / self.shape.head)
        angles = torch.outer(torch.arange(self.shape.length), speeds).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the logits of the next token; write this token's keys and values."""
        x, turns = self.begun(token, position)
        seen = torch.arange(self.shape.length, device=position.device) <= position[:, None]
        for layer in self.layers:
            x = layer(x, position, turns, seen)
        return self.ended(x)

    def begun(self, token: Tensor, position: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the token's row (1, 1, width), and the cosines and sines (1, head) of its angles."""
        return self.tokens(token)[None], (self.cos[position], self.sin[position])

    def ended(self, x: Tensor) -> Tensor:
        """Map (1, 1, width) to logits (1, vocabulary)."""
        logits: Tensor = self.next(self.norm(x))[0]
        return logits


class GivenCache(nn.Module):
    """The same step with the cache as an input, (2 * layers, key heads, length, head), which it does not write.

    Returns the logits, and the new rows (2 * layers, key heads, 1, head), which the caller writes into it.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, token: Tensor, position: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the rows."""
        x, turns = self.decoder.begun(token, position)
        before = torch.arange(cache.shape[2], device=position.device) < position[:, None]
        seen = torch.cat((before, torch.ones_like(before[:, :1])), 1)
        rows: list[Tensor] = []
        for layer in self.decoder.layers:
            assert isinstance(layer, Layer)
            query, *new = layer.attention.rows(layer.before(x), turns)
            keys, values = (torch.cat((cache[len(rows) + i][None], row), 2) for i, row in enumerate(new))
            rows += new
            x = layer.product(x + layer.attention.attended(query, keys, values, seen))
        return self.decoder.ended(x), torch.cat(rows)


def decoder(shape: Shape, dtype: torch.dtype) -> Decoder:
    """Return the decoder, the same at each call."""
    with torch.device("meta"):
        made = Decoder(shape)
    made = made.to(dtype).to_empty(device="cpu").eval()
    made.fill()
    return made


def step(shape: Shape, dtype: torch.dtype) -> Example:
    """Return the decoder, a token and its position."""
    return decoder(shape, dtype), (torch.tensor([1]), torch.tensor([0]))


bf16, tiny = partial(step, LARGE, torch.bfloat16), partial(step, TINY, torch.bfloat16)
small = partial(step, SMALL, torch.float32)
