"""The ways of each level, as far as they can be listed without a GPU."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_zoo
import pytest
import torch
from calling import Looking, place
from torch import fx, nn

from nimblec.base.errors import CompileError, TraceError
from nimblec.kernels.gpu import SM_90
from nimblec.optimize import o2
from nimblec.optimize.pipeline import Pipeline, Setting
from nimblec.optimize.rewrites import REGIONS, REWRITES
from nimblec.optimize.variants import Variant, variants
from nimblec.plan.timing_cache import TimingCache
from nimblec.pytorch.model import TorchModel


def placed(module: nn.Module) -> TorchModel:
    return place(module.eval(), (torch.randn(4, 8),))


@pytest.fixture
def times(tmp_path: Path) -> TimingCache:
    return TimingCache(tmp_path / "times.json")


def test_level_0_is_the_model_itself(times: TimingCache) -> None:
    model = placed(nn.Linear(8, 8))
    way, graph = variants(model, 0, None, times)
    assert way.is_original
    assert graph.is_fallback, "of a module that makes loops or branches of torch"
    assert way.make() is model


def test_level_0_in_half_precision_is_cast(times: TimingCache) -> None:
    (way,) = variants(placed(nn.Linear(8, 8)), 0, torch.bfloat16, times)
    made = way.make()
    assert {b.dtype for b in made.module.buffers()} == {torch.bfloat16}
    assert made.run(lambda _source: None).dtype is torch.float32


def test_level_1_is_one_way_and_level_2_several(times: TimingCache) -> None:
    model = placed(nn.Linear(8, 8))
    assert [way.name for way in variants(model, 1, None, times)] == ["fused regions"]
    names = [way.name for way in variants(model, 2, None, times)]  # nothing is made: no GPU to choose on
    assert names == ["Triton kernels", "fused regions", "as it runs"]
    half = [way.name for way in variants(model, 2, torch.float16, times)]
    assert half == ["Triton kernels", "fused regions", "cast"]


def test_what_is_no_graph_goes_through_torch_compile(times: TimingCache) -> None:
    (way,) = variants(placed(Looking()), 1, None, times)
    made = way.make()
    assert made.is_compiled
    assert "fused by torch.compile alone" in made.notes[0]


def test_torch_compile_is_tried_once(times: TimingCache) -> None:
    made = []
    for way in variants(placed(Looking()), 2, None, times):
        with suppress(TraceError):
            made.append((way.name, way.make().is_compiled))
    assert made == [("fused regions", True), ("as it runs", False)]


def test_torch_compile_is_not_given_what_another_entry_writes(times: TimingCache) -> None:
    """It takes weights for constants."""
    module = nn.Linear(8, 8)
    written = frozenset({module.weight.untyped_storage()._cdata})
    names = [way.name for way in variants(replace(placed(module), written_elsewhere=written), 2, None, times)]
    assert names == ["Triton kernels", "fused regions"]
    (way,) = variants(replace(placed(Looking()), written_elsewhere=written), 1, None, times)
    with pytest.raises(TraceError):
        way.make()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_model_stays_as_it_is(times: TimingCache) -> None:
    model = placed(nn.Linear(8, 8))
    compiled = TorchModel(module=torch.compile(model.module), args=model.args, kwargs={}, inputs=model.inputs)
    for level in (0, 1, 2):
        (way,) = variants(compiled, level, None, times)
        assert way.is_original
    with pytest.raises(CompileError, match="--precision"):
        list(variants(compiled, 1, torch.float16, times))


class Small(nn.Module):
    """A convolution, a norm and a linear: something for each family of kernels but attention."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.linear = nn.Conv2d(8, 8, 3), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images of 8 channels to rows of 8."""
        return self.linear(self.norm(torch.relu(self.convolution(x)).flatten(2).transpose(1, 2)))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Pipeline]:
    """Return the pipelines that are called, in order; they do what they do, but for the regions."""
    found: list[Pipeline] = []
    call = Pipeline.__call__

    def seen(self: Pipeline, graph: fx.GraphModule, setting: Setting, *how: Any) -> fx.GraphModule:
        found.append(self)
        return graph if self is REGIONS else call(self, graph, replace(setting, device="cuda"), *how)

    monkeypatch.setattr(Pipeline, "__call__", seen)
    return found


def test_the_compiler_and_the_model_zoo_call_the_same_pipelines(
    called: list[Pipeline], times: TimingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(o2, "fastest", lambda _times: o2.first(SM_90))
    names = []
    module, x = Small().eval(), torch.randn(1, 8, 6, 6)
    for variant in variants(place(module, (x,)), 2, None, times):
        names.append(variant.name)
        variant.make()
    by_compiler = called.copy()
    called.clear()
    model_zoo.compared(module, (x,))
    assert called == [REWRITES, o2.KERNELS]
    assert by_compiler == [REWRITES, o2.KERNELS, REGIONS, REGIONS]  # rewritten once
    assert names == ["Triton kernels", "fused regions", "as it runs"]


@pytest.mark.usefixtures("called")
def test_level_2_falls_back_on_regions(times: TimingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(o2, "fastest", lambda _times: o2.first(SM_90))
    module = Small().eval()
    written = frozenset({module.linear.weight.untyped_storage()._cdata})
    alone = place(module, (torch.randn(1, 8, 6, 6),))
    for model, is_shared in ((alone, False), (replace(alone, written_elsewhere=written), True)):
        found: list[Variant] = []
        for variant in variants(model, 2, None, times):
            variant.make()
            found.append(variant)
        assert [variant.name for variant in found if variant.is_fallback] == ["fused regions"]
        assert ("as it runs" in [variant.name for variant in found]) is not is_shared


def test_pass_says_its_reason() -> None:
    for pipeline in o2.TRITON:
        for each in pipeline.passes:
            assert each.summary.endswith(".")
            assert each.reason
