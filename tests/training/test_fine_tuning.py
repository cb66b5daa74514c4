"""Training steps of models of which a part is frozen, in evaluation mode, or used at two places."""

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from calling import place
from torch import Tensor, nn
from torch.nn import functional

import nimblec
import nimblert
from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.state import slots
from nimblec.pytorch.flat import flattened

STEPS = 4
Make = Callable[[nn.Module], torch.optim.Optimizer]
loss = functional.cross_entropy

OPTIMIZERS: dict[str, Make] = {
    "of what trains": lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1),
    "with weight decay": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3, weight_decay=0.1),
    "a group for each": lambda model: torch.optim.SGD([{"params": [p]} for p in model.parameters()], 0.1, momentum=0.9),
}


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    body = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(*body, nn.Linear(8, 5))


def head_alone() -> nn.Module:
    """Freeze all but the head; the frozen norms use the statistics that they have."""
    model = classifier()
    model[:-1].requires_grad_(False).eval()
    return model


def middle_frozen() -> nn.Module:
    """Freeze the middle, which gradients pass through; a norm in training mode goes on with its statistics."""
    model = classifier()
    model[3].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    return model


class Tied(nn.Module):
    """Scores of words by the embedding that reads them, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer, self.scores = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Score each word, as a loss takes the scores."""
        scores: Tensor = self.scores(torch.tanh(self.layer(self.words(words))))
        return scores.flatten(0, 1)


def numbers(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(9, 6, generator=drawn), torch.randint(0, 5, (9,), generator=drawn)


def words(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 11, (3, 4, 2), generator=torch.Generator().manual_seed(seed))
    return drawn[..., 0], drawn[..., 1].flatten()


MODELS = {"head alone": (head_alone, numbers), "middle frozen": (middle_frozen, numbers), "tied": (Tied, words)}


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    optimizer.step()
    return float(value.detach())


def assert_trains_as(
    exe: nimblert.Executable,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], tuple[Tensor, Tensor]],
) -> None:
    """Check that a step gives the same losses as eager, step after step."""
    for seed in range(STEPS):
        x, y = batch(seed)
        found = exe(x.numpy(), y.numpy(), entry="train")
        assert np.allclose(found, eager_step(model, optimizer, x, y), rtol=1e-4)


def held(model: nn.Module) -> dict[str, np.ndarray]:
    return {f"model.{name}": t.detach().numpy() for name, t in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)
def test_a_plan_trains_what_eager_trains(
    make: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, Tensor]], make_optimizer: Make
) -> None:
    model = make()
    optimizer = make_optimizer(model)
    begun = copy.deepcopy(held(model))
    step = nimblec.training_step(model, loss, optimizer, batch(0))
    with nimblert.load(nimblec.compile(step, target="cpu")) as exe:
        assert_trains_as(exe, model, optimizer, batch)
        for name, wanted in held(model).items():
            value = exe.state[name] if name in exe.state else begun[name]
            assert np.allclose(value, wanted, rtol=1e-3, atol=1e-5), name
        continued, other = make(), batch(STEPS)
        nimblec.load_state(continued, exe.state, make_optimizer(continued))
        assert np.allclose(exe(other[0].numpy(), entry="evaluate"), continued.eval()(other[0]).detach(), atol=1e-4)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert all(np.array_equal(held(continued)[f"model.{name}"], begun[f"model.{name}"]) for name in frozen)


@pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)
def test_the_graph_for_a_gpu_has_each_tensor_that_changes_once(
    make: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, Tensor]]
) -> None:
    model = make()
    step = nimblec.training_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), batch(0))
    flat = flattened(place(*step["train"]))
    state = slots(flat.module).values()
    before = copy.deepcopy(held(model))
    eager_step(model, torch.optim.SGD(model.parameters(), 0.1), *batch(0))
    changed = {name for name, value in held(model).items() if not np.array_equal(value, before[name])}
    trains = {f"model.{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(slot.output is not None for slot in state)
    assert changed <= {slot.name for slot in state} <= changed | trains | {"optimizer.lr"}


def test_a_model_in_evaluation_mode_is_trained_all_the_same() -> None:
    model = classifier().eval()
    nimblec.training_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), numbers(0))
    assert all(module.training for module in model.modules())


