"""Triton convolutions and products in a graph: what is fused, that the values stay, and how a tiling is chosen."""

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from arithmetic import arithmetic
from rewriting import assert_same, counts, optimize, random_half, record, rewritten, run
from torch import Tensor, fx, nn
from torch.nn import functional

from nimblec.graph.rewriter import Rewriter, argument
from nimblec.graph.state import scratch
from nimblec.kernels.gpu import SM_90
from nimblec.kernels.products.depthwise_op import depthwise
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling
from nimblec.kernels.products.gemm_match import ProductRequest, requests
from nimblec.kernels.products.gemm_op import convolution, linear
from nimblec.kernels.products.gemm_rewrite import tilings, use_triton_kernels
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.optimize.passes.channels_last import propagate_channels_last
from nimblec.pytorch.aten_graph import trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OWN = (convolution, linear, depthwise)


IMAGES = random_half(2, 16, 8, 8, seed=0)
ROWS = random_half(2, 5, 24, seed=0)
WEIGHT, BIAS = random_half(16, 16, 3, 3) / 12, random_half(16, seed=2)
SCALES = random_half(16, 1, 3, 3) / 3
WIDE, NARROW = random_half(128, 16, 1, 1), random_half(16, 128, 1, 1)
SQUARE = random_half(24, 24, seed=0)
MATRIX, VECTOR = random_half(24, 24) / 5, random_half(24, seed=2)


def _tiling(request: ProductRequest) -> Tiling | DepthwiseTiling:
    if request.kind == "depthwise":
        return DepthwiseTiling(block_m=4, block_c=16, num_warps=1)
    return Tiling(block_m=16, block_n=16, block_k=32, split_k=2)


def _conv(x: Tensor, *, groups: int = 1, stride: int = 1) -> Tensor:
    return functional.conv2d(x, WEIGHT if groups == 1 else SCALES, BIAS, stride, 1, 1, groups)


def _pointwise(x: Tensor) -> Tensor:
    return functional.conv2d(x, WEIGHT[:, :, :1, :1])


def _of_pixels(x: Tensor) -> Tensor:
    """Apply norm, linear and a factor for each channel, as in ConvNeXt (Liu et al. 2022)."""
    y = functional.linear(functional.layer_norm(x.permute(0, 2, 3, 1), (16,)), WEIGHT[:, :, 0, 0] * 3, BIAS)
    return y.permute(0, 3, 1, 2) * BIAS.cos()[:, None, None]


def _norm(x: Tensor) -> Tensor:
    return functional.batch_norm(x, BIAS, SCALES[:, 0, 0, 0].abs() + 0.5, BIAS.neg(), BIAS.cos())


def _gate(x: Tensor) -> Tensor:
    return torch.sigmoid(x.mean((2, 3), keepdim=True))


def _branches(x: Tensor, after: "Callable[[Tensor], Tensor]") -> tuple[Tensor, Tensor]:
    """Return a convolution that two read, so that no launch takes in what follows it."""
    y = _conv(x)
    return after(y), functional.avg_pool2d(y, 3)


