"""Training steps under torch.autocast on the CPU, without a plan: eager's with its GradScaler, whatever overflows."""

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import autocast_steps
import numpy as np
import pytest
import torch
from autocast_steps import HUGE, Eager, batch, loss, without_norms
from calling import place
from torch import nn

import nimblec
from nimblec.base.errors import ArgumentError, UnsupportedModelError
from nimblec.base.options import Options
from nimblec.find_source import find_source
from nimblec.optimize.pipeline import Runs, Setting
from nimblec.optimize.rewrites import FUSED_REGIONS
from nimblec.pytorch.flat import written_storages
from nimblec.pytorch.handover import hand_over
from nimblec.training.scaler import SCALE, TRACKER, initial_scaler, unscale, update_scale

KINDS = ("bf16", "fp16")


entries = cache(autocast_steps.step)
"""The entries of NAME, whose state tests change and set back."""


@cache
def train(name: str, *, exported: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Build the step of NAME, and its first state."""
    module, given = entries(name)["train"]
    if exported:
        module.load_state_dict(train(name, exported=False)[1])
        module = torch.export.export(module, given, strict=False).module()
    return module, copy.deepcopy(module.state_dict())


class Direct:
    """The step as PyTorch runs it, which -O0 captures; or ``exported``, as a graph of plain operators."""

    def __init__(self, name: str, *, exported: bool) -> None:
        self.module, first = train(name, exported=exported)
        self.module.load_state_dict(first)

    def __call__(self, seed: int) -> np.ndarray:
        """Return the loss of a batch, before the step."""
        with torch.no_grad():
            return self.module(*batch(seed))["loss"].float().numpy()

    def assign(self, name: str, value: Any) -> None:
        """Give a tensor of the state another value."""
        self.module.state_dict()[name].copy_(torch.as_tensor(value))

    def state(self) -> dict[str, np.ndarray]:
        """Return all of the state."""
        return {name: tensor.numpy().copy() for name, tensor in self.module.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["sgd", "fused", "clipped"])
def test_a_step_is_eagers_bit_for_bit(optimizer: str, kind: str) -> None:
    name = f"{optimizer}_{kind}"
    eager, direct = Eager(name, "cpu"), Direct(name, exported=False)
    for seed, wanted, found in autocast_steps.run_events(eager, direct, direct.assign):
        assert found.tobytes() == wanted.tobytes(), seed
        state = direct.state()
        for key, value in eager.state().items():
            assert state[key].tobytes() == value.tobytes(), (seed, key)
    assert all(value.dtype != np.float16 for value in direct.state().values())


@pytest.mark.parametrize(
    ("optimizer", "kind", "exported"),
    [
        ("adam", "bf16", False),
        ("adam", "fp16", False),
        ("adam", "fp16", True),
        ("clipped", "bf16", True),
        ("clipped", "fp16", True),
    ],
)
def test_a_step_of_plain_operators_is_eagers(optimizer: str, kind: str, *, exported: bool) -> None:
    name = f"{optimizer}_{kind}"
    eager, direct = Eager(name, "cpu"), Direct(name, exported=exported)
    for seed, wanted, found in autocast_steps.run_events(eager, direct, direct.assign):
        assert found == pytest.approx(wanted, rel=2e-2), seed
        state = direct.state()
        for key, value in eager.state().items():
            assert np.allclose(state[key], value, rtol=1e-2, atol=1e-2), (seed, key)
        if kind == "fp16":
            assert (state[SCALE], state[TRACKER]) == (eager.state()[SCALE], eager.state()[TRACKER]), seed


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_overflow_leaves_all_but_statistics(optimizer: str, *, exported: bool) -> None:
    direct = Direct(f"{optimizer}_fp16", exported=exported)
    direct(0)
    assert int(direct.state()[TRACKER]) == 1
    direct.assign(SCALE, HUGE)
    before = direct.state()
    direct(1)
    after = direct.state()
    changed = {name for name, value in after.items() if value.tobytes() != before[name].tobytes()}
    statistics = {f"model.{layer}.{name}" for layer in (1, 4) for name in ("running_mean", "running_var")}
    assert changed == {SCALE, TRACKER, *statistics, *(f"model.{layer}.num_batches_tracked" for layer in (1, 4))}
    assert (float(after[SCALE]), int(after[TRACKER])) == (HUGE / 2, 0)


@pytest.mark.parametrize("itself", [False, True])
def test_the_scaler_is_gradscalers(*, itself: bool) -> None:
    """At the ends of float32, too; a new one is GradScaler's."""
    new = torch.amp.GradScaler("cpu").state_dict()
    made = initial_scaler()
    assert (float(made[SCALE]), int(made[TRACKER])) == (new["scale"], new["_growth_tracker"])
    assert (made[SCALE].dtype, made[TRACKER].dtype) == (torch.float32, torch.int32)
    settings = new["growth_factor"], new["backoff_factor"], new["growth_interval"]
    for first in (1.0, 65536.0, 2.0**127, 2.0**-149, float("inf")):
        for steps in (0, 5, new["growth_interval"] - 1):
            for found in (0.0, 1.0):
                scale, tracker = torch.tensor(first), torch.tensor(steps, dtype=torch.int32)
                wanted = scale.clone(), tracker.clone()
                torch._amp_update_scale_(*wanted, torch.tensor(found), *settings)
                update_scale(scale, tracker, torch.tensor(found), itself=itself)
                assert torch.equal(torch.stack((scale, tracker)), torch.stack(wanted)), (first, steps, found)
    for number, overflows in ((3.0, 0.0), (float("inf"), 1.0), (float("-inf"), 1.0), (float("nan"), 1.0)):
        gradients = [torch.tensor([2.0, -8.0]), torch.tensor([[number]], dtype=torch.bfloat16)]
        assert float(unscale(gradients, torch.tensor(4.0), itself=itself)) == overflows
        assert torch.equal(gradients[0], torch.tensor([0.5, -2.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_under_autocast_too(kind: str) -> None:
    Direct(f"sgd_{kind}", exported=False)  # the first state, which the entries share
    module, given = entries(f"sgd_{kind}")["evaluate"]
    wanted = Eager(f"sgd_{kind}", "cpu").evaluate(0)
    assert wanted.dtype == autocast_steps.TYPES[kind]
    with torch.no_grad():
        assert torch.equal(module(*given), wanted)


def test_a_scaler_goes_on_where_the_step_is() -> None:
    direct, other = Direct("fused_fp16", exported=False), Eager("fused_fp16", "cpu")
    direct(0)
    direct.assign(SCALE, 1024.0)
    direct(1)
    nimblec.load_state(other.model, direct.state(), other.optimizer, other.scaler)
    assert (other.scaler.get_scale(), other.scaler.state_dict()["_growth_tracker"]) == (1024.0, 2)
    for seed in range(2, 5):
        assert direct(seed).tobytes() == other(seed).tobytes()
    for key, value in other.state().items():
        assert direct.state()[key].tobytes() == value.tobytes(), key
    nimblec.load_state(other.model, direct.state())
    plain = {name: value for name, value in direct.state().items() if not name.startswith("scaler.")}
    with pytest.raises(ArgumentError, match=r"load_state: the state has no 'scaler\.scale'"):
        nimblec.load_state(other.model, plain, other.optimizer, other.scaler)


def test_what_autocast_cannot_be_is_a_sentence(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    given = torch.randn(4, 3), torch.randint(0, 2, (4,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for wrong in (torch.float32, "bfloat16", True, 16):
        with pytest.raises(ArgumentError, match=r"training_step: autocast: .*, expected torch\.bfloat16"):
            nimblec.training_step(model, loss, optimizer, given, autocast=wrong)
    step = nimblec.training_step(model, loss, optimizer, given, autocast=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"autocast to torch\.bfloat16, whose mix of types ONNX Runtime"):
        nimblec.compile(step, target="cpu", plan_cache=None)
    with pytest.raises(UnsupportedModelError, match=r"autocast to torch\.bfloat16, which casts otherwise on the CPU"):
        hand_over(find_source(step, None, None, tmp_path), Options(), tmp_path)


@pytest.mark.parametrize("kind", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_the_passes_of_fusion_hold_under_autocast(kind: str) -> None:
    """Of -O1; here on tensors of the CPU."""
    name = f"clipped_{kind}"
    step, eager = autocast_steps.step(name, without_norms), Eager(name, "cpu", without_norms)
    calls = {entry: place(module, inputs) for entry, (module, inputs) in step.items()}
    written = frozenset().union(*map(written_storages, calls.values()))
    with torch.no_grad():
        made = {
            entry: Runs(replace(call, written_elsewhere=written), Setting(device="cpu"))(*FUSED_REGIONS)
            for entry, call in calls.items()
        }
    tensors = step["train"][0].state_dict()

    def run(entry: str, seed: int) -> Any:
        with torch.no_grad():
            for (_, tensor), given in zip(made[entry].inputs, batch(seed), strict=False):
                tensor.copy_(given)
            return made[entry].run(lambda _source: None)

    def assign(key: str, value: np.ndarray) -> None:
        tensors[key].copy_(torch.from_numpy(value))

    for seed, wanted, found in autocast_steps.run_events(
        eager, lambda seed: run("train", seed)["loss"].float().numpy(), assign
    ):
        assert found == pytest.approx(wanted, rel=2e-2), seed
    for key, value in eager.state().items():
        assert np.allclose(tensors[key], value, rtol=1e-2, atol=1e-2), key
    torch.testing.assert_close(run("evaluate", 0).float(), eager.evaluate(0).float(), rtol=5e-2, atol=5e-2)