def test_fine_tuning_keeps_frozen_state() -> None:
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    eager_step(model, optimizer, *numbers(0))
    model[:-1].requires_grad_(False)
    model.zero_grad()
    frozen = next(model.parameters())
    kept = copy.deepcopy(optimizer.state[frozen]["exp_avg"])
    plan = nimblec.compile(nimblec.training_step(model, loss, optimizer, numbers(0)), target="cpu")
    with nimblert.load(plan) as exe:
        run = partial(exe, *(tensor.numpy() for tensor in numbers(1)), entry="train")
        assert np.allclose(run(), eager_step(model, optimizer, *numbers(1)), rtol=1e-4)
        assert not [name for name in exe.state if name.startswith("optimizer.0.")]
        nimblec.load_state(model, exe.state, optimizer)
    assert torch.equal(optimizer.state[frozen]["exp_avg"], kept)


def test_a_model_of_which_nothing_trains_is_refused() -> None:
    model = classifier().requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match="no parameter of the model requires a gradient"):
        nimblec.training_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), numbers(0))


def test_what_is_unfrozen_later_begins_with_zeros() -> None:
    model, optimizer = head_alone(), torch.optim.Adam
    trained = optimizer(model.parameters(), 1e-2, eps=1e-3)
    eager_step(model, trained, *numbers(0))
    model.requires_grad_()
    step = nimblec.training_step(model, loss, trained, numbers(0))
    with nimblert.load(nimblec.compile(step, target="cpu")) as exe:
        assert_trains_as(exe, model, trained, numbers)
        assert exe.state["optimizer.6.bias.step"] == 1 + STEPS == 1 + exe.state["optimizer.0.bias.step"]


class Aliased(nn.Module):
    """One layer by two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second, self.head = self.first, nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores, by the layer twice."""
        scores: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return scores


def test_a_layer_with_two_names_is_refused() -> None:
    model = Aliased()
    with pytest.raises(UnsupportedModelError, match="'first' and 'second' are one module"):
        nimblec.training_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), numbers(0))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


class Changing(nn.Linear):
    """Scores, and in each call a change of its own that a test chooses."""

    def __init__(self, change: Callable[["Changing"], object]) -> None:
        super().__init__(6, 5)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))
        self.change = change
        self.other = nn.Linear(6, 5).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores that depend on what is changed."""
        with torch.no_grad():
            self.change(self)
        scores: Tensor = super().forward(x + self.mean) + self.other(x)
        return scores


def _assign_mean(model: Changing) -> None:
    model.mean = model.mean * 0.99999


def _assign_memory(model: Changing) -> None:
    model.other.weight.data = model.other.weight.data * 0.9999 + model.weight.data * 0.0001


CHANGES: dict[str, tuple[Callable[[Changing], object], str]] = {
    "clamped": (lambda model: model.weight.clamp_(-9, 9), "writes into parameter 'weight', which the step trains"),
    "clamped memory": (lambda model: model.weight.data.clamp_(-9, 9), "writes into parameter 'weight'"),
    "assigned": (_assign_mean, r"forward assigns 'mean', .*: write into it, mean\.copy_"),
    "assigned memory": (_assign_memory, r"forward assigns 'other\.weight'"),
}


@pytest.mark.parametrize(("change", "sentence"), CHANGES.values(), ids=CHANGES)
def test_fine_tuning_refuses_lost_changes(change: Callable[[Changing], object], sentence: str) -> None:
    model = Changing(change)
    with pytest.raises(UnsupportedModelError, match=sentence):
        nimblec.training_step(model, loss, torch.optim.SGD(model.parameters(), 1e-3), numbers(0))


class Doubled(nn.Linear):
    """Writes into a result that it reads its weight for, too."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores by three times the weight."""
        weight = self.weight * 2
        weight += self.weight
        return functional.linear(x, weight, self.bias)


def test_what_is_made_of_a_parameter_may_be_written() -> None:
    model = Doubled(6, 5)
    nimblec.training_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), numbers(0))


def test_hooks_are_refused() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="the optimizer has a hook"):
        nimblec.training_step(model, loss, optimizer, numbers(0))
    handle.remove()
    for register in (model.bias.register_hook, model.bias.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)  # type: ignore[no-untyped-call]
        with pytest.raises(UnsupportedModelError, match="parameter 'bias' has a hook"):
            nimblec.training_step(model, loss, optimizer, numbers(0))
        handle.remove()
    lazy = nn.LazyLinear(5)
    with pytest.raises(UnsupportedModelError, match="parameter 'weight' has no shape yet: run the model once"):
        nimblec.training_step(lazy, loss, torch.optim.SGD(lazy.parameters(), 0.1), numbers(0))
