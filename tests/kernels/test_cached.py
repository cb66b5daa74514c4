"""Attention that writes its cache, in a graph: which writes and rotations it takes in, and that all values stay."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calling import place
from rewriting import counts
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nimblec.kernels.gpu import SM_90
from nimblec.optimize.o2 import TRITON, first
from nimblec.optimize.pipeline import Runs, Setting

HEADS, KEY_HEADS, LENGTH, SIZE = 4, 2, 16, 8


def rows_of_index_copy(cache: Tensor, position: Tensor, rows: Tensor) -> None:
    cache.index_copy_(2, position, rows)


def rows_of_index_put(cache: Tensor, position: Tensor, rows: Tensor) -> None:
    cache[:, :, position] = rows


def rows_of_scatter(cache: Tensor, position: Tensor, rows: Tensor) -> None:
    cache.scatter_(2, position[:, None, None, None].expand(rows.shape), rows)


def by_chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def by_slices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as transformers does."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1) * sin[None, None] + x * cos[None, None]


def as_it_is(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    del cos, sin
    return x


class Step(nn.Module):
    """Attention of one token to a cache, after one product of queries, keys and values."""

    keys: Tensor
    values: Tensor
    angles: Tensor

    def __init__(self, write: Callable[..., None], rotate: Callable[..., Tensor], *, returns: bool = False) -> None:
        super().__init__()
        self._write, self._rotate, self._returns = write, rotate, returns
        torch.manual_seed(0)
        self.inside = nn.Linear(32, (HEADS + 2 * KEY_HEADS) * SIZE)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, KEY_HEADS, LENGTH, SIZE))
        self.register_buffer("angles", torch.randn(LENGTH, SIZE))

    def forward(self, x: Tensor, position: Tensor) -> Any:
        """Map (1, 1, 32) to (1, 1, 32); also return the keys if asked for."""
        widths = [count * SIZE for count in (HEADS, KEY_HEADS, KEY_HEADS)]
        parts = self.inside(x).split(widths, -1)
        query, key, value = (part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts)
        turns = self.angles[position].cos(), self.angles[position].sin()
        query, key = self._rotate(query, *turns), self._rotate(key, *turns)
        self._write(self.keys, position, key)
        self._write(self.values, position, value)
        seen = torch.arange(LENGTH) <= position[:, None]
        found = scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen, enable_gqa=True)
        result = found.transpose(1, 2).flatten(2)
        return (result, self.keys.sum()) if self._returns else result


def drawn(position: int) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(position)), torch.tensor([position])


def check(
    model: nn.Module, draw: Callable[[int], tuple[Tensor, Tensor]] = drawn, tolerance: float = 1e-5
) -> Counter[str]:
    """Compare the rewritten model with eager for some positions, its outputs and its caches; return the calls left."""
    eager = copy.deepcopy(model)
    with torch.no_grad():
        setting = Setting(device="cpu", use=first(SM_90))
        made = Runs(place(model, draw(0)), setting)(*TRITON)
        for position in (0, 3, LENGTH - 1):
            for (_, tensor), value in zip(made.inputs, draw(position), strict=True):
                tensor.copy_(value)
            found, wanted = made.run(lambda _source: None), eager(*draw(position))
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
            kept = (dict(each.named_buffers()) for each in (model, eager))
            torch.testing.assert_close(*kept, rtol=tolerance, atol=tolerance)
    return counts(made.module)


@pytest.mark.parametrize("rotate", [by_chunks, by_slices, as_it_is])
@pytest.mark.parametrize("write", [rows_of_index_copy, rows_of_index_put, rows_of_scatter])
def test_attention_writes_the_cache(write: Callable[..., None], rotate: Callable[..., Tensor]) -> None:
    calls = check(Step(write, rotate).eval())
    assert calls["cached_attention"] == 1
    assert not {"attention", "index_copy_", "index_put_", "scatter_", "copy_", "cat"} & calls.keys()


def test_caches_with_other_readers_are_written_by_calls_of_their_own() -> None:
    calls = check(Step(rows_of_index_copy, by_chunks, returns=True).eval())
    assert (calls["attention"], calls["index_copy_"]) == (1, 2)


def test_a_decoder_of_transformers_writes_its_cache() -> None:
    transformers = pytest.importorskip("transformers")
    from nimblec.pytorch.transformers_cache import Cached

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 40, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)
    model = Cached(transformers.LlamaForCausalLM(config).eval().half(), 1, LENGTH)

    def draw(position: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([[position + 3]]), torch.tensor([[position]])

    calls = check(model, draw, 5e-3)
    assert calls["cached_attention"] == 2
    assert not {"attention", "scatter_", "copy_", "cat", "clone"} & calls.keys()
