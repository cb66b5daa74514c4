"""A decoder's attention on a GPU: values, caches, and steps that follow each other without a gap."""

import pytest
import torch
from torch import Tensor

from nimblec.kernels.reductions.cached_op import cached_attention, cached_tiling

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

CASES = {  # batch, heads, key heads, length, size
    "llama": (1, 32, 8, 256, 64),
    "wide heads": (2, 8, 2, 1000, 128),
    "gpt2": (1, 12, 12, 1024, 64),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_values(name: str, dtype: torch.dtype) -> None:
    """Each step's query is the result of the step before, and all wait for each other programmatically."""
    batch, heads, key_heads, length, size = CASES[name]
    query, key, value = (_random(batch, count, 1, size).to(dtype) for count in (heads, key_heads, key_heads))
    caches = [torch.zeros(batch, key_heads, length, size, dtype=dtype, device="cuda") for _ in range(2)]
    cos, sin = (function(_random(1, size)).to(dtype) for function in (torch.cos, torch.sin))
    how = cached_tiling(length, size, size, dtype.itemsize)

    def steps(query: Tensor, *caches: Tensor) -> Tensor:
        for n in (0, 1, 2, length - 1, 7):
            position = torch.full((1,), n, device=query.device)
            seen = torch.arange(length, device=query.device) <= position[:, None]
            turns = cos.to(query.device), sin.to(query.device)
            new = (key * (n + 1)).to(query.device), (value + n).to(query.device)
            args = *caches, *new, position, seen, *turns, 0.1, how, "late"
            query = cached_attention(query, *args).transpose(1, 2)
        return query

    kept = [cache.cpu() for cache in caches]
    expected, found = steps(query.cpu(), *kept), steps(query, *caches)
    torch.cuda.synchronize()
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(
        [found.cpu(), *(c.cpu() for c in caches)], [expected, *kept], rtol=tolerance, atol=tolerance
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).cuda()
