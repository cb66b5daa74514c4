"""Training steps on the GPU: eager's bits at -O0, its values above, float64's gradients, and exact resumption."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import training_steps
from safetensors.numpy import load_file, save_file
from torch import nn

import nimblec
import nimblert
from nimblec.inspect.layers import by_layer

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile", "gpu_training")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("without_tf32"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

LEVELS = (0, 1, 2)
STEPS = 50
OF_CHANGE = {"sgd": 1e-4, "adam": 5e-4}


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    for name in ("networks", "sgd", "adam", "dropping", "fine_tuned"):  # the longest first
        for level in reversed(LEVELS):
            gpu_compiler.start(f"training_steps:{name}", level=level)


def run(exe: nimblert.Executable, seed: int) -> np.ndarray:
    return np.asarray(exe(*(tensor.numpy() for tensor in training_steps.batch(seed)), entry="train"))


class Eager:
    """The same model and optimizer in PyTorch."""

    def __init__(self, name: str, dtype: torch.dtype, model: nn.Module | None = None) -> None:
        self.model = (training_steps.images().train() if model is None else model).to("cuda", dtype)
        self.optimizer = training_steps.OPTIMIZERS[name](self.model)
        self.dtype = dtype

    def step(self, seed: int) -> np.ndarray:
        """Return the loss before the step."""
        images, labels = (tensor.cuda() for tensor in training_steps.batch(seed))
        self.optimizer.zero_grad()
        value = nn.functional.cross_entropy(self.model(images.to(self.dtype)), labels)
        value.backward()
        self.optimizer.step()
        return value.detach().cpu().numpy()

    def state(self) -> dict[str, np.ndarray]:
        """Return parameters and statistics by the plan's names."""
        return {f"model.{key}": tensor.cpu().numpy() for key, tensor in self.model.state_dict().items()}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_steps_are_eagers(gpu_compiler: "GpuCompiler", name: str) -> None:
    """Bit by bit at -O0."""
    eager = Eager(name, torch.float32)
    with nimblert.load(gpu_compiler.plan(f"training_steps:{name}", level=0), poison=True) as exe:
        for seed in range(STEPS):
            assert run(exe, seed).tobytes() == eager.step(seed).tobytes(), seed
        for key, wanted in eager.state().items():
            assert exe.state[key].tobytes() == wanted.tobytes(), key


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_frozen_is_no_state(gpu_compiler: "GpuCompiler", level: int) -> None:
    eager = Eager("sgd", torch.float32, training_steps.Tuned())
    with nimblert.load(gpu_compiler.plan("training_steps:fine_tuned", level=level), poison=True) as exe:
        for seed in range(STEPS):
            found, wanted = run(exe, seed), eager.step(seed)
            assert found.tobytes() == wanted.tobytes() if level == 0 else np.allclose(found, wanted, rtol=1e-4)
        trained = {"model.first.weight", "model.first.bias", "model.second.bias"}
        assert {name for name in exe.state if name.startswith("model.")} == trained
        for key in trained:
            assert np.allclose(exe.state[key], eager.state()[key], rtol=0, atol=1e-4 if level else 0), key


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_steps_stay_as_near_to_those_of_float64_as_eagers(gpu_compiler: "GpuCompiler", name: str, level: int) -> None:
    """Where eager has noise, as Adam has where a gradient is zero but for rounding, a plan may have some, too.

    What else is allowed is a small part of what the steps changed. For Adam it is larger: eager of both precisions
    rounds the powers of its betas alike, to float32, of which one minus is taken.
    """
    exact, eager = (Eager(name, dtype) for dtype in (torch.float64, torch.float32))
    with nimblert.load(gpu_compiler.plan(f"training_steps:{name}", level=level), poison=True) as exe:
        before = dict(exe.state)
        losses = [[float(step(seed)) for step in (exact.step, eager.step, partial(run, exe))] for seed in range(5)]
        found, states = dict(exe.state), (exact.state(), eager.state())
    near = [abs(float(loss[2] - loss[0])) <= 8 * abs(loss[1] - loss[0]) + 1e-4 * abs(loss[0]) for loss in losses]
    assert all(near), losses
    wrong = {}
    for key, wanted in states[0].items():
        change = float(np.abs(wanted - before[key]).max())
        error, eagers = (float(np.abs(of[key] - wanted).max()) for of in (found, states[1]))
        if error > 8 * eagers + OF_CHANGE[name] * change + 1e-7:
            wrong[key] = (error, eagers, change)
    assert not wrong


