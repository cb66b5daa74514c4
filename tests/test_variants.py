"""The ways of each level, as far as they can be listed without a GPU."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nimblec.cache.timing_cache import TimingCache
from nimblec.cuda.variants import variants
from nimblec.errors import CompileError
from nimblec.frontend.pytorch.model import TorchModel, place


class Looking(nn.Module):
    """Decides by value: no graph of pure calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return x + 1 if x.sum() > 0 else x - 1


def placed(module: nn.Module) -> TorchModel:
    return place(module.eval(), (torch.randn(4, 8),), device="cpu")


@pytest.fixture
def times(tmp_path: Path) -> TimingCache:
    return TimingCache(tmp_path / "times.json")


def test_level_0_is_the_model_itself(times: TimingCache) -> None:
    model = placed(nn.Linear(8, 8))
    (way,) = variants(model, 0, None, times)
    assert way.is_original
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
    assert names == ["own kernels", "fused regions", "torch.compile"]
    assert "torch.compile" not in [way.name for way in variants(model, 2, torch.float16, times)]


def test_what_is_no_graph_goes_through_torch_compile(times: TimingCache) -> None:
    (way,) = variants(placed(Looking()), 1, None, times)
    made = way.make()
    assert made.is_compiled
    assert "fused by torch.compile alone" in made.notes[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_model_stays_as_it_is(times: TimingCache) -> None:
    model = placed(nn.Linear(8, 8))
    compiled = TorchModel(module=torch.compile(model.module), args=model.args, kwargs={}, inputs=model.inputs)
    for level in (0, 1, 2):
        (way,) = variants(compiled, level, None, times)
        assert way.is_original
    with pytest.raises(CompileError, match="--precision"):
        list(variants(compiled, 1, torch.float16, times))
