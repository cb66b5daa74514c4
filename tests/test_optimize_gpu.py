"""The optimiser on a GPU: fused calls and generated kernels run, with results as near to the truth as before."""

import importlib
from collections.abc import Sequence

import pytest
import torch
from rewriting import FAMILIES, DenseNet, counts, randomize
from torch import Tensor, fx

from nimblec.frontend.aten_graph import trace

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
    from nimblec.optimize import optimize
    from nimblec.optimize.inductor import compile_regions

    before, inputs = _on_gpu(name, dtype)
    exact, exact_inputs = _on_gpu(name, torch.float64)
    truth = _run(exact, exact_inputs)
    allowed = max(2 * _error(truth, _run(before, inputs)), 16 * torch.finfo(dtype).eps)
    after = optimize(before, device="cuda")
    assert _error(truth, _run(after, inputs)) <= allowed
    for wanted, got in zip(before(*inputs), after(*inputs), strict=True):
        assert (wanted.dtype, wanted.shape, wanted.stride()) == (got.dtype, got.shape, got.stride())
    compiled = compile_regions(after)
    assert _error(truth, _run(compiled, inputs)) <= allowed
    if name == "resnet" and dtype is torch.float16:
        assert counts(after)["cudnn_convolution_relu"] + counts(after)["cudnn_convolution_add_relu"] == 17
    if name == "bert" and dtype is not torch.float32:
        assert counts(after)["scaled_dot_product_attention"] == 2
    if name in ("mobilenet", "bert", "unet"):
        assert any(key.startswith("fused_") for key in counts(compiled))
