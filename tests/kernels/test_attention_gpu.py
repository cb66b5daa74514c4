"""Triton attention on a GPU: values of the best candidates, and twenty runs that give the same bits."""

import pytest
import torch
from torch import Tensor

from nimblec.kernels.gpu import GPU
from nimblec.kernels.reductions.attention_op import attended, attention
from nimblec.kernels.reductions.attention_shapes import attention_shape
from nimblec.kernels.reductions.attention_tilings import AttentionTiling, attention_candidates

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

CASES = {  # batch, heads, queries, keys, size, causal, mask
    "bert": (1, 12, 128, 128, 64, False, None),
    "gpt2": (2, 12, 64, 64, 64, True, None),
    "vit": (1, 12, 197, 197, 64, False, None),
    "t5": (1, 12, 128, 128, 64, False, (1, 12, 128, 128)),
    "padded": (3, 4, 77, 77, 80, False, (3, 1, 1, 77)),
    "cross": (1, 8, 300, 77, 40, False, None),
    "mobilevit": (4, 4, 256, 256, 36, False, None),
    "decoder": (2, 8, 1, 200, 128, False, None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_values(name: str, dtype: torch.dtype) -> None:
    batch, heads, queries, keys, size, causal, masked = CASES[name]
    query = _random(batch, queries, heads, size).to(dtype).transpose(1, 2)
    joined = _random(batch, keys, 2, heads, size).to(dtype)
    key, value = joined.permute(2, 0, 3, 1, 4)
    mask = None if masked is None else _random(*masked).to(dtype)
    expected = attended(query, key, value, mask, causal=causal, scale=0.1).transpose(1, 2)
    shape = attention_shape(query, key, value, mask, causal=causal)
    for tiling in attention_candidates(shape, GPU.current(), limit=2, itemsize=dtype.itemsize):
        _check([attention(query, key, value, mask, causal, 0.1, tiling.numbers, "late") for _ in range(20)], expected)


def test_bits_as_a_mask() -> None:
    query, key, value = (_random(2, 4, 50, 64).half() for _ in range(3))
    mask = _random(2, 1, 50, 50) > 0
    expected = attended(query, key, value, mask, causal=False, scale=0.1).transpose(1, 2)
    tiling = AttentionTiling(block_m=16, block_n=32)
    _check([attention(query, key, value, mask, False, 0.1, tiling.numbers, "late") for _ in range(20)], expected)


def test_waits_for_the_launch_before() -> None:
    """A chain, each call on the result of the one before, all programmatic, against one call after the other."""
    first, tiling = _random(1, 128, 12, 64).half(), AttentionTiling(block_m=16, block_n=128)

    def chain(trigger: str) -> Tensor:
        x = first
        for _ in range(30):
            heads = x.transpose(1, 2)
            x = attention(heads, heads, heads, None, False, 2.0, tiling.numbers, trigger)
        torch.cuda.synchronize()
        return x

    expected = chain("none")
    assert all(torch.equal(chain("late"), expected) for _ in range(40))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def _check(results: list[Tensor], expected: Tensor) -> None:
    dtype = results[0].dtype
    eps = torch.finfo(dtype).eps * (8 if dtype is torch.float32 else 1)  # what is expected is rounded, too
    torch.testing.assert_close(results[0].float(), expected, atol=4 * eps, rtol=2 * eps)
    assert all(torch.equal(result, results[0]) for result in results)
