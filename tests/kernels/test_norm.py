"""Triton norms in a graph: what they take, what they leave to generated kernels, and that the values stay."""

import operator
from typing import TYPE_CHECKING

import pytest
import torch
from rewriting import counts, optimize, random_half, record, rewritten, run
from torch import Tensor, fx
from torch.nn import functional

from nimblec.kernels.gpu import SM_90
from nimblec.kernels.reductions.norm_match import NormRequest, requests
from nimblec.kernels.reductions.norm_op import add_layer_norm, layer_norm
from nimblec.kernels.reductions.norm_rewrite import use_triton_norms
from nimblec.kernels.reductions.norm_tilings import Norm, NormTiling, norm_candidates

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 48


MATRIX, WEIGHT, BIAS = random_half(WIDTH, WIDTH) / 7, random_half(WIDTH, seed=2), random_half(WIDTH, seed=3)


def _linear(x: Tensor) -> Tensor:
    return functional.linear(x, MATRIX)


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), WEIGHT, BIAS)


def _rms(x: Tensor) -> Tensor:
    """T5's."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return WEIGHT * (x * torch.rsqrt(variance + 1e-6)).to(WEIGHT.dtype)


def _rms_wide(x: Tensor) -> Tensor:
    """Llama's, as it is written elsewhere too."""
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * WEIGHT


def _two_of_one_sum(x: Tensor) -> Tensor:
    total = _linear(x) + x
    return _linear(_norm(total)) + _linear(functional.layer_norm(total, (WIDTH,)))


def _post(x: Tensor) -> Tensor:
    """BERT's: each sum is read by its norm alone, each norm by a product and by the next sum."""
    for _ in range(2):
        x = _norm(x + _linear(x))
    return _linear(x)


def _pre(x: Tensor) -> Tensor:
    """GPT-2's: each sum is read by its norm and by the next sum."""
    for _ in range(2):
        x = x + _linear(_norm(x))
    return _linear(_norm(x))


MODELS: "dict[str, tuple[Callable[[Tensor], Tensor], list[str]]]" = {
    "alone": (lambda x: _linear(_norm(_linear(x))), ["layer"]),
    "without weights": (lambda x: _linear(functional.layer_norm(_linear(x), (WIDTH,), eps=0.1)), ["layer"]),
    "rms": (lambda x: _linear(_rms(_linear(x))), ["rms"]),
    "rms wide": (lambda x: _linear(_rms_wide(_linear(x))), ["rms"]),
    "rms of a sum": (lambda x: _linear(_rms(_linear(x) + x)), ["rms added"]),
    "post-norm": (_post, ["layer added", "layer added"]),
    "pre-norm": (_pre, ["layer", "layer added", "layer added"]),
    "two of one sum": (_two_of_one_sum, ["layer added", "layer"]),
    "fused with what comes before": (lambda x: _linear(_norm(x.sin())), []),
    "fused with what comes after": (lambda x: _norm(_linear(x)).sin(), []),
    "the sum read by another": (lambda x: _linear(_norm(_linear(x) + x)) * (_linear(x) + x).sin(), []),
    "a broadcast sum": (lambda x: _linear(_norm(_linear(x) + x[:, :1])), []),
    "two axes": (lambda x: _linear(functional.layer_norm(_linear(x), (5, WIDTH))), []),
    "float32": (lambda x: functional.layer_norm(_linear(x).float(), (WIDTH,)), []),
    "a computed weight": (lambda x: _linear(functional.layer_norm(_linear(x), (WIDTH,), x[0, 0])), []),
    "columns": (lambda x: functional.layer_norm(_linear(x).mT, (5,)), []),
}


def _graph(name: str) -> tuple[fx.GraphModule, Tensor]:
    x = random_half(2, 5, WIDTH, seed=9)
    return optimize(record(MODELS[name][0], x), device="cuda"), x


@pytest.mark.parametrize("name", MODELS)
def test_what_is_taken_and_its_values(name: str) -> None:
    module, x = _graph(name)
    asked = [_described(request) for request in requests(module)]
    assert asked == MODELS[name][1], module.graph
    own = rewritten(module, _with_norms)
    assert sum(node.target in {layer_norm, add_layer_norm} for node in own.graph.nodes) == len(asked)
    left = {*counts(own)} & {"native_layer_norm", "rsqrt", "mean"}
    assert not asked or not left, left
    for expected, result in zip(run(module, x), run(own, x), strict=True):
        torch.testing.assert_close(result, expected, atol=8e-3, rtol=8e-3)
        assert result.stride() == expected.stride()


def _with_norms(module: fx.GraphModule) -> None:
    use_triton_norms(module, _first)


def _first(request: NormRequest) -> NormTiling:
    return norm_candidates(request.shape, SM_90)[0]


def _described(request: NormRequest) -> str:
    return ("rms" if request.shape.rms else "layer") + (" added" if request.residual else "")


def test_a_norm_in_half_precision_of_a_float32_model() -> None:
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    weights = MATRIX.float(), WEIGHT.float(), BIAS.float()
    norm = lambda x: functional.layer_norm(functional.linear(x, weights[0]), (WIDTH,), *weights[1:])  # noqa: E731
    module = optimize(record(lambda x: functional.linear(norm(x), weights[0]), x), device="cuda", dtype=torch.half)
    own = rewritten(module, _with_norms)
    assert counts(own)["layer_norm"] == 1
    torch.testing.assert_close(run(own, x), run(module, x), atol=8e-3, rtol=8e-3)


def test_the_sum_is_dropped_where_nobody_reads_it() -> None:
    module, _ = _graph("post-norm")
    own = rewritten(module, _with_norms)
    assert [node.args[1] for node in own.graph.nodes if node.target is operator.getitem] == [0, 0]


def test_a_number_has_no_rows() -> None:
    assert not list(requests(record(_rms_wide, torch.tensor(3.0))))


@pytest.mark.parametrize("columns", [1, 48, 768, 1000, 4096, 8192])
def test_candidates_hold_whole_rows(columns: int) -> None:
    shape = Norm(rows=3, columns=columns)
    found = norm_candidates(shape, SM_90)
    assert found
    assert columns <= shape.width < 2 * max(columns, 32)
    assert all(tiling.block_r == 1 for tiling in found)
