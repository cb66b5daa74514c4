"""Pooling by Triton kernels: ops, graphs, values in Triton's interpreter, code for several GPUs, and a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting import counts, optimize, random_half, record, rewritten, run
from torch import Tensor
from torch.nn import functional
from triton_process import interpret, interpreted, needs_triton
from triton_process import run as run_process

from nimblec.kernels.gpu import GPU, KNOWN, SM_90
from nimblec.kernels.reductions.pool_match import PoolRequest, requests
from nimblec.kernels.reductions.pool_op import mean2d, pool2d, pooling_shape
from nimblec.kernels.reductions.pool_rewrite import tilings, use_triton_pools
from nimblec.kernels.reductions.pool_shapes import means_of
from nimblec.kernels.reductions.pool_tilings import PoolTiling, mean_candidates, pool_candidates

TILING = PoolTiling(block_m=8, block_c=16, num_warps=2)


WEIGHT = random_half(16, 16, 3, 3) / 12


def _conv(x: Tensor) -> Tensor:
    return functional.conv2d(x, WEIGHT.to(x.dtype), padding=1)


def _first(request: PoolRequest) -> PoolTiling:
    return tilings(request, SM_90)[0]


@st.composite
def _poolings(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, object]]:
    """Return a size of images, and what torch's max_pool2d takes; padding is at most half of a window."""
    pair = st.tuples(st.integers(1, 4), st.integers(1, 4))
    kernel = draw(pair)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    least = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = tuple(low + draw(st.integers(0, 6)) for low in least)
    stride = draw(pair)
    how = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return (draw(st.integers(1, 2)), draw(st.integers(1, 5)), *size), {**how, "ceil_mode": draw(st.booleans())}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(pooling=_poolings(), channels_last=st.booleans())
def test_a_shape_is_torchs(pooling: tuple[tuple[int, ...], dict[str, object]], channels_last: bool) -> None:
    size, how = pooling
    x = torch.randn(size).contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    expected = functional.max_pool2d(x, **how)  # type: ignore[arg-type]
    shape = pooling_shape(x, *how.values())  # type: ignore[arg-type]
    assert expected.shape[2:] == (shape.out_height, shape.out_width)
    assert shape.rows * shape.channels == expected.numel()


@pytest.mark.parametrize("channels_last", [False, True])
def test_ops_on_the_cpu_and_without_memory(channels_last: bool) -> None:
    x = random_half(2, 16, 9, 8)
    if channels_last:
        x = random_half(2, 32, 9, 8).contiguous(memory_format=torch.channels_last)[:, 16:]  # part of others' channels
    end = ("relu", TILING.numbers, "none")
    geometry = ([3, 2], [2, 1], [1, 0], [1, 1], True)
    expected = {
        "max": functional.max_pool2d(x, (3, 2), (2, 1), (1, 0), 1, ceil_mode=True),
        "average": functional.avg_pool2d(x.float(), (3, 2), (2, 1), (1, 0), True, False),
        "padded average": functional.avg_pool2d(x.float(), (3, 2), (2, 1), (1, 0), True, True),
    }
    for kind, wanted in expected.items():
        y = pool2d(x, kind, *geometry, None, *end)
        torch.testing.assert_close(y, wanted.relu().half(), atol=1e-3, rtol=1e-3)
        like = pool2d(_without_memory(x), kind, *geometry, None, *end)
        assert (like.shape, like.stride(), like.dtype) == (y.shape, y.stride(), y.dtype)
    mean = mean2d(x, channels_last, *end)
    torch.testing.assert_close(mean, x.float().mean((2, 3), keepdim=True).relu().half(), atol=1e-3, rtol=1e-3)
    assert mean2d(_without_memory(x), channels_last, *end).stride() == mean.stride()


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


