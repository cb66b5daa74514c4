"""Outcomes of other libraries' models through the pipelines of -O2."""

from collections.abc import Iterator
from functools import partial

import model_zoo
import pytest
import torch
from arithmetic import arithmetic
from model_zoo import run
from torch import nn

from nimblec.optimize.o2 import TRITON
from nimblec.optimize.pipeline import Pass, Phase, Pipeline


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with arithmetic("fp32"):
        yield


def convolutional() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)
    return nn.Sequential(*layers), (torch.randn(1, 3, 8, 8),)


def test_model_zoo_passes_a_model_with_fewer_calls() -> None:
    result = run("convolutional", convolutional)
    assert result is not None
    assert result.status == "pass"
    assert result.calls[0] > 2
    assert result.calls[1:] == (2, 4)  # ours read channels last: a copy of the images, and one of the result


@pytest.mark.parametrize(("factor", "error"), [(2.0, 1.0), (float("nan"), float("nan"))])
def test_model_zoo_reports_a_wrong_result(factor: float, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = Pipeline(Phase(name="wrong", passes=(Pass(run=partial(_scale, factor), reason="wrong anywhere"),)))
    *right, regions = TRITON
    monkeypatch.setattr(model_zoo, "TRITON", (*right, scaling, regions))
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
        """Map numbers to numbers."""
        return x * x.sum().item()


class Broken(nn.Module):
    """Cannot be run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Seven numbers, where there are three."""
        return x.reshape(7)


@pytest.mark.parametrize(("module", "status"), [(Refused(), "refused"), (Broken(), "error")])
def test_model_zoo_reports_refusals_and_errors(module: nn.Module, status: str) -> None:
    result = run("module", lambda: (module, (torch.ones(3),)))
    assert result is not None
    assert result.status == status
    assert result.message
