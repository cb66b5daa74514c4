"""Convolutions of trained weights and their gradients by Triton: ops, graphs, values, code for several GPUs, a GPU."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from choosing import selector
from rewriting import assert_same, counts, record, rewritten
from torch import Tensor
from triton_process import BY_ARCHITECTURE, interpret, needs_triton
from triton_process import run as run_process

from nimblec.kernels.compiling import compile_all
from nimblec.kernels.gpu import GPU, KNOWN, SM_90
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products.packing import CUT_OFF
from nimblec.kernels.products.trained_match import TrainedRequest, requests
from nimblec.kernels.products.trained_op import (
    depthwise_convolution,
    depthwise_image_gradient,
    depthwise_weight_gradient,
    image_gradient,
    trained_convolution,
    weight_gradient,
)
from nimblec.kernels.products.trained_rewrite import TRAINED, AnyTiling, tilings, use_trained_kernels
from nimblec.kernels.products.trained_tilings import (
    depthwise_forward_candidates,
    depthwise_image_candidates,
    depthwise_weight_candidates,
    forward_candidates,
    image_candidates,
    weight_candidates,
)
from nimblec.kernels.selector import FRAMEWORK
from nimblec.kernels.shapes import Convolution
from nimblec.optimize.passes.channels_last import lay_float32_channels_last
from nimblec.optimize.passes.layout_gradients import split_gradients

aten = torch.ops.aten
TILING = [32, 32, 32, 1, 4, 2]
WINDOW = [2, 1, 1, 0, 1, 2]
"""Stride 2 x 1, padding 1 x 0, dilation 1 x 2."""


def _random(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _exact(grad: Tensor, x: Tensor, weight: Tensor, window: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the convolution gives, and the gradients of images and weights, in float64."""
    geometry = (window[0:2], window[2:4], window[4:6], False, [0, 0], x.shape[1] // weight.shape[1])
    y = aten.convolution(x.double(), weight.double(), None, *geometry)
    mask = [True, True, False]
    of_x, of_weight, _ = aten.convolution_backward(grad.double(), x.double(), weight.double(), None, *geometry, mask)
    return y, of_x, of_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_ops_on_the_cpu_and_without_memory(dtype: torch.dtype) -> None:
    x, weight = _last(_random(2, 8, 7, 9).to(dtype)), _last(_random(6, 8, 3, 2, seed=1).to(dtype))
    grad = _last(_random(2, 6, 4, 7, seed=2).to(dtype))
    bias = _random(6, seed=4).to(dtype)
    channels, alone = _last(_random(2, 8, 4, 7, seed=3).to(dtype)), _random(8, 1, 3, 2, seed=5).to(dtype)
    exact, exact_alone = _exact(grad, x, weight, WINDOW), _exact(channels, x, alone, WINDOW)
    end, shared = (WINDOW, TILING, "none"), _random(8, seed=6).to(dtype)
    calls: list[tuple[Callable[..., Tensor], tuple[object, ...], Tensor]] = [
        (trained_convolution, (x, weight, None, None, *end), exact[0]),
        (trained_convolution, (x, weight, bias, None, *end), exact[0] + bias.double()[:, None, None]),
        (image_gradient, (grad, weight, None, [7, 9], *end), exact[1]),
        (weight_gradient, (grad, x, None, [3, 2], *end), exact[2]),
        (depthwise_convolution, (x, alone, None, WINDOW, [4, 16, 4], "none"), exact_alone[0]),
        (
            depthwise_convolution,
            (x, alone, shared, WINDOW, [4, 16, 4], "none"),
            exact_alone[0] + shared.double()[:, None, None],
        ),
        (depthwise_image_gradient, (channels, alone, [7, 9], WINDOW, [4, 16, 4], "none"), exact_alone[1]),
        (depthwise_weight_gradient, (channels, x, None, [3, 2], WINDOW, [4, 16, 1, 4], "none"), exact_alone[2]),
    ]
    for op, args, wanted in calls:
        made = op(*args)
        torch.testing.assert_close(made.double(), wanted, atol=2e-2, rtol=4e-3)
        like = op(*(each.to("meta") if isinstance(each, Tensor) else each for each in args))
        assert (like.shape, like.stride(), like.dtype) == (made.shape, made.stride(), dtype)
        assert made.is_contiguous(memory_format=torch.channels_last)


def test_what_tensor_cores_cut_off_is_made_up_for() -> None:
    """Without it all gradients would be smaller by the same part, in each layer anew."""
    x, grad = _last(_random(64, 8, 16, 16).abs() + 1), _last(_random(64, 8, 16, 16, seed=1).abs() + 1)
    exact = _exact(grad, x, torch.empty(8, 8, 1, 1), [1, 1, 0, 0, 1, 1])[2]
    made = weight_gradient(grad, x, None, [1, 1], [1, 1, 0, 0, 1, 1], TILING, "none")
    assert abs((made.double() / exact).mean() - 1) < CUT_OFF / 2


Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _step(stride: int = 1, padding: int = 1, groups: int = 1, bias: Tensor | None = None) -> Step:
    """Return a convolution, and the gradients that it has of another one of its results."""

    def step(x: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        geometry = ([stride, stride], [padding, padding], [1, 1], False, [0, 0], groups)
        y = aten.convolution(x, weight, bias, *geometry)
        mask = [True, True, bias is not None]
        made = aten.convolution_backward(grad, x, weight, None if bias is None else [6], *geometry, mask)
        return y, *made[: sum(mask)]

    return step


X, GRAD = _random(2, 6, 8, 8), _random(2, 6, 8, 8, seed=1)
CASES: dict[str, tuple[Step, tuple[Tensor, ...], list[str]]] = {
    "plain": (_step(), (X, GRAD, _random(6, 6, 3, 3)), ["forward", "images", "weights"]),
    "strided": (_step(stride=2), (X, GRAD[:, :, ::2, ::2], _random(6, 6, 3, 3)), ["forward", "images", "weights"]),
    "one pixel, which torch lays otherwise": (
        _step(padding=0),
        (X[:, :, :1, :1], GRAD[:, :, :1, :1], _random(6, 6, 1, 1)),
        ["forward", "images", "weights"],
    ),
    "with a bias": (_step(bias=_random(6)), (X, GRAD, _random(6, 6, 3, 3)), ["forward", "images", "weights"]),
    "depthwise": (
        _step(groups=6),
        (X, GRAD, _random(6, 1, 3, 3)),
        ["depthwise", "depthwise images", "depthwise weights"],
    ),
    "depthwise with a bias": (
        _step(groups=6, bias=_random(6)),
        (X, GRAD, _random(6, 1, 3, 3)),
        ["depthwise", "depthwise images", "depthwise weights"],
    ),
    "groups": (_step(groups=2), (X, GRAD, _random(6, 3, 3, 3)), []),
    "double": (_step(), (X.double(), GRAD.double(), _random(6, 6, 3, 3).double()), []),
    "images are not trained": (
        lambda x, grad, weight: (
            aten.convolution_backward(
                *(grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
            )[1],
        ),
        (X, GRAD, _random(6, 6, 3, 3)),
        ["weights"],
    ),
}


def _first(request: TrainedRequest) -> AnyTiling:
    return tilings(request, SM_90)[0]


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_and_its_values(name: str) -> None:
    step, inputs, expected = CASES[name]
    module = record(step, *inputs)
    split = rewritten(module, split_gradients, lay_float32_channels_last)
    assert [request.kind for request in requests(split)] == expected
    after = rewritten(split, partial(use_trained_kernels, choose=_first))
    found = counts(after)
    whole = ("trained_convolution", "image_gradient", "weight_gradient")
    depthwise = ("depthwise_convolution", "depthwise_image_gradient", "depthwise_weight_gradient")
    assert sum(found[op] for op in (*whole, *depthwise)) == len(expected)
    assert_same(module, after, *inputs, rtol=3e-3)


def test_gradients_that_are_made_together_are_the_librarys() -> None:
    step, inputs, _ = CASES["plain"]
    together = rewritten(record(step, *inputs), lay_float32_channels_last)
    assert [request.kind for request in requests(together)] == ["forward"]


@pytest.mark.parametrize(("apart", "expected"), [(1, ["forward"]), (2, [])])
def test_a_bias_with_gaps_is_the_librarys(apart: int, expected: list[str]) -> None:
    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return aten.convolution(x, weight, bias[::apart], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    module = record(convolved, X, _random(6, 6, 1, 1), _random(6 * apart))
    laid = rewritten(module, lay_float32_channels_last)
    assert [request.kind for request in requests(laid)] == expected


@pytest.mark.parametrize("width", [4096, 8192])
def test_what_32_bits_do_not_reach_is_the_librarys(width: int) -> None:
    images = torch.empty(1, 16, 2048, width, device="meta")
    grad = torch.empty(1, 128, 2048, width, device="meta")
    module = record(_step(padding=0), images, grad, torch.empty(128, 16, 1, 1, device="meta"))
    split_gradients(module)  # not by `rewritten`, which runs what it has made
    lay_float32_channels_last(module)
    kinds = [request.kind for request in requests(module)]
    assert kinds == (["forward", "images", "weights"] if width < 8192 else [])


def test_several_results_of_a_channel_are_the_librarys() -> None:
    like = (torch.empty(shape, device="meta") for shape in ((2, 6, 6, 5), (2, 12, 6, 5), (12, 1, 3, 3)))
    module = record(_step(groups=6), *like)
    split_gradients(module)  # not by `rewritten`: the CPU's library refuses some of its gradients
    lay_float32_channels_last(module)
    assert not [*requests(module)]


def test_nothing_changes_where_the_framework_is_chosen() -> None:
    step, inputs, _ = CASES["plain"]
    module = rewritten(record(step, *inputs), split_gradients, lay_float32_channels_last)
    assert counts(rewritten(module, partial(use_trained_kernels, choose=lambda _: None))) == counts(module)


@pytest.mark.parametrize("name", ["plain", "depthwise"])
def test_the_fastest_is_chosen(name: str) -> None:
    step, inputs, _ = CASES[name]
    *_, request = requests(rewritten(record(step, *inputs), split_gradients, lay_float32_channels_last))
    choose, jobs = selector(TRAINED, lambda n: {0: 3.0, 2: 1.0}.get(n, 2.0))
    choose.prepare([request])
    assert len(jobs) == len(tilings(request, SM_90)) > 2
    assert choose(request) == tilings(request, SM_90)[1]
    slower, _ = selector(TRAINED, lambda n: 1.0 + n)
    assert slower(request) is None
    assert FRAMEWORK in slower.choices[request.signature].microseconds


SHAPES = (
    Convolution(batch=32, height=8, width=8, channels=256, out_channels=64),
    Convolution(batch=32, height=2, width=2, channels=512, out_channels=512, kernel=(3, 3), padding=(1, 1)),
    Convolution(batch=32, height=4, width=4, channels=512, out_channels=1024, stride=(2, 2)),
    Convolution(batch=8, height=32, width=32, channels=3, out_channels=64, kernel=(7, 7), stride=(2, 2)),
    Convolution(batch=1, height=5, width=3, channels=40, out_channels=24, kernel=(2, 3), dilation=(2, 1)),
    Convolution(batch=1, height=1, width=1, channels=1, out_channels=1),
)
DEPTHWISE = (
    Convolution(batch=32, height=16, width=16, channels=96, out_channels=96, kernel=(3, 3), padding=(1, 1)),
    Convolution(batch=2, height=5, width=4, channels=20, out_channels=20, kernel=(5, 5), stride=(2, 2), padding=(2, 2)),
    Convolution(batch=1, height=1, width=1, channels=960, out_channels=960, kernel=(3, 3), padding=(1, 1)),
)


@pytest.mark.parametrize("gpu", KNOWN, ids=lambda gpu: str(gpu.architecture))
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tilings_fit_a_gpu(itemsize: int, gpu: GPU) -> None:
    for shape in SHAPES:
        for find in (forward_candidates, image_candidates, weight_candidates):
            found = find(shape, gpu, itemsize=itemsize)
            assert found
            assert len(found) == len(set(found)) <= 12
            for tiling in found:
                nbytes = tiling.block_k * (tiling.block_m + tiling.block_n) * itemsize * tiling.num_stages
                assert nbytes <= gpu.shared_per_block
    for shape in DEPTHWISE:
        found_sums = depthwise_weight_candidates(shape, gpu)
        assert found_sums
        assert all(tiling.sums(shape) <= 64 for tiling in found_sums), "what the registers of a thread hold"
        for find_tiles in (depthwise_forward_candidates, depthwise_image_candidates):
            found_tiles = find_tiles(shape, gpu, itemsize=itemsize)
            assert len(found_tiles) == len(set(found_tiles)) == 8
            each = {t.block_m * t.block_c * itemsize // (16 * 32 * t.num_warps) for t in found_tiles}
            assert each <= {1, 2, 4}, "pixels of a thread, that reads 16 bytes at once"


INTERPRET = """
import random
import torch
from nimblec.kernels.launch import prepared
from nimblec.kernels.products.trained_op import *

aten = torch.ops.aten

def laid(x):
    return torch.empty(x.shape, dtype=x.dtype, memory_format=torch.channels_last).copy_(x)

def part(x):
    # of the channels of larger images
    wide = laid(torch.randn(x.shape[0], 2 * x.shape[1], *x.shape[2:]).to(x.dtype))
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]

def pair(r, low, high):
    return r.randint(low, high), r.randint(low, high)

def at_random(seed):
    r = random.Random(seed)
    torch.manual_seed(seed)
    kernel, stride, padding, dilation = pair(r, 1, 4), pair(r, 1, 3), pair(r, 0, 2), pair(r, 1, 2)
    size = [max(1, d * (k - 1) + 1 - 2 * p) + r.randint(0, 5) for d, k, p in zip(dilation, kernel, padding)]
    dtype = r.choice([torch.float32, torch.float16])
    channels, made = r.choice([3, 16, 32, 20]), r.choice([5, 16, 40])
    is_depthwise = r.random() < 0.3
    made = channels if is_depthwise else made
    x = torch.randn(r.randint(1, 3), channels, *size).to(dtype)
    weight = torch.randn(made, 1 if is_depthwise else channels, *kernel).to(dtype)
    geometry = (None, stride, padding, dilation, False, [0, 0], channels if is_depthwise else 1)
    y = aten.convolution(x.double(), weight.double(), *geometry)
    grad = torch.randn(y.shape).to(dtype)
    doubles = (grad.double(), x.double(), weight.double())
    of_x, of_weight, _ = aten.convolution_backward(*doubles, *geometry, [True, True, False])
    lay = r.choice([laid, laid, part])
    x, grad, weight = lay(x), lay(grad), laid(weight)
    bias = torch.randn(made).to(dtype) if r.random() < 0.5 else None
    y = y if bias is None else y + bias.double()[:, None, None]
    split, counters = r.choice([1, 1, 2, 3, 7]), torch.zeros(4096, dtype=torch.int32)

    window, size = (*stride, *padding, *dilation), x.shape[2:]

    def check(op, like, *args, **named):
        made = prepared(op, *args, "none", **named)
        out = made.results.fill_(torch.nan)
        made.launch()
        assert not counters.any()
        tolerance = 2e-3 if dtype is torch.float32 else 4e-2
        torch.testing.assert_close(out.double(), like, atol=tolerance, rtol=tolerance)

    if is_depthwise:
        tiling = r.choice([1, 2, 4]), r.choice([16, 32]), split, 4
        check(depthwise_weight_gradient, of_weight, grad, x, counters, kernel, window, tiling)
        tile = r.choice([16, 64]), r.choice([16, 32]), r.choice([1, 4])
        check(depthwise_convolution, y, x, weight, bias, window, tile)
        check(depthwise_image_gradient, of_x, grad, weight, size, window, tile)
    else:
        def end():
            return window, (r.choice([16, 32]), r.choice([16, 32]), r.choice([16, 32]), split, 4, 2)

        exact = {"arithmetic": "tf32x3"}
        check(trained_convolution, y, x, weight, bias, counters, *end(), **exact)
        check(image_gradient, of_x, grad, weight, counters, size, *end(), **exact)
        check(weight_gradient, of_weight, grad, x, counters, kernel, *end(), **exact)
"""

SEEDS = 40

COMPILE = """
import torch
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.gpu import KNOWN
from nimblec.kernels.images import convolution_shape
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products.trained_op import *
from nimblec.kernels.products.trained_tilings import *

def images(channels, dtype):
    return torch.empty(32, channels, 4, 4, dtype=dtype, device="meta").contiguous(memory_format=torch.channels_last)

window, counters = [1, 1, 1, 1, 1, 1], torch.empty(9999, dtype=torch.int32, device="meta")

def launches_of(dtype, gpu):
    x, grad = images(64, dtype), images(128, dtype)
    weight = torch.empty(128, 64, 3, 3, dtype=dtype, device="meta").contiguous(memory_format=torch.channels_last)
    bias, few = (torch.empty(size, dtype=dtype, device="meta") for size in ((128,), (64, 1, 3, 3)))
    shape = convolution_shape(x, 128, (3, 3), (1, 1), (1, 1), (1, 1))
    alone = convolution_shape(x, 64, (3, 3), (1, 1), (1, 1), (1, 1))
    size = {"itemsize": dtype.itemsize}

    def end(candidates):
        return window, candidates[0].numbers, gpu.trigger

    yield trained_convolution, x, weight, bias, counters, *end(forward_candidates(shape, gpu, **size))
    yield image_gradient, grad, weight, counters, [4, 4], *end(image_candidates(shape, gpu, **size))
    yield weight_gradient, grad, x, counters, [3, 3], *end(weight_candidates(shape, gpu, **size))
    bias = few[:, 0, 0, 0].contiguous()
    yield depthwise_convolution, x, few, bias, *end(depthwise_forward_candidates(alone, gpu, **size))
    yield depthwise_image_gradient, x, few, [4, 4], *end(depthwise_image_candidates(alone, gpu, **size))
    yield depthwise_weight_gradient, x, x, counters, [3, 3], *end(depthwise_weight_candidates(alone, gpu))

for number, gpu in enumerate(KNOWN):
    if gpu.architecture not in architectures:
        continue
    for dtype_number, dtype in enumerate((torch.float32, torch.bfloat16)):
        for place, (op, *args) in enumerate(launches_of(dtype, gpu)):
            # All dtypes for each kind of tensor cores: 80 and 120 have the same, depthwise kernels use none.
            has_all = gpu.architecture in (90, 100) and place < 3
            if not has_all and (number + place) % 2 != dtype_number:
                continue
            kernel = compile_job(launch_of(op, *args).job, architecture=gpu.architecture)
            assert kernel.metadata.shared <= gpu.shared_per_block
            ptx = kernel.asm["ptx"]
            waits = "griddepcontrol.wait" in ptx
            assert waits == gpu.has_programmatic_launch
            first = min(ptx.find(read) for read in ("ld.global", "cp.async") if read in ptx)
            assert not waits or ptx.index("griddepcontrol.wait") < first, "weights are written by other kernels"
            print(gpu.architecture, op._schema.name.removeprefix("nimblec::"), str(dtype).removeprefix("torch."))
"""


@needs_triton
@pytest.mark.timeout(900)
def test_values_in_the_interpreter(tmp_path: Path) -> None:
    interpret(INTERPRET, {str(seed): f"at_random({seed})" for seed in range(SEEDS)}, tmp_path)


@needs_triton
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architectures", BY_ARCHITECTURE)
def test_code_for_several_gpus(architectures: tuple[int, ...], tmp_path: Path) -> None:
    code = f"architectures = {architectures}\n{COMPILE}"
    compiled = [line.split() for line in run_process(code, tmp_path).splitlines()]
    expected = {80: 6, 90: 9, 100: 9, 120: 6}
    assert Counter(int(found) for found, *_ in compiled) == {number: expected[number] for number in architectures}
    assert len({(op, dtype) for _, op, dtype in compiled}) == (9 if architectures == (90,) else 12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_values_on_a_gpu(number: int, dtype: torch.dtype) -> None:
    """All candidates."""
    gpu, shape, size = GPU.current(), SHAPES[number], {"itemsize": dtype.itemsize}
    window = [*shape.stride, *shape.padding, *shape.dilation]
    x = _last(_random(shape.batch, shape.channels, shape.height, shape.width, device="cuda").to(dtype))
    weight = _last(_random(shape.out_channels, shape.channels, *shape.kernel, seed=1, device="cuda").to(dtype))
    grad = _random(shape.batch, shape.out_channels, shape.out_height, shape.out_width, seed=2, device="cuda")
    grad = _last(grad.to(dtype))
    bias = _random(shape.out_channels, seed=3, device="cuda").to(dtype)
    y, of_x, of_weight = _exact(grad, x, weight, window)
    calls: list[tuple[Any, tuple[Any, ...], Tensor]] = []
    for tiling in forward_candidates(shape, gpu, **size):
        end = (_counters(), window, tiling.numbers, gpu.trigger)
        calls.append((trained_convolution, (x, weight, None, *end), y))
        calls.append((trained_convolution, (x, weight, bias, *end), y + bias.double()[:, None, None]))
    for tiling in image_candidates(shape, gpu, **size):
        end = (_counters(), [shape.height, shape.width], window, tiling.numbers, gpu.trigger)
        calls.append((image_gradient, (grad, weight, *end), of_x))
    for tiling in weight_candidates(shape, gpu, **size):
        end = (_counters(), list(shape.kernel), window, tiling.numbers, gpu.trigger)
        calls.append((weight_gradient, (grad, x, *end), of_weight))
    _check(calls, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", range(len(DEPTHWISE)))
def test_depthwise_values_on_a_gpu(number: int, dtype: torch.dtype) -> None:
    gpu, shape = GPU.current(), DEPTHWISE[number]
    window = [*shape.stride, *shape.padding, *shape.dilation]
    x = _last(_random(shape.batch, shape.channels, shape.height, shape.width, device="cuda").to(dtype))
    grad = _random(shape.batch, shape.channels, shape.out_height, shape.out_width, seed=2, device="cuda").to(dtype)
    weight = _random(shape.channels, 1, *shape.kernel, seed=1, device="cuda").to(dtype)
    bias = _random(shape.channels, seed=3, device="cuda").to(dtype)
    y, of_x, of_weight = _exact(_last(grad), x, weight, window)
    calls: list[tuple[Any, tuple[Any, ...], Tensor]] = []
    for tiling in depthwise_forward_candidates(shape, gpu, itemsize=dtype.itemsize):
        end = (window, tiling.numbers, gpu.trigger)
        calls.append((depthwise_convolution, (x, weight, None, *end), y))
        calls.append((depthwise_convolution, (x, weight, bias, *end), y + bias.double()[:, None, None]))
    for tiling in depthwise_image_candidates(shape, gpu, itemsize=dtype.itemsize):
        end = ([shape.height, shape.width], window, tiling.numbers, gpu.trigger)
        calls.append((depthwise_image_gradient, (_last(grad), weight, *end), of_x))
    for sums in depthwise_weight_candidates(shape, gpu):
        size = (_counters(), list(shape.kernel), window, sums.numbers, gpu.trigger)
        calls.append((depthwise_weight_gradient, (_last(grad), x, *size), of_weight))
    _check(calls, gpu)


def _counters() -> Tensor:
    return torch.zeros(1 << 16, dtype=torch.int32, device="cuda")


def _check(calls: Sequence[tuple[Any, tuple[Any, ...], Tensor]], gpu: GPU) -> None:
    """Check that each call is as near to float64 as its dtype allows, and repeats its bits twenty times."""
    compile_all([launch_of(op, *args).job for op, args, _ in calls], gpu=gpu)
    for op, args, exact in calls:
        made = [op(*args) for _ in range(20)]
        assert all(torch.equal(each, made[0]) for each in made)
        error = (made[0].double() - exact).norm() / exact.norm()
        eps = 2.0**-10 if made[0].dtype is torch.float32 else torch.finfo(made[0].dtype).eps
        assert error < eps, f"{op}: {error} of the length of the result"
        assert (made[0].double() - exact).abs().max() < 8 * eps * exact.abs().max()
