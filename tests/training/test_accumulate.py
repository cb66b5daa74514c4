"""Gradients of several calls for a step of the optimizer, with dropout: what PyTorch does, saved and resumed."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import nimblec
import nimblert
from nimblec.training.random import Draws
from nimblert import Executable

CALLS, CLIP = 3, 0.2
Make = Callable[[nn.Module], torch.optim.Optimizer]
loss = nn.functional.cross_entropy


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16, affine=False), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 4)
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)


def exact(model: nn.Module) -> torch.optim.Optimizer:
    """Whose rate float32 holds, and that keeps nothing in float32."""
    return torch.optim.SGD(model.parameters(), 1 / 16, momentum=0.9, weight_decay=0.01)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=drawn), torch.randint(0, 4, (8,), generator=drawn)


class Eager:
    """PyTorch's own loop, its random numbers from ``seed`` and ``offset``."""

    def __init__(self, model: nn.Module, make: Make, seed: int, offset: int = 0, calls: int = 0) -> None:
        self.model, self.optimizer = model.train(), make(model)
        self.seed, self.offset, self.calls = seed, offset, calls

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Return the loss of a batch."""
        with Draws(torch.tensor(self.seed), torch.tensor(self.offset)) as draws:
            value = loss(self.model(x), y)
        (value / CALLS).backward()
        self.offset, self.calls = self.offset + draws.used, self.calls + 1
        if self.calls == CALLS:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.calls = 0
        return float(value.detach())


@pytest.mark.parametrize("exported", [False, True])
def test_in_float64_it_is_what_pytorch_does(*, exported: bool) -> None:
    model = network().double()
    eager = Eager(copy.deepcopy(model), exact, torch.initial_seed())
    x, y = batch(0)
    step = nimblec.training_step(model, loss, exact(model), (x.double(), y), clip_norm=CLIP, accumulate=CALLS)
    module = step["train"][0]
    run = torch.export.export(module, (x.double(), y), strict=False).module() if exported else module
    for seed in range(2 * CALLS + 1):
        x, y = batch(seed)
        assert float(run(x.double(), y)["loss"]) == pytest.approx(eager(x.double(), y), rel=1e-12)
    state = run.state_dict()
    for name, tensor in eager.model.state_dict().items():
        assert torch.allclose(state[f"model.{name}"], tensor, rtol=1e-9, atol=1e-12), name
    assert int(state["accumulated_calls"]) == 1


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = network()
    step = nimblec.training_step(model, loss, adam(model), batch(0), clip_norm=CLIP, accumulate=CALLS)
    path = tmp_path_factory.mktemp("accumulate") / "train.plan"
    nimblec.compile({"train": step["train"]}, target="cpu", streams=1, plan_cache=None).save(path)
    return path


@pytest.fixture
def trained(plan: Path) -> Iterator[Executable]:
    with nimblert.load(plan) as executable:
        yield executable


def run(exe: Executable, seed: int) -> float:
    return float(exe(*(tensor.numpy() for tensor in batch(seed)), entry="train"))


def test_a_plan_trains_as_pytorch_does_and_pytorch_goes_on(trained: Executable) -> None:
    eager = Eager(network(), adam, int(trained.state["generator.seed"]))
    for seed in range(CALLS + 2):
        assert run(trained, seed) == pytest.approx(eager(*batch(seed)), rel=1e-4)
    state = dict(trained.state)
    assert int(state["accumulated_calls"]) == 2
    other = Eager(network(), adam, eager.seed, int(state["generator.offset"]), calls=2)
    nimblec.load_state(other.model, state, other.optimizer)
    assert other.offset == eager.offset
    for seed in range(CALLS):
        assert run(trained, seed) == pytest.approx(other(*batch(seed)), rel=1e-4)
    for name, tensor in other.model.named_parameters():
        assert np.allclose(trained.state[f"model.{name}"], tensor.detach(), atol=1e-4), name


def test_a_saved_state_goes_on_exactly(trained: Executable, plan: Path, tmp_path: Path) -> None:
    for seed in range(2):
        run(trained, seed)
    save_file({name: np.asarray(array) for name, array in trained.state.items()}, tmp_path / "state.safetensors")
    wanted = [run(trained, seed) for seed in range(5)]
    with nimblert.load(plan) as resumed:
        resumed.state.update(load_file(tmp_path / "state.safetensors"))
        assert [run(resumed, seed) for seed in range(5)] == wanted
        for name, array in trained.state.items():
            assert array.tobytes() == resumed.state[name].tobytes(), name


def test_seed_and_offset_are_what_makes_the_numbers(trained: Executable) -> None:
    """With a rate of zero nothing else changes from call to call, but for statistics that training does not read."""
    trained.state["optimizer.lr"] = np.float32(0)
    losses = [run(trained, 0) for _ in range(6)]
    assert len({*losses}) == len(losses)
    trained.state["generator.offset"] = np.int64(0)
    assert [run(trained, 0) for _ in range(6)] == losses
    trained.state["generator.offset"], trained.state["generator.seed"] = np.int64(0), np.int64(9)
    assert {run(trained, 0) for _ in range(6)}.isdisjoint(losses)
