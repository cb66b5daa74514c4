"""Convolutions and products on a GPU: values of the best candidates, counters, and twenty runs with the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nimblec.kernels.gpu import GPU
from nimblec.kernels.products import gemm_op as ops
from nimblec.kernels.products.depthwise_op import depthwise, pack_depthwise
from nimblec.kernels.products.depthwise_tilings import depthwise_candidates
from nimblec.kernels.products.gemm_op import Arithmetic
from nimblec.kernels.products.gemm_tilings import Tiling, candidates, row_candidates
from nimblec.kernels.products.packing import pack_convolution, pack_linear
from nimblec.kernels.reductions.norm_op import normalized
from nimblec.kernels.reference import Prologue, finish
from nimblec.kernels.shapes import Convolution, product
from nimblec.kernels.timing import GraphTimer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

SHAPES = {
    "3x3": Convolution(batch=1, height=7, width=7, channels=512, out_channels=512, kernel=(3, 3), padding=(1, 1)),
    "stem": Convolution(
        batch=1, height=64, width=64, channels=3, out_channels=24, kernel=(7, 7), stride=(2, 2), padding=(3, 3)
    ),
    "projection": Convolution(batch=2, height=14, width=14, channels=96, out_channels=40, stride=(2, 2)),
    "groups": Convolution(
        batch=2, height=14, width=14, channels=32, out_channels=144, kernel=(3, 3), padding=(1, 1), groups=3
    ),
}


_EPS: dict[Arithmetic, float] = {"tf32": 2**-9, "tf32x3": 2**-20}
"""What sums of products of float32 may be off by: TF32 cuts off all but 10 bits of both factors."""


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [(torch.float16, "tf32"), (torch.bfloat16, "tf32"), (torch.float32, "tf32"), (torch.float32, "tf32x3")],
    ids=str,
)
def test_convolutions(name: str, dtype: torch.dtype, arithmetic: Arithmetic) -> None:
    shape = SHAPES[name]
    x = torch.randn(shape.batch, shape.channels * shape.groups, shape.height, shape.width, device="cuda").to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(shape.out_channels, shape.channels, *shape.kernel, device="cuda") / shape.depth**0.5).to(
        dtype
    )
    bias = torch.randn(shape.out_channels, device="cuda", dtype=dtype)
    geometry = (shape.stride, shape.padding, 1, shape.groups)
    total = functional.conv2d(x.double(), weight.double(), bias.double(), *geometry)
    residual = torch.randn_like(total.to(dtype), memory_format=torch.channels_last)
    eps = _EPS[arithmetic] if dtype is torch.float32 else torch.finfo(dtype).eps
    for tiling in candidates(shape, GPU.current(), limit=2, itemsize=dtype.itemsize):
        arrived = _counters(shape, tiling)
        results = [
            ops.convolution(
                x, pack_convolution(weight, tiling), bias, residual, arrived, shape.out_channels, shape.kernel,
                shape.stride, shape.padding, shape.dilation, "relu", tiling.numbers, "late", arithmetic=arithmetic,
                groups=shape.groups,
            )
            for _ in range(20)
        ]  # fmt: skip
        _check(results, finish(total, residual, "relu"), arrived, eps=eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_part_of_larger_images(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    x = torch.randn(shape.batch, shape.channels * shape.groups, shape.height, shape.width, device="cuda").to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(shape.out_channels, shape.channels, *shape.kernel, device="cuda").to(dtype)
    for tiling in candidates(shape, GPU.current(), limit=4, itemsize=dtype.itemsize):
        arguments = (
            x, pack_convolution(weight, tiling), None, None, _counters(shape, tiling), shape.out_channels, shape.kernel,
            shape.stride, shape.padding, shape.dilation, "relu", tiling.numbers, "late",
        )  # fmt: skip
        how: dict[str, Any] = {"arithmetic": "tf32x3", "groups": shape.groups}
        expected = ops.convolution(*arguments, **how)
        whole = torch.full_like(torch.cat([expected] * 3, 1), torch.nan)
        begin, end = shape.out_channels, 2 * shape.out_channels
        ops.convolution_into(*arguments, **how, out=whole[:, begin:end])
        assert torch.equal(whole[:, begin:end], expected)
        assert whole[:, :begin].isnan().all()
        assert whole[:, end:].isnan().all()


@pytest.mark.parametrize(
    "activation", ["none", "silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "hardswish", "leaky_relu 0.1"]
)
def test_products(activation: str) -> None:
    shape = product(100, 768, 200)
    x = torch.randn(100, 768, device="cuda").half()
    weight = (torch.randn(768, 200, device="cuda") / 768**0.5).half()
    total = x.double() @ weight.double()
    for tiling in candidates(shape, GPU.current(), limit=2):
        arrived, packed = _counters(shape, tiling), pack_linear(weight, tiling)
        results = [
            ops.linear(x, packed, None, None, arrived, 200, activation, tiling.numbers, "late") for _ in range(20)
        ]
        _check(results, finish(total, None, activation), arrived)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 100])
def test_gated_rows(dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 512, device="cuda").to(dtype), torch.randn(512, 1536, device="cuda").to(dtype) / 16
    shape = product(rows, 512, 1536)
    passed, other = (x.double() @ weight.double()).to(dtype).double().unflatten(1, (-1, 2)).unbind(2)
    for tiling in row_candidates(shape) if rows == 1 else candidates(shape, GPU.current(), splits=(1,)):
        arrived, end = _counters(shape, tiling), (1536, "silu", tiling.numbers, "late")
        found = ops.linear(x, pack_linear(weight, tiling), None, None, arrived, *end, gated=True)
        expected = (functional.silu(passed) * other).to(dtype)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


ROWS, COLUMNS, WIDE = 197, 768, 3072


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norms_between_products(dtype: torch.dtype, rms: bool) -> None:
    """A transformer without attention, all launches programmatic, against one after the other."""
    x = torch.randn(ROWS, COLUMNS, device="cuda").to(dtype)
    up = (torch.randn(COLUMNS, WIDE, device="cuda") / COLUMNS**0.5).to(dtype)
    down = (torch.randn(WIDE, COLUMNS, device="cuda") / WIDE**0.5).to(dtype)
    pairs = (candidates(product(ROWS, *sizes), GPU.current(), limit=3) for sizes in ((COLUMNS, WIDE), (WIDE, COLUMNS)))
    for tilings in zip(*pairs, strict=True):
        residual, result = _blocks(x, up, down, tilings, rms, "late", 1)
        inner = functional.gelu(x.double() @ up.double()).to(dtype)
        normal = normalized(residual, None, None, 1e-5, rms, torch.float32).double()
        eps = 4 * torch.finfo(dtype).eps
        _check([residual], inner.double() @ down.double() + x, None, eps=eps)
        _check([result], functional.gelu(normal @ up.double()), None, eps=eps)
        _, apart = _blocks(x, up, down, tilings, rms, "none", 20)
        for _ in range(10):
            assert torch.equal(_blocks(x, up, down, tilings, rms, "late", 20)[1], apart)


def _blocks(
    x: Tensor, up: Tensor, down: Tensor, tilings: tuple[Tiling, ...], rms: bool, trigger: str, length: int
) -> tuple[Tensor, Tensor]:
    """Return the sum of all blocks' results and ``x``, and what the first product makes of its norm."""
    there, back = tilings
    arrived = _counters(product(ROWS, COLUMNS, WIDE), there), _counters(product(ROWS, WIDE, COLUMNS), back)
    packed = pack_linear(up, there), pack_linear(down, back)
    norm = {"column_sums": up.float().sum(0), "eps": 1e-5, "rms": rms}
    wider = (None, None, arrived[0], WIDE, "gelu", there.numbers, trigger)
    result = ops.linear(x, packed[0], *wider)
    for _ in range(length):
        end = (None, x, arrived[1], COLUMNS, "none", back.numbers, trigger)
        x, moments = ops.linear_and_moments(result, packed[1], *end)
        result = ops.linear(x, packed[0], *wider, moments=moments, **norm)
    return x, result


