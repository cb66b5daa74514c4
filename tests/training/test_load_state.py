"""What `nimblec.load_state` takes, and what a state that it refuses leaves as it was."""

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nimblec
from nimblec.base.errors import ArgumentError
from nimblec.pytorch.tensors import as_array, as_tensor

loss = nn.functional.cross_entropy


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01, **options)


def state_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the state of a step that was never taken."""
    given = torch.ones(2, 3, dtype=next(model.parameters()).dtype), torch.tensor([0, 1])
    module, _ = nimblec.training_step(model, lambda y, t: loss(y.float(), t), optimizer, given)["train"]
    return {name: as_array(tensor) for name, tensor in module.state_dict().items()}


def small() -> nn.Linear:
    return nn.Linear(3, 2)


@cache
def kept_by_adam() -> dict[str, Any]:
    """Return the state of a step of a small model by Adam."""
    model = small()
    return state_of(adam(model), model)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no parameter's": ({"optimizer.other.exp_avg": np.zeros(2)}, r"'optimizer\.other\.exp_avg': .* no such parameter"),
    "another group": ({"optimizer.lr_1": np.float32(1)}, r"'optimizer\.lr_1': the optimizer has no such group"),
    "rates": ({"optimizer.lr": np.zeros(2)}, r"'optimizer\.lr': shape \(2,\), expected \(\)"),
    "form": ({"optimizer.bias.exp_avg": np.zeros(3)}, r"'optimizer\.bias\.exp_avg': shape \(3,\), expected \(2,\)"),
    "one more": ({"optimizer.bias.other": np.zeros(2)}, r"for 'bias' the state has .*'other'.*, the optimizer keeps"),
    "a sum": ({"accumulated.bias": np.zeros(3)}, r"'accumulated\.bias': shape \(3,\), expected \(2,\)"),
    "no count": ({"accumulated.bias": np.zeros(2)}, "the state has no 'accumulated_calls'"),
    "another sum": ({"accumulated.other": np.zeros(2)}, r"'accumulated\.other' is not a parameter"),
    "no tracker": ({"scaler.scale": np.float32(1)}, r"the state has no 'scaler\.growth_tracker'"),
    "text": ({"model.bias": "text"}, r"'model\.bias': got <U4, which cannot become a tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_state_that_is_refused_changes_nothing(case: str) -> None:
    values, sentence = WRONG[case]
    model = small()
    state = {**kept_by_adam(), **values}
    state["optimizer.weight.exp_avg"] = np.ones((2, 3), np.float32)
    optimizer = adam(model)
    loss(model(torch.ones(2, 3)), torch.tensor([0, 1])).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(ArgumentError, match=f"load_state: .*{sentence}"):
        nimblec.load_state(model, state, optimizer)
    assert str((model.state_dict(), optimizer.state_dict())) == str(before)


@pytest.mark.parametrize(
    ("lacking", "first"),
    [
        (["model.bias"], "model.bias"),
        (["model.weight", "model.bias"], "model.weight"),
        (["optimizer.weight.step", "optimizer.weight.exp_avg", "optimizer.weight.exp_avg_sq"], "optimizer.weight.step"),
    ],
)
def test_a_state_that_lacks_tensors_is_refused(lacking: list[str], first: str) -> None:
    model = small()
    for other in (5, None, {1: np.zeros(2)}):
        with pytest.raises(ArgumentError, match=r"load_state: state: got \w+, expected arrays by name"):
            nimblec.load_state(model, other)  # type: ignore[arg-type]
    left = {name: value for name, value in kept_by_adam().items() if name not in lacking}
    with pytest.raises(ArgumentError, match=rf"load_state: the state has no '{first}': give all that a plan"):
        nimblec.load_state(model, left, adam(model))


def test_arguments_of_the_wrong_kind_are_named() -> None:
    model, state = small(), kept_by_adam()
    wrong: dict[str, Any] = {"model": adam(model), "optimizer": model, "scaler": 3}
    for name, value in wrong.items():
        with pytest.raises(ArgumentError, match=rf"load_state: {name}: got \w+, expected a torch\."):
            nimblec.load_state(**{"model": model, "state": state, name: value})


@pytest.mark.parametrize("keeping", ["optimizer.lr", "accumulated.weight"])
def test_what_the_state_tells_of_is_there(keeping: str) -> None:
    """That of a plan for a GPU has no tensor of the model that no call writes; but some it has."""
    model = small()
    state = {keeping: np.zeros((2, 3) if "weight" in keeping else (), np.float32), "accumulated_calls": np.array(0)}
    with pytest.raises(ArgumentError, match=r"the state has no 'model\.weight'"):
        nimblec.load_state(model, state)
    nimblec.load_state(model, {**state, "model.weight": np.ones((2, 3), np.float32)})
    assert model.weight.tolist() == [[1] * 3] * 2


def test_memory_of_a_library_in_either_entry_is_left_out() -> None:
    model, names = small(), ("memory of a library 0", "evaluate.memory of a library 0")
    nimblec.load_state(model, {**kept_by_adam(), **{name: np.zeros(4, np.uint8) for name in names}}, adam(model))
    np.testing.assert_array_equal(model.bias.detach().numpy(), kept_by_adam()["model.bias"])


def test_a_state_of_another_kind_of_optimizer_is_refused() -> None:
    model = small()
    plain, momentum = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    of_plain = state_of(plain, model)
    for state, other, found, kept in (
        (kept_by_adam(), momentum, r"'exp_avg', .*", "'momentum_buffer'"),
        (state_of(momentum, model), adam(model), "'momentum_buffer'", r"'exp_avg', .*"),
        (kept_by_adam(), plain, r"'exp_avg', .*", ""),
        (kept_by_adam(), adam(model, amsgrad=True), r"'exp_avg', .*", r".*'max_exp_avg_sq', .*"),
    ):
        with pytest.raises(ArgumentError, match=rf"the state has \[{found}\], the optimizer keeps \[{kept}\]"):
            nimblec.load_state(model, state, other)
    with pytest.raises(ArgumentError, match="the state has nothing that Adam keeps"):
        nimblec.load_state(model, of_plain, adam(model))
    nimblec.load_state(model, of_plain, plain)


def test_a_state_in_bfloat16_and_a_rate_that_is_a_tensor() -> None:
    model = small().bfloat16()
    state = state_of(adam(model), model)
    state["optimizer.lr"] = np.float32(0.5)
    state["model.bias"] = np.array([1, 2]).astype(state["model.bias"].dtype)
    for given in (state, {name: as_tensor(np.array(value)) for name, value in state.items()}):
        other = small().bfloat16()
        optimizer = adam(other)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        nimblec.load_state(other, given, optimizer)
        assert other.bias.tolist() == [1, 2]
        assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.5))
