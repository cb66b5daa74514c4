"""Triton norms on a GPU: values of the best candidates, and twenty runs that give the same bits."""

import pytest
import torch
from torch import Tensor

from nimblec.kernels.gpu import GPU
from nimblec.kernels.reductions.norm_op import add_layer_norm, layer_norm, norm_shape, normalized
from nimblec.kernels.reductions.norm_tilings import norm_candidates

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 128, 768), (197, 768), (3, 1000), (500, 512), (1, 64, 8192)], ids=str)
def test_values(shape: tuple[int, ...], dtype: torch.dtype, rms: bool) -> None:
    x, residual = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], device="cuda").to(dtype) for _ in range(2))
    expected = normalized(x, weight, bias, 1e-5, rms, torch.float32)
    expected_of_sum = normalized(x + residual, weight, None, 1e-5, rms, torch.float32)
    for tiling in norm_candidates(norm_shape(x, rms=rms), GPU.current(), limit=2):
        how = (1e-5, rms, dtype, tiling.numbers, "late")
        _check([layer_norm(x, weight, bias, *how) for _ in range(20)], expected)
        results, totals = zip(*(add_layer_norm(x, residual, weight, None, *how) for _ in range(20)), strict=True)
        _check(list(results), expected_of_sum)
        assert all(torch.equal(total, x + residual) for total in totals)


def test_waits_for_the_launch_before() -> None:
    """A chain of sums and norms, all programmatic, against one launch after the other."""
    first = torch.randn(128, 768, device="cuda").half()
    weight = torch.randn(768, device="cuda").half()

    def chain(trigger: str) -> Tensor:
        x, other = first, first
        for _ in range(60):
            x, other = add_layer_norm(x, other, weight, None, 1e-5, False, torch.float16, [1, 4], trigger)
        torch.cuda.synchronize()
        return x

    expected = chain("none")
    assert all(torch.equal(chain("late"), expected) for _ in range(40))


def _check(results: list[Tensor], expected: Tensor) -> None:
    dtype = results[0].dtype
    eps = torch.finfo(dtype).eps * (8 if dtype is torch.float32 else 1)  # what is expected is rounded, too
    torch.testing.assert_close(results[0].float(), expected, atol=2 * eps, rtol=2 * eps)
    assert all(torch.equal(result, results[0]) for result in results)