def test_long_sums_in_three_products_keep_all_bits() -> None:
    shape = product(64, 4608, 64)
    x, weight = (torch.rand(size, device="cuda") + 0.5 for size in ((64, 4608), (4608, 64)))  # nothing cancels
    expected = x.double() @ weight.double()
    x_odd = x.clone()
    x_odd[0, 7], x_odd[1, 8] = torch.inf, torch.nan
    for tiling in candidates(shape, GPU.current(), itemsize=4):
        arrived, packed = _counters(shape, tiling), pack_linear(weight, tiling)
        end = (packed, None, None, arrived, 64, "none", tiling.numbers, "late")
        error = ops.linear(x, *end, arithmetic="tf32x3") / expected - 1
        assert error.abs().max() < 2**-19, tiling
        odd = ops.linear(x_odd, *end, arithmetic="tf32x3")
        assert odd[0].isposinf().all()
        assert odd[1].isnan().all()
        assert odd[2:].isfinite().all()


@pytest.mark.parametrize("trigger", ["none", "late"])
@pytest.mark.parametrize("name", ["3x3", "projection"])
def test_prologues(name: str, trigger: str) -> None:
    shape = SHAPES[name]
    x = torch.randn(shape.batch, shape.channels * shape.groups, shape.height, shape.width, device="cuda").half()
    x = x.contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(shape.out_channels, shape.channels, *shape.kernel, device="cuda") / shape.depth**0.5).half()
    scale, shift = torch.randn(2, shape.channels, device="cuda")
    gate = torch.rand(shape.batch, shape.channels, 1, 1, device="cuda").half()
    read = Prologue(scale=scale, shift=shift, gate=gate, activation="relu")
    total = functional.conv2d(read(x.float()).half().double(), weight.double(), None, shape.stride, shape.padding)
    for tiling in candidates(shape, GPU.current(), limit=2):
        arrived = _counters(shape, tiling)
        results = [
            ops.convolution(
                x, pack_convolution(weight, tiling), None, None, arrived, shape.out_channels, shape.kernel,
                shape.stride, shape.padding, shape.dilation, "none", tiling.numbers, trigger,
                scale=scale, shift=shift, gate=gate, before="relu",
            )
            for _ in range(20)
        ]  # fmt: skip
        _check(results, total, arrived)


