"""Awkward modules through all rewrites of -O1 and -O2: what eager torch computes, up to rounding."""

import awkward_models
import pytest
import torch
from calling import place
from rewriting import check, optimize, with_triton_kernels
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from nimblec.graph import recorder
from nimblec.graph.definitions import Interpreter
from nimblec.pytorch.aten_graph import trace
from nimblec.pytorch.flat import flattened
from nimblec.pytorch.model import TorchModel

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of nested tensors and of windows

NOT_INFERRED = ("resizes", "pixels", *["transformer"] * torch.__version__.startswith("2.11."))
"""torch without CUDA refuses to infer what grid_sample and unfold return there; 2.11 errs about attention."""


def _tensors(result: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _compare(graph: fx.GraphModule, model: TorchModel, expected: list[Tensor], tolerance: float) -> None:
    found = Interpreter(graph).run(*(tensor for _, tensor in model.inputs))
    for wanted, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", awkward_models.MODELS)
def test_every_rewrite_keeps_the_results(name: str) -> None:
    module, args, kwargs = awkward_models.build(name)
    model = place(module, args, kwargs)
    with torch.no_grad():
        result = module(*model.args, **model.kwargs)
        expected = _tensors(result)
        tolerance = 2e-2 if torch.bfloat16 in {t.dtype for t in expected} else 1e-3
        flat = flattened(model)
        structure = pytree.tree_structure(flat.run(lambda _source: None))
        assert structure == pytree.tree_structure(result)
        _compare(flat.module, flat, expected, tolerance)
        rewritten = optimize(flat.module, device="cuda")
        check(rewritten)
        _compare(rewritten, flat, expected, tolerance)
        _compare(with_triton_kernels(rewritten), flat, expected, tolerance)


@pytest.mark.parametrize("name", [name for name in awkward_models.MODELS if name not in NOT_INFERRED])
def test_every_model_is_traced_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "on_device", lambda constants, _device: dict(constants))
    module, args, kwargs = awkward_models.build(name)
    graph = trace(module, args, kwargs, device="cuda").module.graph
    tensors = _tensors([node.meta["val"] for node in graph.nodes if "val" in node.meta])
    assert {tensor.device for tensor in tensors} == {torch.device("cuda:0")}