MODELS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "max": (lambda x: _conv(functional.max_pool2d(_conv(x), 3, 2, 1)), ["max none"]),
    "dilated": (lambda x: _conv(functional.max_pool2d(_conv(x), 3, 1, 1, 2)), ["max none"]),
    "relu after": (lambda x: _conv(torch.relu(functional.max_pool2d(_conv(x), 2))), ["max relu"]),
    "indices read": (lambda x: functional.max_pool2d_with_indices(_conv(x), 2)[1].half(), []),
    "average": (lambda x: _conv(functional.avg_pool2d(_conv(x), 3, 1, 1)), ["padded average none"]),
    "average of pixels": (lambda x: _conv(functional.avg_pool2d(_conv(x), 3, 2, 1, True, False)), ["average none"]),
    "divisor": (lambda x: _conv(functional.avg_pool2d(_conv(x), 2, divisor_override=3)), ["padded average by 3 none"]),
    "negative divisor": (lambda x: _conv(functional.avg_pool2d(_conv(x), 2, divisor_override=-3)), []),
    "adaptive": (lambda x: _conv(functional.adaptive_avg_pool2d(_conv(x), (4, 2))), ["average none"]),
    "uneven": (lambda x: _conv(functional.adaptive_avg_pool2d(_conv(x), (3, 3))), []),
    "global": (lambda x: functional.adaptive_avg_pool2d(_conv(x), 1), ["None none"]),
    "window of all": (lambda x: functional.avg_pool2d(_conv(x), 8), ["None none"]),
    "mean": (lambda x: _conv(x).mean((-1, -2)), ["None none"]),
    "mean kept, and an activation": (
        lambda x: functional.hardswish(_conv(x).mean((2, 3), keepdim=True)),
        ["None hardswish"],
    ),
    "of one axis": (lambda x: _conv(x).mean(2), []),
    "with a neighbour before": (lambda x: functional.max_pool2d(x.sin(), 2), []),
    "with a neighbour after": (lambda x: functional.max_pool2d(_conv(x), 2).sin(), []),
    "two": (lambda x: functional.max_pool2d(_conv(x), 3, 1, 1).mean((2, 3)), ["max none", "None none"]),
}


def _told(request: PoolRequest) -> str:
    return f"{request.kind}{f' by {request.divisor}' if request.divisor else ''} {request.activation}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_taken_and_its_values(name: str, dtype: torch.dtype) -> None:
    """Half precision lies channels last, float32 contiguous."""
    function, expected = MODELS[name]
    x = random_half(2, 16, 8, 8).to(dtype)
    module = optimize(record(function, x), device="cuda")
    assert [_told(request) for request in requests(module)] == expected
    after = rewritten(module, lambda m: use_triton_pools(m, _first))
    found = counts(after)
    assert found["pool2d"] + found["mean2d"] == len(expected)
    for wanted, result in zip(run(module, x), run(after, x), strict=True):
        torch.testing.assert_close(result, wanted, atol=2e-3, rtol=2e-3)
        assert result.stride() == wanted.stride()


SIZES = ((1, 64, 112, 112), (1, 2048, 7, 7), (2, 3, 5, 5), (1, 1, 64, 64), (8, 33, 14, 14))


@pytest.mark.parametrize("gpu", KNOWN, ids=lambda gpu: str(gpu.architecture))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tilings_fit_a_gpu(size: tuple[int, ...], gpu: GPU) -> None:
    for x in (torch.empty(size), torch.empty(size).contiguous(memory_format=torch.channels_last)):
        windows = pool_candidates(pooling_shape(x, [3, 3], [2, 2], [1, 1], [1, 1], ceil_mode=False), gpu)
        means = mean_candidates(means_of(x), gpu)
        assert windows
        assert means
        for tiling in (*windows, *means):
            assert 32 * tiling.num_warps <= 1024
            assert tiling.block_m * tiling.block_c <= 64 * 32 * tiling.num_warps, "what the registers of threads hold"


