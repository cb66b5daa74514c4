"""Models as flat graphs of ATen calls, and fused: they still return what their authors meant."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import entry_models
import pytest
import torch
from calling import Looking, place
from torch import nn

from nimblec.base.errors import TraceError
from nimblec.optimize.pipeline import Runs, Setting
from nimblec.optimize.rewrites import FUSED_REGIONS
from nimblec.pytorch import flat
from nimblec.pytorch.aten_graph import record_exported
from nimblec.pytorch.flat import flattened, written_storages
from nimblec.pytorch.model import TorchModel


class Nested(nn.Module):
    """Takes a dict and a number, returns a dict with a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, batch: dict[str, torch.Tensor], power: int) -> dict[str, Any]:
        """Map (n, 8) twice to (n, 4) and its parts."""
        y = self.norm(self.linear(batch["a"]) + self.linear(batch["b"]).sigmoid() ** power)
        return {"all": y, "parts": (y.mean(-1), y.argmax(-1)), "none": None}


@pytest.fixture
def model() -> Iterator[TorchModel]:
    torch.manual_seed(0)
    example = {"a": torch.randn(3, 8), "b": torch.randn(3, 8)}
    with torch.no_grad():
        yield place(Nested().eval(), (example, 2))


def run(model: TorchModel) -> dict[str, Any]:
    result: dict[str, Any] = model.run(lambda _source: None)
    return result


def test_a_flat_model_returns_the_same_in_the_same_structure(model: TorchModel) -> None:
    expected = run(model)
    found = flattened(model)
    assert found.is_flat
    torch.testing.assert_close(run(found), expected)
    assert flattened(found) is found


@pytest.mark.parametrize("entry", ["add", "nested"])
def test_exported_module_is_recorded_without_another_export(
    entry: str, model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding = place(entry_models.Counter(), (torch.ones(4),))
    plain = model if entry == "nested" else replace(adding, writes=("total",))
    exported = replace(
        plain, module=torch.export.export(plain.module, plain.args, plain.kwargs).module(check_guards=False)
    )
    with monkeypatch.context() as patched:
        patched.setattr(flat, "record_exported", lambda *_, **__: None)
        expected = flattened(exported)
    monkeypatch.delattr(torch.export, "export")
    found = flattened(exported)
    assert str(found.module.graph) == str(expected.module.graph)
    torch.testing.assert_close(run(found), run(expected))


def test_exported_module_that_writes_slices_is_exported_again() -> None:
    class Sliced(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y[:, 0] += 1
            return y

    x = torch.randn(3, 4)
    exported = place(torch.export.export(Sliced(), (x,)).module(check_guards=False), (x,))
    assert record_exported(exported.module, (x,), (), device="cpu") is None
    torch.testing.assert_close(run(flattened(exported)), Sliced()(x))


def test_a_flat_model_computes_from_what_its_inputs_hold(model: TorchModel) -> None:
    flat = flattened(model)
    before = run(flat)["all"]
    for _, tensor in flat.inputs:
        tensor.mul_(-1)
    assert not torch.equal(run(flat)["all"], before)
    torch.testing.assert_close(run(flat), run(model))


def test_a_fused_model_returns_the_same(model: TorchModel) -> None:
    fused = Runs(model, Setting(device="cpu"))(*FUSED_REGIONS)
    torch.testing.assert_close(run(fused), run(model))


def test_what_another_entry_writes_is_read_where_it_lies() -> None:
    calls = {name: place(module, (x,)) for name, (module, x) in entry_models.counting().items()}
    written = written_storages(calls["add"])
    assert written == {calls["add"].module.total.untyped_storage()._cdata}
    assert written_storages(calls["total"]) == frozenset()
    with torch.no_grad():
        made = {
            name: Runs(replace(call, written_elsewhere=written), Setting(device="cpu"))(*FUSED_REGIONS)
            for name, call in calls.items()
        }
        for count in (1, 2, 3):
            assert made["add"].run(lambda _source: None).tolist() == [count] * 4
            assert made["total"].run(lambda _source: None).tolist() == [count] * 4


def test_what_is_no_graph_of_pure_calls_is_refused() -> None:
    with pytest.raises(TraceError):
        flattened(place(Looking().eval(), (torch.randn(2, 2),)))
