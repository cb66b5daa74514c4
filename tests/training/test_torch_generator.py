"""Random numbers of a step from torch's generator, with a stand-in for that of a GPU: no GPU is needed for that."""

import copy
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nimblec
from nimblec.pytorch import generator as generators
from nimblec.pytorch.generator import MARK
from nimblec.pytorch.state import Writing, generator_of, settable_storages

SEED = (1 << 63) + 17
"""Which is no int64."""
loss = nn.functional.cross_entropy


class GpuGenerator:
    """Seed and offset as torch's generator of a GPU has them; those that share a state move on together."""

    def __init__(self, _device: str = "cuda") -> None:
        self.state = {"seed": 0, "offset": 0}

    def manual_seed(self, seed: int) -> None:
        """Set the seed, and an offset of zero."""
        assert 0 <= seed < 1 << 64
        self.state |= {"seed": seed, "offset": 0}

    def set_offset(self, offset: int) -> None:
        """Set the offset, checked as torch checks it."""
        assert offset % 4 == 0
        self.state["offset"] = offset

    def get_offset(self) -> int:
        """Return how far the generator is."""
        return self.state["offset"]

    def graphsafe_get_state(self) -> "GpuGenerator":
        """Return another generator that shares this state."""
        other = GpuGenerator()
        other.state = self.state
        return other

    def graphsafe_set_state(self, other: "GpuGenerator") -> None:
        """Share the state of another generator; do not copy it."""
        self.state = other.state


class Kernels(TorchDispatchMode):
    """Draw Bernoulli numbers as a GPU would: from seed and offset of its default generator, which they move on."""

    def __init__(self, default: GpuGenerator) -> None:
        TorchDispatchMode.__init__(self)
        self.default = default
        self.seeds: list[int] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **(kwargs or {}))
        state = self.default.state
        self.seeds.append(state["seed"])
        drawn = torch.Generator().manual_seed((state["seed"] + 1_000_003 * state["offset"]) % (1 << 63))
        state["offset"] += 4 * -(-args[0].numel() // 64)
        return func(*args, **(kwargs or {}), generator=drawn)


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuGenerator]:
    """Yield the default generator of a GPU."""
    found = GpuGenerator()
    found.manual_seed(5)
    found.set_offset(400)
    cuda = SimpleNamespace(default_generators=[found], current_device=lambda: 0)
    monkeypatch.setattr(generators, "torch", SimpleNamespace(Generator=GpuGenerator, cuda=cuda))
    yield found
    assert found.state == {"seed": 5, "offset": 400}, "the default generator is as before"


class Deep(nn.Module):
    """Two dropouts of different sizes, and a layer that is left out by chance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(6, 48), nn.Linear(48, 20), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = nn.functional.dropout(self.second(nn.functional.dropout(self.first(x).relu(), 0.5)), 0.25)
        return self.last(x * torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.75) / 0.75)  # type: ignore[no-any-return]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=drawn).double(), torch.randint(0, 4, (8,), generator=drawn)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1 / 16, momentum=0.5, fused=True)


@cache
def deep_entries() -> dict[str, Any]:
    """Return the entries of the deep model, which tests copy."""
    model = Deep().double()
    torch.manual_seed(SEED)
    return nimblec.training_step(model, loss, optimizer(model), batch(0))


def deep_step() -> Writing:
    """Return a step of the deep model that lets torch draw."""
    module = copy.deepcopy(deep_entries()["train"][0])
    assert isinstance(module, Writing)
    module.let_torch_draw()
    return module


def test_steps_draw_what_torch_draws_and_leave_the_offset(default: GpuGenerator) -> None:
    module, eager = deep_step(), GpuGenerator()
    eager.manual_seed(SEED)
    other, steps = Deep().double(), []
    updates = optimizer(other)
    with torch.no_grad():
        for seed in range(4):
            with Kernels(default) as kernels:
                steps.append((float(module(*batch(seed))["loss"]), int(module.get_buffer("generator.offset"))))
            assert kernels.seeds == [SEED] * 3
    for seed, (found, offset) in enumerate(steps):
        x, y = batch(seed)
        with Kernels(eager):
            value = loss(other(x), y)
        updates.zero_grad()
        value.backward()
        updates.step()
        assert (found, offset) == (float(value.detach()), eager.get_offset()), seed
    for name, tensor in other.named_parameters():
        assert torch.equal(module.get_parameter(f"model.{name}"), tensor), name


def test_a_capture_has_a_generator_of_its_own_that_is_marked(default: GpuGenerator) -> None:
    """And adds to the offset of the state what a run used, since torch does not tell the number meanwhile."""
    module = deep_step()
    generator = generator_of(module)
    assert generator is not None
    with Kernels(default), torch.no_grad():
        module(*batch(0))
        used = int(module.get_buffer("generator.offset"))
        assert used == generator.used == 4 * (6 + 3 + 1)
        with generator.capturing() as made:
            assert default.state == {"seed": MARK, "offset": used}
            kernels = default.state
            module(*batch(0))
            assert default.state is kernels
        assert int(module.get_buffer("generator.offset")) == 2 * used
    assert made.used == 0
    assert kernels == {"seed": SEED, "offset": used}, "a replay starts where the capture found the state"
    kernels["offset"] += used  # as torch does before a replay
    assert made.used == generator.used
    made.rewind()
    assert kernels == {"seed": SEED, "offset": used}


def test_seed_and_rate_are_state_though_no_run_writes_them() -> None:
    module = deep_step()
    names = ("optimizer.lr", "generator.seed")
    assert settable_storages(module) == {module.get_buffer(name).untyped_storage()._cdata for name in names}
    assert {*module.settable} < {*module.writes}


def test_an_exported_step_computes_its_numbers() -> None:
    """Which is the graph of the levels above, and of the CPU target."""
    module = deep_step()
    exported = torch.export.export(module, batch(0), strict=False).module()
    with Kernels(GpuGenerator()) as kernels, torch.no_grad():
        exported(*batch(0))
    assert not kernels.seeds