INTERPRET = """
import random, torch
from torch.nn import functional
from nimblec.kernels.launch import prepared
from nimblec.kernels.reductions.pool_op import mean2d, pool2d

def launched(op, *args, filled):
    made = prepared(op, *args, "none")
    made.results.fill_(filled)
    made.launch()
    return made.results

def images(size, dtype, layout):
    x = torch.randn(size, dtype=torch.float32).to(dtype)
    if layout == "contiguous":
        return x
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = size
    wide = torch.randn(batch, height, width, 2 * channels).to(dtype)
    wide[..., :channels] = x.permute(0, 2, 3, 1)
    return wide[..., :channels].permute(0, 3, 1, 2)

def bits(x):
    return x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)

def pool(x, tiling, kernel, stride, padding=(0, 0), dilation=(1, 1), ceil=False, kind="max", divisor=None,
         activation="none"):
    geometry = kernel, stride, padding, dilation, ceil
    out = launched(pool2d, x, kind, *geometry, divisor, activation, tiling, filled=7.0)
    if kind == "max":
        expected = functional.max_pool2d(x, kernel, stride, padding, dilation, ceil)
        if activation == "none":
            assert torch.equal(bits(out), bits(expected)), (x, out, expected)
            return
        expected = getattr(torch, activation)(expected)
    else:
        expected = functional.avg_pool2d(x.float(), kernel, stride, padding, ceil, kind != "average", divisor)
        expected = (expected if activation == "none" else getattr(torch, activation)(expected)).to(x.dtype)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3, equal_nan=True)

def odd(x, share):
    # some NaNs, infinities and zeros of both signs
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0], dtype=x.dtype)
    chosen = torch.rand(x.shape) < share
    return torch.where(chosen, values[torch.randint(0, 5, x.shape)], x)

def laid(x, like):
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(x)

def at_random(seed):
    r = random.Random(seed)
    torch.manual_seed(seed)
    kernel = r.randint(1, 4), r.randint(1, 4)
    padding = tuple(r.randint(0, k // 2) for k in kernel)
    kind = r.choice(["max", "max", "average", "padded average"])
    dilation = (r.randint(1, 2), r.randint(1, 2)) if kind == "max" else (1, 1)
    size = [d * (k - 1) + 1 + r.randint(0, 5) for d, k in zip(dilation, kernel)]
    layout = r.choice(["contiguous", "channels last", "part"])
    x = images((r.randint(1, 2), r.randint(2, 9), *size), r.choice([torch.float16, torch.float32]), layout)
    if kind == "max":
        x = laid(odd(x, r.choice([0.0, 0.3, 0.9])), x) if layout != "part" else x
    pool(x, [*r.choice([(1, 16), (4, 8), (16, 1), (16, 16)]), 2], kernel, (r.randint(1, 3), r.randint(1, 3)), padding,
        dilation, r.random() < 0.5, kind, r.choice([None, None, 3]) if kind != "max" else None,
        r.choice(["none", "none", "relu"]))
    print(seed)

def mean(size, tiling, layout, dtype=torch.float16, activation="none"):
    torch.manual_seed(0)
    x = images(size, dtype, layout) + 1
    out = launched(mean2d, x, False, activation, tiling, filled=torch.nan)
    expected = x.float().mean((2, 3), keepdim=True)
    expected = expected if activation == "none" else getattr(torch, activation)(expected)
    torch.testing.assert_close(out, expected.to(dtype), atol=1e-3, rtol=1e-3)
"""

SEEDS = 60
CASES = {  # none in bfloat16: the interpreter has no arithmetic of it
    "stem": "pool(images((1, 20, 13, 12), torch.float16, 'channels last'), [8, 16, 2], (3, 3), (2, 2), (1, 1))",
    "large window": "pool(images((1, 2, 9, 8), torch.float32, 'contiguous'), [32, 1, 2], (7, 6), (1, 1), (3, 3))",
    "nothing inside": "pool(images((1, 2, 1, 9), torch.float32, 'contiguous'), [4, 1, 1], (2, 1), (1, 1), (1, 0))",
    "only NaN": "pool(images((1, 4, 4, 4), torch.float16, 'channels last') * torch.nan, [4, 4, 1], (2, 2), (2, 2))",
    "only -inf": "pool(images((1, 4, 4, 4), torch.float16, 'contiguous').abs() / 0 * -1, [4, 1, 1], (2, 2), (1, 1))",
    "divisor": "pool(images((1, 4, 5, 5), torch.float16, 'part'), [4, 4, 1], (3, 3), (2, 2), (1, 1), divisor=5, "
    "kind='average', activation='sigmoid')",
    "mean": "mean((2, 20, 7, 7), [64, 16, 2], 'channels last')",
    "mean in steps": "mean((2, 20, 9, 8), [16, 8, 2], 'channels last', torch.float32, 'relu')",
    "mean of a part": "mean((2, 5, 3, 9), [16, 4, 1], 'part')",
    "mean of planes": "mean((2, 5, 7, 7), [16, 4, 1], 'contiguous', activation='sigmoid')",
    "mean of no rest": "mean((1, 4, 4, 4), [16, 4, 1], 'contiguous')",
    "mean of pixels": "mean((3, 5, 1, 1), [16, 1, 1], 'contiguous', torch.float32)",
}