def _summed(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([y, _conv(functional.silu(y)), x], 1)


def _read_by_three(x: Tensor) -> Tensor:
    return _conv(x) * _pointwise(x) * _conv(x, groups=16)


def _with_skip(x: Tensor) -> Tensor:
    y = _conv(x)
    return y + _conv(y)


def _with_skip_of(x: Tensor) -> Tensor:
    return _conv(x) + x


def _added_to_itself(x: Tensor) -> Tensor:
    y = _conv(x)
    return y + y


def _used_twice(x: Tensor) -> Tensor:
    y = _conv(x)
    return torch.relu(y) * y


def _of_row(x: Tensor, part: int) -> Tensor:
    return _halves(x)[part]


def _halves(x: Tensor) -> tuple[Tensor, ...]:
    return functional.linear(x, torch.cat((MATRIX, SQUARE / 5))).chunk(2, -1)


def _gated(first: Tensor, second: Tensor) -> Tensor:
    return functional.silu(first) * second


FIRST = "convolution none"

MODELS: "dict[str, tuple[Callable[[Tensor], Tensor], Tensor, str]]" = {
    "plain": (_conv, IMAGES, "convolution none"),
    "relu": (lambda x: torch.relu(_conv(x)), IMAGES, "convolution relu"),
    "relu6": (lambda x: functional.relu6(_conv(x, stride=2)), IMAGES, "convolution relu6"),
    "clamp": (lambda x: torch.clamp(_conv(x), 0, 6), IMAGES, "convolution relu6"),
    "clamped otherwise": (lambda x: torch.clamp(_conv(x), -1, 6), IMAGES, "convolution none"),
    "leaky": (
        lambda x: functional.leaky_relu(_conv(functional.leaky_relu(_conv(x))), 0.2), IMAGES,
        "convolution leaky_relu 0.01, convolution leaky_relu 0.2",
    ),
    "hardswish": (lambda x: functional.hardswish(_conv(x)), IMAGES, "convolution hardswish"),
    "silu": (lambda x: functional.silu(_conv(x)), IMAGES, "convolution silu"),
    "residual": (_with_skip, IMAGES, "convolution none, convolution none residual"),
    "residual and relu": (
        lambda x: torch.relu(_with_skip(x)), IMAGES, "convolution none, convolution relu residual",
    ),
    "residual in another order": (lambda x: x + _conv(x), IMAGES, "convolution none"),
    "scaled residual": (lambda x: torch.add(_conv(x), x, alpha=2), IMAGES, "convolution none"),
    "twice": (_added_to_itself, IMAGES, "convolution none"),
    "used twice": (_used_twice, IMAGES, "convolution none"),
    "two": (lambda x: _conv(x) + _conv(x.neg()), IMAGES, "convolution none residual, convolution none"),
    "depthwise": (lambda x: functional.relu6(_conv(x, groups=16)), IMAGES, "depthwise relu6"),
    "groups": (
        lambda x: torch.relu(functional.conv2d(_conv(x), WEIGHT[:, :4], BIAS, padding=1, groups=4)), IMAGES,
        "convolution none, convolution relu",
    ),
    "relu before groups": (
        lambda x: _branches(x, lambda y: functional.conv2d(torch.relu(y), WEIGHT[:, :8], groups=2)), IMAGES,
        f"{FIRST}, convolution none after relu",
    ),
    "depthwise with a multiplier": (
        lambda x: torch.relu(functional.conv2d(x, SCALES.repeat(2, 1, 1, 1), padding=1, groups=16)) + 1,
        IMAGES, "depthwise relu",
    ),
    "relu before": (
        lambda x: _branches(x, lambda y: _conv(torch.relu(y))), IMAGES, f"{FIRST}, convolution none after relu",
    ),
    "added to the relu before": (
        lambda x: _branches(x, lambda y: y + _conv(torch.relu(y))), IMAGES,
        f"{FIRST}, convolution none residual after relu",
    ),
    "added to the relu that is read": (
        lambda x: _branches(x, lambda y: torch.relu(_with_skip_of(torch.relu(y)))), IMAGES,
        f"{FIRST}, convolution relu residual",
    ),
    "norm and relu before": (
        lambda x: _branches(x, lambda y: _conv(torch.relu(_norm(y)), groups=16)), IMAGES,
        f"{FIRST}, depthwise none after scale shift relu",
    ),
    "norm before": (
        lambda x: _branches(x, lambda y: _conv(_norm(y))), IMAGES, f"{FIRST}, convolution none after scale shift",
    ),
    "two affines before": (
        lambda x: _branches(x, lambda y: _conv(_norm(y) * BIAS[:, None, None])), IMAGES,
        f"{FIRST}, convolution none after scale shift",
    ),
    "gate before": (
        lambda x: _branches(x, lambda y: _pointwise(y * _gate(y))), IMAGES, f"{FIRST}, convolution none after gate",
    ),
    "gate and all before": (
        lambda x: _branches(x, lambda y: _pointwise(_gate(x) * functional.silu(_norm(y)))), IMAGES,
        f"{FIRST}, convolution none after scale shift gate silu",
    ),
    "gate of pixels": (
        lambda x: _branches(x, lambda y: _conv(y * x.mean(1, keepdim=True))), IMAGES, f"{FIRST}, convolution none",
    ),
    "a number before, for single pixels": (
        lambda x: _conv(x * 0.5), IMAGES[:, :, :1, :1].clone(), "convolution none after scale shift",
    ),
    "relu of a pool before": (
        lambda x: _conv(torch.relu(functional.avg_pool2d(_conv(x), 3))), IMAGES, f"{FIRST}, convolution none",
    ),
    "another's activation before": (
        lambda x: _conv(functional.silu(_conv(x))), IMAGES, "convolution silu, convolution none",
    ),
    "relu of another's activation before": (
        lambda x: _branches(x, lambda y: _summed(y, _conv(y) + y)), IMAGES,
        f"{FIRST}, convolution none residual, convolution none after silu",
    ),
    "read by three": (
        lambda x: _branches(x, lambda y: _read_by_three(torch.relu(y))), IMAGES,
        f"{FIRST}, convolution none after relu 3, convolution none after relu 3, depthwise none after relu 3",
    ),
    "read by another": (
        lambda x: _branches(x, lambda y: _conv(torch.relu(y)) * torch.relu(y)), IMAGES, f"{FIRST}, convolution none",
    ),
    "linear": (lambda x: functional.linear(x, MATRIX, VECTOR), ROWS, "linear none"),
    "no bias": (lambda x: torch.sigmoid(functional.linear(x, MATRIX)), ROWS, "linear sigmoid"),
    "gelu": (lambda x: functional.gelu(functional.linear(x, MATRIX, VECTOR)), ROWS, "linear gelu"),
    "gelu by tanh": (
        lambda x: functional.gelu(functional.linear(x, MATRIX, VECTOR), approximate="tanh"), ROWS, "linear gelu_tanh",
    ),
    "linear and residual": (lambda x: x + functional.linear(x, MATRIX, VECTOR), ROWS, "linear none residual"),
    "gelu of a linear of pixels": (
        lambda x: _branches(x, lambda y: y + functional.gelu(_of_pixels(y))), IMAGES,
        f"{FIRST}, linear gelu",
    ),
    "gelu of a linear of pixels and residual": (
        lambda x: _branches(x, lambda y: functional.gelu(_of_pixels(y) + y)), IMAGES, f"{FIRST}, linear gelu residual",
    ),
    "linear of pixels and a residual in another order": (lambda x: x + _of_pixels(x), IMAGES, "linear none"),
    "linear, transposed, and residual": (
        lambda x: functional.linear(x, MATRIX, VECTOR).t() + x.t().sin(), ROWS.reshape(10, 24),
        "linear none residual",
    ),
    "square, transposed, and residual": (
        lambda x: functional.linear(x, MATRIX, VECTOR).t() + x.t().sin(), SQUARE,
        "linear none residual",
    ),
    "linear, transposed, and another's order": (
        lambda x: functional.linear(x, MATRIX, VECTOR).t() + x.sin(), SQUARE,
        "linear none",
    ),
    "residual, transposed, and gelu": (
        lambda x: functional.gelu((x + functional.linear(x, MATRIX, VECTOR)).transpose(1, 2)), ROWS,
        "linear gelu residual",
    ),
    "gelu of heads": (
        lambda x: functional.gelu(functional.linear(x, MATRIX).reshape(2, 5, 4, 6).transpose(1, 2)), ROWS,
        "linear gelu",
    ),
    "a gated row": (
        lambda x: functional.linear(functional.silu(_of_row(x, 0)) * _of_row(x, 1), MATRIX, VECTOR), ROWS[:1, :1],
        "linear none, linear none after gate silu",
    ),
    "a gated row, the gate first": (
        lambda x: x + functional.linear(_of_row(x, 1) * functional.gelu(_of_row(x, 0)), MATRIX), ROWS[:1, :1],
        "linear none, linear none residual after gate gelu",
    ),
    "a row of two halves": (
        lambda x: x + functional.linear(_gated(*_halves(x)), MATRIX), ROWS[:1, :1],
        "linear silu gated 0, linear none residual",
    ),
    "a row of two halves, the gate first": (
        lambda x: _gated(*functional.linear(x, SQUARE, VECTOR).chunk(2, -1)[::-1]), ROWS[:1, :1],
        "linear silu gated 1",
    ),
    "products of a row that are read together": (
        lambda x: _gated(functional.linear(x, MATRIX), functional.linear(x, SQUARE)), ROWS[:1, :1],
        "linear silu gated 0",
    ),
    "gated rows": (
        lambda x: functional.linear(_gated(*_halves(x)), MATRIX), ROWS, "linear silu gated 0, linear none",
    ),
    "gated rows in another order": (
        lambda x: _gated(*(half.transpose(0, 1) for half in _halves(x))), ROWS, "linear none",
    ),
    "gelu of copied heads": (
        lambda x: functional.gelu(functional.linear(x, MATRIX).reshape(2, 5, 4, 6).transpose(1, 2).reshape(2, 120)),
        ROWS, "linear none",
    ),
}  # fmt: skip


def _told(request: ProductRequest) -> str:
    words = [request.kind, request.activation, *(["residual"] if request.residual else [])]
    words += [] if request.activated is None else ["gated", str(request.activated)]
    before = request.before
    if before is not None:
        named = {"scale": before.scale, "shift": before.shift, "gate": before.gate}
        words += ["after", *(name for name, value in named.items() if value is not None)]
        words += [before.activation] if before.activation != "none" else []
        words += [str(before.sharers)] if before.sharers > 1 else []
    return " ".join(words)


def _graph(name: str) -> tuple[fx.GraphModule, Tensor]:
    model, x, _ = MODELS[name]
    return optimize(record(model, x), device="cuda"), x


@pytest.mark.parametrize("name", MODELS)
def test_what_is_fused_and_its_values(name: str) -> None:
    module, x = _graph(name)
    asked = []

    def choose(request: ProductRequest) -> Tiling | DepthwiseTiling:
        asked.append(_told(request))
        return _tiling(request)

    own = rewritten(module, lambda m: use_triton_kernels(m, choose))
    assert ", ".join(asked) == MODELS[name][2]
    assert sum(node.target in OWN for node in own.graph.nodes) == len(asked), counts(own)
    for expected, result in zip(run(module, x), run(own, x), strict=True):
        torch.testing.assert_close(result, expected, atol=4e-3, rtol=4e-3)
        assert result.stride() == expected.stride()


def test_a_product_of_a_depth_without_tilings_of_rows_has_no_gate() -> None:
    weight = random_half(48, 300)
    module = record(lambda x: _gated(*functional.linear(x, weight).chunk(2, -1)), random_half(1, 300))
    (request,) = requests(optimize(module, device="cuda"))
    assert request.activated is None
    assert tilings(request, SM_90)


def test_counters_are_scratch_memory() -> None:
    module, _ = _graph("residual, transposed, and gelu")
    own = rewritten(module, lambda m: use_triton_kernels(m, _tiling))
    (counted,) = scratch(copy.deepcopy(own))
    assert counted.dtype == torch.int32
    (call,) = [node for node in own.graph.nodes if node.target in OWN]
    assert counted.equal(Rewriter(own).value(argument(call, 4)))


def test_double_precision_stays() -> None:
    module = record(lambda x: functional.conv2d(x, WEIGHT.double(), BIAS.double()), IMAGES.double())
    assert not list(requests(optimize(module, device="cuda")))


def _single_precision(function: "Callable[[Tensor], Tensor]", x: Tensor) -> fx.GraphModule:
    module = optimize(record(function, x), device="cuda")
    propagate_channels_last(module, {torch.float32})
    return module


@pytest.fixture(params=[True, False], ids=["tf32", "tf32x3"])
def tf32(request: pytest.FixtureRequest) -> "Iterator[bool]":
    """Return whether tensor cores may cut off bits of float32."""
    with arithmetic("tf32" if request.param else "fp32"):
        yield request.param


def test_single_precision_is_multiplied_as_torch_is_told_to(*, tf32: bool) -> None:
    convolution = _single_precision(lambda x: functional.conv2d(x, WEIGHT.float(), BIAS.float()), IMAGES.float())
    weight = torch.randn(16, 1, 3, 3)
    depthwise = _single_precision(lambda x: functional.conv2d(x, weight, groups=16), IMAGES.float())
    product = record(lambda x: x @ WEIGHT.float().flatten(1).t(), torch.randn(9, WEIGHT[0].numel()))
    wanted = "tf32" if tf32 else "tf32x3"
    found = [
        [(request.kind, request.arithmetic) for request in requests(module)]
        for module in (convolution, depthwise, product)
    ]
    assert found == [[("convolution", wanted)], [("depthwise", wanted)], [("linear", wanted)]]


@pytest.mark.usefixtures("tf32")
def test_torch_exports_whatever_the_arithmetic() -> None:
    assert counts(trace(nn.Conv2d(3, 4, 3), (torch.randn(1, 3, 8, 8),)).module)["convolution"] == 1


def test_single_precision_computes_the_same() -> None:
    x = IMAGES.float()
    before = _single_precision(lambda x: functional.conv2d(x, WEIGHT.float(), BIAS.float(), padding=1).relu(), x)
    after = rewritten(before, lambda m: use_triton_kernels(m, lambda request: tilings(request, SM_90)[0]))
    assert counts(after)["convolution"] == 1
    assert "cudnn_convolution_relu" not in counts(after)
    assert_same(before, after, x, rtol=1e-3)


@pytest.mark.parametrize("width", [4096, 8192])
def test_what_32_bits_do_not_reach_stays(width: int) -> None:
    """Kernels count elements in 32 bits: 2,048 x 8,192 pixels of 128 channels are 2 ** 31."""
    taken = int(width < 8192)
    images = torch.empty(1, 16, 2048, width, dtype=torch.float16, device="meta")
    made = optimize(record(lambda x: functional.conv2d(x, WIDE), images), device="cuda")
    read = optimize(record(lambda x: functional.conv2d(x.repeat(1, 8, 1, 1), NARROW), images), device="cuda")
    rows = torch.empty(2048 * width, 16, dtype=torch.float16, device="meta")
    product = optimize(record(lambda x: functional.linear(x, WIDE[:, :, 0, 0]), rows), device="cuda")
    assert [len(list(requests(module))) for module in (made, read, product)] == [taken] * 3


def test_a_bias_that_is_computed_stays_outside() -> None:
    module = record(lambda x: functional.conv2d(x, WEIGHT, x[0, :, 0, 0]), IMAGES)
    assert not list(requests(optimize(module, device="cuda")))


def test_a_bias_with_gaps_stays_outside() -> None:
    module = optimize(record(lambda x: functional.conv2d(x, WEIGHT, BIAS), IMAGES), device="cuda")
    (request,) = requests(module)
    assert isinstance(request.bias, fx.Node)
    bias = module.get_buffer(str(request.bias.target))
    setattr(module, str(request.bias.target), bias.repeat_interleave(2)[::2])  # as folding leaves a slice of constants
    assert not list(requests(module))
