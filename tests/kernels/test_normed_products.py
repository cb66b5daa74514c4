"""Norms between Triton products, which are no launch."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from rewriting import counts, optimize, random_half, record, rewritten, run
from torch import Tensor, fx
from torch.nn import functional

from nimblec.kernels.products.gemm_rewrite import use_triton_kernels
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.reductions.norm_folding import fold_norms_into_products

if TYPE_CHECKING:
    from nimblec.kernels.compiling import Job

WIDTH = 48
TILING = Tiling(block_m=16, block_n=16, block_k=32, split_k=2)


def _linear(x: Tensor, out: int = WIDTH, *, bias: bool = True, seed: int = 4) -> Tensor:
    weight = random_half(out, x.shape[-1], seed=seed) / 7
    return functional.linear(x, weight, random_half(out, seed=5) if bias else None)


WEIGHT, BIAS = random_half(WIDTH, seed=2), random_half(WIDTH, seed=3)


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), WEIGHT, BIAS)


def _rms(x: Tensor) -> Tensor:
    """T5's."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return WEIGHT * (x * torch.rsqrt(variance + 1e-6)).to(WEIGHT.dtype)


def _pre(x: Tensor) -> Tensor:
    """Return a transformer's blocks without attention; the first norm is not of a product."""
    for n in range(2):
        x = x + _linear(functional.gelu(_linear(_norm(x), 64, seed=n)), seed=n)
    return _linear(_norm(x), 32)


def _two_of_one_sum(x: Tensor) -> Tensor:
    total = _linear(x) + x
    return _linear(_norm(total)) + _linear(functional.layer_norm(total, (WIDTH,)), bias=False)


def _two_readers(x: Tensor) -> Tensor:
    x = _norm(_linear(x))
    return _linear(x) * _linear(x, bias=False, seed=8)


def _read_by_another(x: Tensor) -> Tensor:
    x = _norm(_linear(x))
    return _linear(x) * x.sum()


def _also_the_residual(x: Tensor) -> Tensor:
    x = _norm(_linear(x))
    return _linear(x) + x


def _of_a_matrix_also_the_residual(x: Tensor) -> Tensor:
    x = _norm(_linear(x.flatten(0, 1)))
    return _linear(x) + x


MODELS: dict[str, tuple[Callable[[Tensor], Tensor], int, int, int]] = {  # norms left, makers, readers
    "pre-norm": (_pre, 1, 2, 2),
    "rms": (lambda x: _linear(_rms(_linear(x, bias=False)), 32, bias=False), 0, 1, 1),
    "without weights": (lambda x: _linear(functional.layer_norm(_linear(x), (WIDTH,), eps=0.1), bias=False), 0, 1, 1),
    "two readers": (_two_readers, 0, 1, 2),
    "two of one sum": (_two_of_one_sum, 0, 1, 2),
    "a maker reads": (lambda x: _linear(_norm(_linear(_norm(_linear(x)), seed=7)), 64), 0, 2, 2),
    "read by another": (_read_by_another, 1, 0, 0),
    "also the residual": (_also_the_residual, 1, 0, 0),
    "of a matrix, also the residual": (_of_a_matrix_also_the_residual, 1, 0, 0),
    "of no product": (lambda x: _linear(_norm(x.sin())), 1, 0, 0),
    "batch second": (lambda x: _linear(_norm(_linear(x)).transpose(0, 1)), 0, 1, 1),
    "rows moved": (lambda x: _linear(_norm(_linear(x)).flip(0)), 1, 0, 0),
}


def _graph(function: Callable[[Tensor], Tensor], x: Tensor, tiling: Tiling = TILING) -> fx.GraphModule:
    module = optimize(record(function, x), device="cuda")
    return rewritten(module, lambda m: use_triton_kernels(m, lambda _: tiling))


def _absorbed(module: fx.GraphModule) -> tuple[fx.GraphModule, "list[Job]"]:
    jobs: list[Job] = []
    return rewritten(module, lambda m: fold_norms_into_products(m, jobs.extend)), jobs


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_corrections(name: str) -> None:
    x = random_half(3, 5, WIDTH, seed=9)
    function, norms, makers, readers = MODELS[name]
    before = _graph(function, x)
    after, jobs = _absorbed(before)
    left = counts(after)
    assert left["native_layer_norm"] + left["rsqrt"] == norms
    assert left["linear_and_moments"] == makers
    assert sum(node.kwargs.get("moments") is not None for node in after.graph.nodes) == readers
    assert len(jobs) <= makers + readers
    for expected, result in zip(run(before, x), run(after, x), strict=True):
        torch.testing.assert_close(result, expected, atol=2e-2, rtol=8e-3)
        assert result.stride() == expected.stride()


POINTERS = ("moments_ptr", "sums_ptr", "out_ptr", "out_moments_ptr")


def test_kernels_are_compiled_as_they_are_launched() -> None:
    _, jobs = _absorbed(_graph(_pre, random_half(3, 5, WIDTH)))
    described = {
        (j.settings["NORM"], j.settings["PARTS"], j.settings["EPS"], *(j.pointers[name] for name in POINTERS))
        for j in jobs
    }
    assert described == {
        ("layer", 3, 1e-5, "float32", "float32", "float16", None),
        ("none", 1, 0.0, None, None, "float16", "float32"),
    }


def test_tiles_that_are_no_part_of_a_row() -> None:
    before = _graph(_two_readers, random_half(3, 5, WIDTH), Tiling(block_m=16, block_n=32, block_k=32))
    assert counts(_absorbed(before)[0]) == counts(before)


def test_more_moments_than_a_thread_can_hold() -> None:
    before = _graph(_two_readers, random_half(3, 5, WIDTH), Tiling(block_m=512, block_n=16, block_k=32, num_warps=1))
    assert counts(_absorbed(before)[0]) == counts(before)


def test_weights_that_would_not_be_finite() -> None:
    before = _graph(_two_readers, random_half(3, 5, WIDTH))
    for weight in before.buffers():
        weight.mul_(1000)
    assert counts(_absorbed(before)[0]) == counts(before)
