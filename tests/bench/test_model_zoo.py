"""The benchmark of other libraries' models: outcomes, and the table."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from arithmetic import arithmetic
from torch import nn

from bench import environment, model_zoo
from bench.model_zoo import STATUSES, run
from nimblec.optimize.o2 import TRITON_NORMS
from nimblec.optimize.pipeline import Pass, Phase, Pipeline, Recipe


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with arithmetic("fp32"):
        yield


def convolutional() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)
    return nn.Sequential(*layers), (torch.randn(1, 3, 8, 8),)


def test_a_model_passes_with_fewer_calls() -> None:
    result = run("convolutional", convolutional)
    assert result is not None
    assert result.status == "pass"
    assert result.calls[0] > 2
    assert result.calls[1:] == (2, 4)  # ours read channels last: a copy of the images, and one of the result


@pytest.mark.parametrize(("factor", "error"), [(2.0, 1.0), (float("nan"), float("nan"))])
def test_a_wrong_result_is_told(factor: float, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = Pipeline(Phase(name="wrong", passes=(Pass(run=partial(_scale, factor), reason="wrong anywhere"),)))
    *right, regions = TRITON_NORMS.pipelines
    monkeypatch.setattr(model_zoo, "TRITON_NORMS", Recipe("wrong", *right, scaling, regions))
    result = run("convolutional", convolutional)
    assert result is not None
    assert result.status == "wrong"
    assert result.error == pytest.approx(error, rel=0.1, nan_ok=True)


def _scale(factor: float, module: torch.fx.GraphModule) -> None:
    output = module.graph.output_node()
    (last,) = output.args[0]  # type: ignore[misc]
    with module.graph.inserting_before(output):
        output.args = ((module.graph.call_function(torch.ops.aten.mul.Tensor, (last, factor)),),)


class Refused(nn.Module):
    """Looks at a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers to numbers."""
        return x * x.sum().item()


class Broken(nn.Module):
    """Cannot be run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Seven numbers, where there are three."""
        return x.reshape(7)


@pytest.mark.parametrize(("module", "status"), [(Refused(), "refused"), (Broken(), "error")])
def test_what_does_not_come_through_is_told(module: nn.Module, status: str) -> None:
    result = run("module", lambda: (module, (torch.ones(3),)))
    assert result is not None
    assert result.status == status
    assert result.message


def test_large_models_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_zoo, "LARGEST", 100)
    assert run("convolutional", convolutional) is None


def test_the_table_counts_models_and_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_zoo, "RESULTS", tmp_path)
    monkeypatch.setattr(model_zoo, "LIBRARIES", {"some": None})
    results: list[dict[str, Any]] = [
        {"status": s, "calls": [9, 5, 3] if s == "pass" else []} for s in ("pass", *STATUSES)
    ]
    environment.write_results(tmp_path / "model_zoo_some.json", results)
    row, _, provenance = model_zoo.markdown().splitlines()[-3:]
    assert row == "| 5 of some | 2 | 1 | 1 | 1 | 18 | 10 | 6 |"
    assert provenance.startswith(f"Commit {environment.commit()[:12]}; ")
