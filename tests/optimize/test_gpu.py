"""The optimiser on a GPU: fused calls and generated kernels run, with results as near to the truth as before."""

import importlib
from collections.abc import Sequence

import pytest
import torch
from families import FAMILIES
from rewriting import DenseNet, compile_regions, counts, optimize, randomize
from torch import Tensor, fx, nn

from nimblec.graph.rewriter import fake
from nimblec.pytorch.aten_graph import trace

pytestmark = pytest.mark.gpu


def _on_gpu(name: str, dtype: torch.dtype) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    module, args = DenseNet.small() if name == "densenet" else importlib.import_module(f"families.{name}").small()
    inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in args)
    graph = trace(randomize(module).to(dtype), inputs, device="cuda").module
    return graph, tuple(t.cuda() for t in inputs)


def _run(module: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [t.double() for t in module(*inputs)]


def _error(truth: Sequence[Tensor], results: Sequence[Tensor]) -> float:
    return max(float((b - a).norm() / a.norm()) for a, b in zip(truth, results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*FAMILIES, "densenet"])
def test_a_family(name: str, dtype: torch.dtype) -> None:
    before, inputs = _on_gpu(name, dtype)
    exact, exact_inputs = _on_gpu(name, torch.float64)
    truth = _run(exact, exact_inputs)
    least = (64 if dtype is torch.float32 else 16) * torch.finfo(dtype).eps  # Winograd may be chosen for one alone
    allowed = max(2 * _error(truth, _run(before, inputs)), least)
    after = optimize(before, device="cuda")
    assert _error(truth, _run(after, inputs)) <= allowed
    for wanted, got in zip(before(*inputs), after(*inputs), strict=True):
        assert (wanted.dtype, wanted.shape, wanted.stride()) == (got.dtype, got.shape, got.stride())
    compiled = compile_regions(after)
    assert _error(truth, _run(compiled, inputs)) <= allowed
    if name == "resnet" and dtype is torch.float16:
        assert counts(after)["cudnn_convolution_relu"] + counts(after)["cudnn_convolution_add_relu"] == 11
    if name == "bert" and dtype is not torch.float32:
        assert counts(after)["scaled_dot_product_attention"] == 2
    if name in ("mobilenet", "bert", "unet"):
        assert any(key.startswith("fused_") for key in counts(compiled))


def _graph(module: nn.Module, *inputs: Tensor) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    on_gpu = tuple(t.cuda() for t in inputs)
    return trace(module.cuda(), on_gpu, device="cuda").module, on_gpu


def _assert_as_near(before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for wanted, got in zip(before(*inputs), after(*inputs), strict=True):
            assert (wanted.dtype, wanted.shape, wanted.stride()) == (got.dtype, got.shape, got.stride())
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


class _Attention(nn.Module):
    """Two layers of attention with one constant boolean mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend twice; queries, keys and values are (batch, heads, tokens, size)."""
        for _ in range(2):
            q = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return q


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [17, 64])
@pytest.mark.parametrize("kind", ["all", "causal", "some"])
def test_constant_masks(kind: str, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    mask = {"all": mask, "causal": mask.tril(), "some": (torch.rand(mask.shape) < 0.5) | mask.triu(tokens - 1)}[kind]
    mask[..., 0] = True
    inputs = tuple(torch.randn(2, 4, tokens, 64, dtype=dtype) for _ in range(3))
    before, on_gpu = _graph(_Attention(mask), *inputs)
    after = optimize(before, device="cuda")
    masks = {fake(n.args[3]).dtype if n.args[3] else n.args[5] for n in after.graph.nodes if "scaled" in str(n.target)}
    assert masks == {"all": {False}, "causal": {True}, "some": {dtype}}[kind]
    _assert_as_near(before, after, on_gpu)


class _LanguageModel(nn.Module):
    """An embedding and a head that share weights of an odd length."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(words, size) / size**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, words)."""
        return nn.functional.linear(nn.functional.embedding(tokens, self.words) * 8, self.words)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_padded_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    before, inputs = _graph(_LanguageModel(4099, 256).to(dtype), torch.randint(4099, (2, 16)))
    after = optimize(before, device="cuda")
    assert {fake(n).shape[1] for n in after.graph.nodes if n.target is torch.ops.aten.mm.default} == {4104}
    _assert_as_near(before, after, inputs)


class _Stencils(nn.Module):
    """Single calls between convolutions, each slow alone."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 1, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 16, 32, 32) to (N, 16, 16, 16)."""
        f = nn.functional
        first, second, third, fourth, fifth = self.convolutions
        x = second(f.max_pool2d(first(x), 3, 2, 1))
        x = third(f.avg_pool2d(x, 3, 1, 1, count_include_pad=False))
        x = fourth(self.norm(x))
        x = fifth(f.interpolate(x, scale_factor=2, mode="bilinear"))
        return f.adaptive_avg_pool2d(x, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_single_calls_as_regions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 16, 32, 32, dtype=dtype).to(memory_format=torch.channels_last)
    before, inputs = _graph(_Stencils().to(dtype), images)
    after = compile_regions(optimize(before, device="cuda"))
    assert set(counts(after)) - {"convolution"} == {key for key in counts(after) if key.startswith("fused_")}
    _assert_as_near(before, after, inputs)
