"""What tells a wrong step from one whose sums are rounded otherwise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nimblec
from nimblec.base.errors import UnsupportedModelError
from nimblec.training import check

Change = Callable[[int, Tensor], Tensor]


def _changed(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the graph's results, the loss and then what the state becomes, be ``change`` of their place and them."""
    trace = check.trace

    def changed(*args: Any, **kwargs: Any) -> Any:
        step = trace(*args, **kwargs)
        graph: Any = step.graph
        return replace(step, graph=lambda *values: [change(n, result) for n, result in enumerate(graph(*values))])

    monkeypatch.setattr(check, "trace", changed)


def _step(rate: float = 0.1) -> None:
    """Make a step of norms of two images, which amplify; the gradient of a bias before a norm is zero."""
    torch.manual_seed(0)
    layers = [(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*(layer for each in layers for layer in each), nn.Linear(16, 3))
    batch = torch.randn(2, 16), torch.tensor([0, 2])
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    nimblec.training_step(model, nn.functional.cross_entropy, optimizer, batch)


def _rounded(_: int, value: Tensor) -> Tensor:
    return value * (1 + 3e-6 * torch.rand_like(value)) + 3e-11 if value.is_floating_point() else value


def test_other_rounding_is_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network may amplify it from call to call, and it is all that there is of a gradient of zero."""
    _changed(_rounded, monkeypatch)
    _step(rate=2.0)


PARAMETERS, BUFFERS = 8 * 4 + 2, 8 * 3
PLACES = {"loss": 0, "weight": 1, "statistics": 1 + PARAMETERS, "momentum": PARAMETERS + BUFFERS + PARAMETERS}


@pytest.mark.parametrize("name", PLACES)
def test_another_value_is_another_step(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _changed(lambda n, value: value * 1.001 if n == PLACES[name] else value, monkeypatch)
    with pytest.raises(UnsupportedModelError, match="after call 1 is not what the optimizer makes of it"):
        _step()


class _Masked(nn.Module):
    """With buffers that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mask", torch.full((3, 3), torch.finfo(torch.float32).min).triu(1))
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _masked_step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    batch = torch.randn(2, 4), torch.tensor([0, 2])
    nimblec.training_step(model, nn.functional.cross_entropy, optimizer, batch)


def test_huge_numbers_that_stay_allow_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(lambda n, value: value * 1.001 if n == 1 else value, monkeypatch)
    model = _Masked()
    with pytest.raises(UnsupportedModelError, match=r"'linear\.weight' after call 1 is not what"):
        _masked_step(torch.optim.SGD(model.parameters(), 0.1), model)


def test_of_complex_numbers_both_parts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(lambda _, value: value + 1j if value.is_complex() else value, monkeypatch)
    model = _Masked()
    with pytest.raises(UnsupportedModelError, match="'turns' after call 1 is not what"):
        _masked_step(torch.optim.SGD(model.parameters(), 0.1), model)


def test_an_optimizer_may_know_some_parameters_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model[1](torch.randn(2, 4)).sum().backward()  # the first layer has no gradient, so no momentum
    optimizer.step()
    optimizer.zero_grad()
    _masked_step(optimizer, model)


class _Shift(nn.Module):
    """Before a batch norm, its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def _amplifying_step() -> None:
    """Make a step of tiny features that a batch norm makes 1e10 times larger, with the gradients' rounding errors.

    The graph rounds the gradients of a batch norm otherwise than the framework's kernel, which amounts to 1e-7 here.
    """
    torch.manual_seed(0)
    model = nn.Sequential(_Shift(), nn.BatchNorm1d(16, eps=1e-24), nn.Linear(16, 3))
    batch = 1e-10 * torch.randn(8, 16), torch.randint(0, 3, (8,))
    optimizer = torch.optim.SGD(model.parameters(), 2**-4, momentum=0.9)
    nimblec.training_step(model, nn.functional.cross_entropy, optimizer, batch)


def test_amplified_rounding_is_no_other_step() -> None:
    _amplifying_step()


@pytest.mark.parametrize(
    ("name", "place", "mistake"),
    [(r"0\.bias", 1, 1e-4), (r"1\.bias", 3, 1e-6), (r"2\.weight", 4, 1e-5), (r"0\.bias\.momentum_buffer", 9, 1e-3)],
)
def test_rounding_hides_no_mistake(monkeypatch: pytest.MonkeyPatch, name: str, place: int, mistake: float) -> None:
    _changed(lambda n, value: value + mistake if n == place else value, monkeypatch)
    with pytest.raises(UnsupportedModelError, match=f"'{name}' after call 1 is not what"):
        _amplifying_step()


class _Counting(nn.Module):
    """Computes something else in each call, beyond a batch norm that amplifies rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_Shift(), nn.BatchNorm1d(16, eps=1e-24))
        self.head = nn.Linear(16, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.body(x)) * (1 + 0.001 * self.calls)


def test_amplified_rounding_hides_no_other_computation() -> None:
    model = _Counting()
    batch = 1e-10 * torch.randn(8, 16), torch.randint(0, 3, (8,))
    with pytest.raises(UnsupportedModelError, match="'loss' after call 2 is not what"):
        nimblec.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 2**-4), batch)


class _Compared(_Masked):
    """Which computes something else if its mask is not exactly of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shown", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.masked_fill(self.get_buffer("shown") != 1, 0))


def test_noise_leaves_masks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(lambda n, value: value * 1.001 if n == 1 else value, monkeypatch)
    model = _Compared()
    with pytest.raises(UnsupportedModelError, match=r"'linear\.weight' after call 1 is not what"):
        _masked_step(torch.optim.SGD(model.parameters(), 0.1), model)