@pytest.mark.parametrize("level", LEVELS)
def test_pytorch_goes_on_from_a_plan(gpu_compiler: "GpuCompiler", level: int) -> None:
    eager = Eager("sgd", torch.float32)
    with nimblert.load(gpu_compiler.plan("training_steps:sgd", level=level), poison=True) as exe:
        for seed in range(3):
            run(exe, seed)
        nimblec.load_state(eager.model, exe.state, eager.optimizer)
        for seed in range(3, 6):
            assert np.allclose(run(exe, seed), eager.step(seed), rtol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_random_networks_are_those_of_float64(gpu_compiler: "GpuCompiler", level: int) -> None:
    """Within what eager float32 meets, with room for another order of sums."""
    plan = gpu_compiler.plan("training_steps:networks", level=level)
    found = {}
    for dtype in (torch.float64, torch.float32):
        model = training_steps.Networks().to("cuda", dtype).train()
        images, labels = (tensor.cuda() for tensor in training_steps.batch(0))
        training_steps.all_losses(model(images.to(dtype)), labels).backward()
        found[dtype] = {name: tensor.grad.double().cpu().numpy() for name, tensor in model.named_parameters()}
    with nimblert.load(plan) as exe:
        before = dict(exe.state)
        run(exe, 0)
        wrong = {}
        for name, exact in found[torch.float64].items():
            key, scale = f"model.{name}", max(float(np.abs(exact).max()), 1e-3)
            gradient = before[key].astype(np.float64) - exe.state[key]
            eager = float(np.abs(found[torch.float32][name] - exact).max())
            rounding = 2e-7 * float(np.abs(before[key]).max())  # of the parameter that was read back
            error = float(np.abs(gradient - exact).max())
            if error > 8 * eager + rounding + 1e-5 * scale:
                wrong[name] = (error, eager, scale)
    assert not wrong


@pytest.mark.parametrize("level", LEVELS)
def test_a_saved_state_goes_on_exactly(gpu_compiler: "GpuCompiler", level: int, tmp_path: Path) -> None:
    """With dropout, in the middle of two calls whose gradients are summed."""
    plan = gpu_compiler.plan("training_steps:dropping", level=level)
    with nimblert.load(plan) as exe, nimblert.load(plan) as resumed:
        first = [float(run(exe, 0)) for _ in range(3)]
        assert len({*first}) == len(first)
        save_file({name: np.asarray(array) for name, array in exe.state.items()}, tmp_path / "state.safetensors")
        resumed.state.update(load_file(tmp_path / "state.safetensors"))
        for seed in range(5):
            assert run(exe, seed).tobytes() == run(resumed, seed).tobytes()
        for name, array in exe.state.items():
            assert array.tobytes() == resumed.state[name].tobytes(), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_step_is_shown_by_layer_and_phase(gpu_compiler: "GpuCompiler", name: str, level: int) -> None:
    """At -O0 each kernel is of one phase, and the optimizer's are of all layers."""
    plan = gpu_compiler.plan(f"training_steps:{name}", level=level)
    program = next(program for program in plan.programs if program.name == "train")
    shares = by_layer(plan, program)
    assert ((), ()) not in shares
    phases = {layer: {p for of, some in shares if layer in of for p in some} for of, _ in shares for layer in of}
    for number in (0, 1, 3, 4, 6, 7, 12):  # those with parameters
        wanted = {"forward", "backward"} if level == 0 else {"forward", "backward", "update"}
        assert phases[f"model.{number}"] == wanted, number
    assert phases["loss"] >= {"forward", "backward"}  # a fused kernel of it may update a layer, too
    if level == 0:
        assert phases["loss"] == {"forward", "backward"}
        assert phases[""] == {"update"}
        assert all(len(layers) == len(some) == 1 for layers, some in shares)
