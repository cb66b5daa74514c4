"""Group norms as moments of a Triton kernel and pointwise calls; the kernel runs in Triton's interpreter."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rewriting import assert_same, counts, optimize, random_half, record, rewritten
from torch import Tensor, fx
from torch.nn import functional
from triton_process import interpret, needs_triton

from nimblec.kernels.gpu import GPU, SM_90
from nimblec.kernels.images import channels_last
from nimblec.kernels.reductions.group_norm_op import Groups, group_candidates, group_moments, groups_of
from nimblec.kernels.reductions.group_norm_rewrite import GROUP_NORM, requests
from nimblec.optimize.passes.channels_last import propagate_channels_last

WEIGHT, BIAS = random_half(64, seed=1), random_half(64, seed=2)


def _norm(x: Tensor, groups: int) -> Tensor:
    return functional.silu(functional.group_norm(x, groups, WEIGHT, BIAS, 1e-3))


def _between_convolutions(x: Tensor) -> Tensor:
    x = functional.conv2d(x, random_half(64, 16, 1, 1, seed=3) / 4, WEIGHT)
    return functional.conv2d(_norm(x, 4), random_half(8, 64, 3, 3, seed=4) / 24)


def _of_contiguous_images(x: Tensor) -> Tensor:
    return _norm(x.repeat(1, 4, 1, 1), 4)


def _of_small_images(x: Tensor) -> Tensor:
    return _between_convolutions(x[:, :, :20, :20])


def _of_narrow_groups(x: Tensor) -> Tensor:
    x = functional.conv2d(x, random_half(64, 16, 1, 1, seed=3) / 4, WEIGHT)
    return functional.conv2d(_norm(x, 16), random_half(8, 64, 3, 3, seed=4) / 24)


def _graph(model: Callable[[Tensor], Tensor]) -> tuple[fx.GraphModule, Tensor]:
    x = random_half(2, 16, 32, 24, seed=0)
    module = optimize(record(model, x), device="cuda")
    propagate_channels_last(module)
    return module, x


def test_a_group_norm_between_convolutions_needs_no_copies() -> None:
    before, x = _graph(_between_convolutions)
    (request,) = requests(before)
    assert request.shape == Groups(images=2, pixels=32 * 24, groups=4, channels=16, pixel_stride=64)
    after = rewritten(before, lambda module: GROUP_NORM.use_first(module, SM_90))
    assert counts(before)["native_group_norm"] == counts(after)["group_moments"] == 1
    assert "native_group_norm" not in counts(after)
    assert_same(before, after, x, rtol=4e-3)


@pytest.mark.parametrize("model", [_of_contiguous_images, _of_small_images, _of_narrow_groups])
def test_others_are_left_to_generated_kernels(model: Callable[[Tensor], Tensor]) -> None:
    assert not list(requests(_graph(model)[0]))


@pytest.mark.parametrize("pixels", [64, 3136])
@pytest.mark.parametrize("channels", [8, 20, 1000])
@pytest.mark.parametrize("rows", [1, 32, 2000])
def test_candidates_fill_the_gpu(pixels: int, channels: int, rows: int) -> None:
    shape = Groups(images=1, pixels=pixels, groups=rows, channels=channels, pixel_stride=rows * channels)
    found = group_candidates(shape, SM_90)
    assert 1 <= len(found) <= 4
    assert all((tiling.parts - 1) * rows < 2 * SM_90.multiprocessors for tiling in found)
    assert all(tiling.block_p * shape.width <= 4096 for tiling in found)
    assert found[0].parts == 1 or found[0].parts * found[0].block_p < pixels + found[0].block_p * 2


def test_moments_of_channels_last_on_the_cpu() -> None:
    x = channels_last(random_half(2, 24, 5, 7).contiguous(memory_format=torch.channels_last))
    mean, scale = group_moments(x, torch.zeros(6, dtype=torch.int32), 3, 1e-3, [2, 16], "none")
    normal = (x.float().unflatten(1, (3, 8)) - mean[..., None, None, None]) * scale[..., None, None, None]
    torch.testing.assert_close(normal.flatten(1, 2), functional.group_norm(x.float(), 3, eps=1e-3))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "groups"), [(320, 32), (64, 1), (1280, 32)])
def test_moments_on_a_gpu(channels: int, groups: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, channels, 40, 30, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last) + 2
    counters = torch.zeros(2 * groups, dtype=torch.int32, device="cuda")
    expected = group_moments(x.cpu(), counters.cpu(), groups, 1e-5, [1, 1], "none")
    for tiling in group_candidates(groups_of(x, groups), GPU.current()):
        first, *others = (group_moments(x, counters, groups, 1e-5, tiling.numbers, "late") for _ in range(20))
        torch.testing.assert_close([moment.cpu() for moment in first], list(expected), atol=1e-5, rtol=1e-5)
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


INTERPRET = """
import torch
from nimblec.kernels.launch import prepared
from nimblec.kernels.reductions.group_norm_op import group_moments

def check(size, channels, groups, tiling, *, images=1, slices=1, shift=0.0, dtype=torch.float16):
    torch.manual_seed(0)
    x = (torch.randn(images, *size, channels * slices) + shift).to(dtype)[..., :channels].permute(0, 3, 1, 2)
    counters = torch.zeros(images * groups, dtype=torch.int32)
    made = prepared(group_moments, x, counters, groups, 1e-3, tiling, "none")
    for result in made.results:
        result.fill_(torch.nan)
    made.launch()
    expected = group_moments(x, counters, groups, 1e-3, tiling, "none")
    torch.testing.assert_close(made.results, expected, atol=1e-5, rtol=1e-5)
    assert not counters.any()
"""

CASES = {
    "one block for each group": "check((9, 7), 32, 2, [1, 16])",
    "blocks share a group": "check((9, 7), 30, 3, [4, 8], images=2)",
    "more blocks than pixels": "check((2, 3), 16, 1, [5, 4])",
    "many channels": "check((5, 4), 300, 1, [2, 8])",
    "slice of channels": "check((6, 7), 16, 2, [3, 16], slices=3, images=2)",
    "far from zero": "check((9, 7), 32, 2, [3, 8], shift=100.0, dtype=torch.float32)",
}


@needs_triton
def test_kernel_in_the_interpreter(tmp_path: Path) -> None:
    interpret(INTERPRET, CASES, tmp_path)
