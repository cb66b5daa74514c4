"""State is written in place by the last passes: rows alone where rows change, and never what is still to be read."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import stateful_models
import torch
import training_steps
from calling import place
from rewriting import counts
from torch import Tensor, fx, nn

import nimblec
from nimblec.graph.state import slots
from nimblec.optimize.pipeline import Runs, Setting
from nimblec.optimize.rewrites import FUSED_REGIONS
from nimblec.optimize.variants import AS_WRITTEN
from nimblec.pytorch.flat import flattened
from nimblec.pytorch.model import TorchModel
from nimblec.training import entries
from nimblec.training.step import trace

STEPS = 40


def fused(module: nn.Module, *args: Tensor) -> TorchModel:
    """Return the module as -O1 makes it, over the module's own state."""
    return Runs(place(module, args), Setting(device="cpu"))(*FUSED_REGIONS)


def check(model: nn.Module, draw: Callable[[int], tuple[Tensor, ...]], steps: int = 5) -> fx.GraphModule:
    """Compare a fused model with eager step by step, its outputs and its state; gives its graph."""
    eager = copy.deepcopy(model)
    with torch.no_grad():
        made = fused(model, *draw(0))
        for step in range(steps):
            for (_, tensor), value in zip(made.inputs, draw(step), strict=True):
                tensor.copy_(value)
            torch.testing.assert_close(made.run(lambda _source: None), eager(*draw(step)))
            for (name, found), (_, wanted) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
                torch.testing.assert_close(found, wanted, msg=f"{name} after step {step}")
    graph: fx.GraphModule = made.module
    return graph