@pytest.mark.parametrize(
    ("trigger", "dtype", "size", "out"),
    [
        ("none", torch.float16, 5, 84),
        ("late", torch.float16, 5, 84),
        ("late", torch.float32, 5, 84),
        ("late", torch.float16, 3, 168),
        ("late", torch.float16, 13, 84),
    ],
)
def test_depthwise(trigger: str, dtype: torch.dtype, size: int, out: int) -> None:
    kernel, padding = (size, size), (size // 2, size // 2)
    shape = Convolution(batch=2, height=21, width=20, channels=84, out_channels=out, kernel=kernel, padding=padding)
    x = torch.randn(2, 84, 21, 20, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(out, 1, *kernel, device="cuda", dtype=dtype) / size
    gate = torch.rand(2, 84, 1, 1, device="cuda", dtype=dtype)
    read = Prologue(gate=gate, activation="relu")
    total = functional.conv2d(read(x.double()), weight.double(), None, 1, padding, 1, 84)
    for tiling in depthwise_candidates(shape, GPU.current(), limit=2):
        packed = pack_depthwise(weight, tiling)
        geometry = shape.kernel, shape.stride, shape.padding, shape.dilation
        results = [
            depthwise(
                x, packed, None, None, out, *geometry, "silu", tiling.numbers, trigger, gate=gate, before="relu"
            )
            for _ in range(20)
        ]  # fmt: skip
        _check(results, finish(total, None, "silu"), None, eps=max(torch.finfo(dtype).eps, _EPS["tf32x3"]))


def test_a_timer_tells_a_long_call_from_a_short_one() -> None:
    timer = GraphTimer(GPU.current(), length=8, repeats=5)
    x = torch.ones(64 << 20, device="cuda")
    long, short = timer(lambda _: x.neg()), timer.screen(length=4)(lambda _: x[:1024].neg())
    assert 10 * short < long < 10_000


def _counters(shape: Convolution, tiling: Tiling) -> Tensor | None:
    down, across = tiling.tiles(shape)
    return torch.zeros(down * across, dtype=torch.int32, device="cuda") if tiling.split_k > 1 else None


def _check(results: list[Tensor], expected: Tensor, arrived: Tensor | None, *, eps: float | None = None) -> None:
    """Check results, within ``eps`` of the multiplied numbers if it is given."""
    eps = eps or torch.finfo(results[0].dtype).eps
    torch.testing.assert_close(results[0].double(), expected, atol=4 * eps, rtol=eps)
    assert all(torch.equal(result, results[0]) for result in results)
    assert arrived is None or not bool(arrived.any())