COMPILE = """
import torch
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.gpu import KNOWN
from nimblec.kernels.launch import launch_of
from nimblec.kernels.reductions.pool_op import mean2d, pool2d, pooling_shape
from nimblec.kernels.reductions.pool_shapes import means_of
from nimblec.kernels.reductions.pool_tilings import mean_candidates, pool_candidates

for gpu in KNOWN:
    images = torch.empty(1, 64, 56, 56, dtype=torch.bfloat16, device="meta")
    images = images.contiguous(memory_format=torch.channels_last)
    geometry = [3, 3], [2, 2], [1, 1], [1, 1], False
    windows, means = pool_candidates(pooling_shape(images, *geometry), gpu), mean_candidates(means_of(images), gpu)
    for launch in (
        launch_of(pool2d, images, "max", *geometry, None, "relu", windows[0].numbers, gpu.trigger),
        launch_of(mean2d, images, True, "none", means[0].numbers, gpu.trigger),
    ):
        kernel = compile_job(launch.job, architecture=gpu.architecture)
        assert kernel.metadata.shared <= gpu.shared_per_block
        ptx = kernel.asm["ptx"]
        waits = "griddepcontrol.wait" in ptx
        assert waits == gpu.has_programmatic_launch
        assert not waits or ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
    print(gpu.architecture)
"""


@needs_triton
@pytest.mark.timeout(900)  # minutes on a busy machine
def test_values_in_the_interpreter(tmp_path: Path) -> None:
    interpret(INTERPRET, CASES, tmp_path)


@needs_triton
@pytest.mark.timeout(900)
def test_random_windows_in_the_interpreter(tmp_path: Path) -> None:
    """Maxima bit for bit as torch has them, with NaNs, infinities and zeros of both signs."""
    told = interpreted(INTERPRET + f"for seed in range({SEEDS}): at_random(seed)\n", tmp_path)
    assert told.split() == [str(seed) for seed in range(SEEDS)]


@needs_triton
@pytest.mark.timeout(900)
def test_code_for_several_gpus(tmp_path: Path) -> None:
    assert run_process(COMPILE, tmp_path).split() == [str(gpu.architecture) for gpu in KNOWN]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_on_a_gpu(size: tuple[int, ...], channels_last: bool, dtype: torch.dtype) -> None:
    """Maxima bit for bit as ATen has them there; twenty runs that give the same bits."""
    gpu = GPU.current()
    x = torch.randn(size, device="cuda").to(dtype)
    x[torch.rand(size, device="cuda") < 0.01] = torch.nan
    x = x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    geometry = ([3, 3], [2, 2], [1, 1], [1, 1], True)
    end = ("none", gpu.trigger)
    for tiling in pool_candidates(pooling_shape(x, *geometry), gpu):
        how = (None, end[0], tiling.numbers, end[1])
        largest = [pool2d(x, "max", *geometry, *how) for _ in range(20)]
        expected = functional.max_pool2d(x, 3, 2, 1, ceil_mode=True)
        assert all(torch.equal(result.nan_to_num(9.0), expected.nan_to_num(9.0)) for result in largest)
        for kind, counts_padding in (("average", False), ("padded average", True)):
            averages = pool2d(x.nan_to_num(0.0), kind, *geometry, *how)
            wanted = functional.avg_pool2d(x.nan_to_num(0.0), 3, 2, 1, True, counts_padding)
            torch.testing.assert_close(averages, wanted, atol=1e-6, rtol=torch.finfo(dtype).eps)
    clean = x.nan_to_num(0.0)
    for tiling in mean_candidates(means_of(x), gpu, itemsize=dtype.itemsize):
        means = [mean2d(clean, channels_last, "none", tiling.numbers, gpu.trigger) for _ in range(20)]
        wanted = clean.double().mean((2, 3), keepdim=True)
        torch.testing.assert_close(means[0].double(), wanted, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
        assert all(torch.equal(result, means[0]) for result in means)