def drawn(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda step: (torch.randn(shape, generator=torch.Generator().manual_seed(step)),)


def test_of_a_cache_only_the_new_rows_are_written() -> None:
    graph = check(
        stateful_models.Decoder().eval(), lambda step: (torch.tensor([step % 50]), torch.tensor([step])), STEPS
    )
    calls = counts(graph)
    assert (calls["index_copy_"], calls["index_put_"]) == (2, 2)
    assert not {"copy_", "clone", "index_copy", "index_put"} & calls.keys()


def test_the_model_holds_its_state_by_name() -> None:
    model = stateful_models.Decoder().eval()
    made = fused(model, torch.tensor([0]), torch.tensor([0]))
    held = dict(made.module.named_buffers())
    for name in stateful_models.CACHES:
        assert held[name] is dict(model.named_buffers())[name]
    assert [name for name, _ in made.inputs] == ["token", "position"]


def test_statistics_a_history_and_a_counter() -> None:
    assert "slice_scatter" not in counts(check(stateful_models.Statistics(), drawn(4), STEPS))


def test_what_is_read_after_it_was_overwritten_is_copied() -> None:
    check(stateful_models.Exchange(), drawn(4))


def test_batch_norm_in_training_mode() -> None:
    graph = check(stateful_models.Normalised(affine=True), drawn(5, 3, 4))
    assert not {"copy_", "_native_batch_norm_legit_functional"} & counts(graph).keys()


class Shuffled(nn.Module):
    """Four vectors that are read and written, in an order that is drawn, by generated kernels and by products."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)  # noqa: S311 - for a test
        for name in NAMES:
            self.register_buffer(name, torch.tensor([draw.uniform(-1, 1) for _ in range(4)]))
        self.weight = torch.eye(4)[[1, 2, 3, 0]]
        kinds = ["replace", "add", "swap", "product", "sum", "rows", "keep"]
        self.steps = [(draw.choice(kinds), draw.sample(NAMES, 2)) for _ in range(draw.randint(2, 9))]

    def forward(self, x: Tensor) -> Tensor:
        """Return a result of 4 numbers that also depends on what was kept."""
        for kind, (name, other) in self.steps:
            a, b = self.get_buffer(name), self.get_buffer(other)
            if kind == "replace":
                a.copy_((b * x).tanh() - a)
            elif kind == "add":
                a.add_(x.sigmoid() * 0.5)
            elif kind == "swap":
                before = a.clone()
                a.copy_(b)
                b.copy_(before)
            elif kind == "product":
                x = (self.weight @ a) * 0.5 + x.sin()
            elif kind == "sum":
                a.copy_((b + x).cumsum(0).cos())
            elif kind == "rows":
                a[1:3] = (x * b)[:2].relu()
            else:
                x = x * 0.5 + a
        return x


NAMES = ["first", "second", "third", "fourth"]


@pytest.mark.parametrize("seed", [*range(8), 40, 156])
def test_state_in_any_order(seed: int) -> None:
    check(Shuffled(seed), drawn(4), steps=3)


class Turned(nn.Module):
    """Reads what it writes in another order, at once or by way of other calls."""

    kept: Tensor

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(16.0).reshape(4, 4))
        self._turn = turn

    def forward(self, x: Tensor) -> Tensor:
        """Map 4 numbers."""
        turned = self._turn(self.kept * 0.5 + x)
        self.kept.mul_(0.5).add_(x.sin())
        return turned.tanh()


@pytest.mark.parametrize(
    "turn",
    [
        *(lambda v: v.roll(1, 0), lambda v: v.flip(1), lambda v: v.t() + 1, lambda v: v[1:] * 2),
        *(lambda v: torch.cat([v, v]), lambda v: v.sum(0), lambda v: v.reshape(2, 8).cos()),
        *(lambda v: v[None] * v[:, None], lambda v: v[None].expand(3, 4, 4).cos(), lambda v: v.cos(), lambda v: v),
    ],
)
def test_state_is_written_after_it_was_read_in_any_order(turn: Callable[[Tensor], Tensor]) -> None:
    check(Turned(turn), drawn(4))


def images() -> nn.Module:
    """Start `training_steps.images`: a norm after a convolution without a bias, and one after one with it."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4), nn.BatchNorm2d(4), nn.SiLU()),
        *(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 10)),
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        {"nesterov": True, "momentum": 0.9, "weight_decay": 0.1},
        pytest.param({"momentum": 0.9}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_a_training_step_copies_no_state(monkeypatch: pytest.MonkeyPatch, optimizer: dict[str, Any]) -> None:
    monkeypatch.setattr(entries, "trace", lambda *args, exported: trace(*args, exported=not exported))
    model, cross_entropy = images(), nn.functional.cross_entropy
    made = torch.optim.SGD(model.parameters(), 0.1, **optimizer)
    module, *_ = nimblec.training_step(model, cross_entropy, made, training_steps.batch(0))["train"]
    calls = counts(check(module, training_steps.batch, steps=3))
    assert not {"copy", "add_", "_native_batch_norm_legit_functional"} & calls.keys(), calls
    assert calls["copy_"] <= 1, calls  # the weight of a norm of which the bias before it is a sum
    assert calls["_foreach_add_"] == 1  # the batches that the norms have counted


def test_the_counters_of_an_optimizer_are_copied_by_one_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 10))
    made = torch.optim.AdamW(model.parameters(), 0.1, eps=1e-2)

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        images, targets = training_steps.batch(seed)
        return images.flatten(1)[:, :16], targets

    module, *_ = nimblec.training_step(model, nn.functional.cross_entropy, made, batch(0))["train"]
    calls = counts(check(module, batch, steps=3))
    assert (calls["_foreach_copy_"], calls["copy_"]) == (1, 0)


class Rounded(nn.Module):
    """Two vectors of integers change places, each rounded on its way."""

    left: Tensor
    right: Tensor

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("left", torch.arange(4))
        self.register_buffer("right", torch.arange(4, 8))
        self._rounded = rounded

    def forward(self, x: Tensor) -> Tensor:
        """Map 4 numbers and both vectors, so that one region computes all."""
        left, right = self._rounded(self.left), self._rounded(self.right)
        self.left.copy_(right)
        self.right.copy_(left)
        return left * x + right


@pytest.mark.parametrize("rounded", [torch.ceil, torch.floor, torch.round, torch.trunc, torch.nan_to_num])
def test_integers_that_nothing_rounds_change_places(rounded: Callable[[Tensor], Tensor]) -> None:
    check(Rounded(rounded), drawn(4), steps=2)


class Momentum(nn.Module):
    """What it has changed reads what it has changed before, within one region."""

    moved: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moved", torch.zeros(4))
        self.register_buffer("weight", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight as it was."""
        result = self.weight @ x
        self.moved.mul_(0.9).add_(x.tanh())
        self.weight.sub_(self.moved, alpha=0.5)
        return result


def test_a_region_returns_no_state_that_only_itself_reads() -> None:
    graph = check(Momentum(), drawn(4))
    (region,) = (node for node in graph.graph.nodes if str(node.target).startswith("nimblec.fused"))
    assert region.meta["val"] == []
    assert "copy_" not in counts(graph)


class Rows(nn.Module):
    """Writes rows of one tensor, and reads it before, between and after."""

    kept: Tensor

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(12.0).reshape(4, 3))
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        """Return what the model makes of a row of 3 numbers."""
        return self._step(self.kept, x)


def between(kept: Tensor, x: Tensor) -> Tensor:
    before = (kept * x).sum(-1)
    kept[1] = x
    middle = kept @ x
    kept[2:3] = middle[:3]
    return before + middle + kept @ x


def of_itself(kept: Tensor, x: Tensor) -> Tensor:
    kept[1:] = kept[:-1].clone()
    kept[0] = kept[3] + x
    return kept @ x


def from_its_own_rows(kept: Tensor, x: Tensor) -> Tensor:
    kept.index_copy_(0, torch.tensor([0, 1]), kept[2:].clone())
    return kept @ x


def returned_as_it_was(kept: Tensor, x: Tensor) -> Tensor:
    before = kept.clone()
    kept.mul_(0.5).add_(x)
    return before


def returned_as_it_is(kept: Tensor, x: Tensor) -> Tensor:
    kept.add_(x)
    return kept


def replaced(kept: Tensor, x: Tensor) -> Tensor:
    row = kept[2] * 2
    kept.copy_(x.expand(4, 3))
    return row


STEPS_OF_ROWS = [between, of_itself, from_its_own_rows, returned_as_it_was, returned_as_it_is, replaced]


@pytest.mark.parametrize("step", STEPS_OF_ROWS)
def test_reads_and_writes_keep_their_order(step: Callable[[Tensor, Tensor], Tensor]) -> None:
    check(Rows(step), drawn(3))


def test_rows_read_between_writes_stay_in_place() -> None:
    calls = counts(check(Rows(between), drawn(3)))
    assert calls["copy_"] == 2
    assert "clone" not in calls


def test_pure_graphs_take_the_state_and_give_it_back() -> None:
    flat = flattened(place(stateful_models.Exchange(), (torch.ones(4),)))
    found = slots(flat.module)
    assert {slot.name: slot.output for slot in found.values()} == {"left": 2, "right": 3, "kept": 4}
    assert len(flat.args) == 1 + len(found)


def test_state_is_kept_in_half_precision_at_level_0() -> None:
    model, eager = stateful_models.Statistics(), stateful_models.Statistics()
    with torch.no_grad():
        setting = Setting(device="cpu", dtype=torch.bfloat16)
        made = Runs(place(model, (torch.ones(4),)), setting)(AS_WRITTEN)
        for _ in range(3):
            torch.testing.assert_close(made.run(lambda _source: None), eager(torch.ones(4)), rtol=2e-2, atol=2e-2)
    assert model.count == 3


def test_a_model_that_writes_into_its_input_is_none() -> None:
    with pytest.raises(Exception, match=r"writes into its input 'x'"):
        fused(Rows(lambda kept, x: x.add_(kept.sum())), torch.ones(3))
