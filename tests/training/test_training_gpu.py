"""Training steps on the GPU: eager's bits at -O0, its values above, float64's gradients, and exact resumption."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import training_steps
from safetensors.numpy import load_file, save_file
from torch import nn

import nimblert

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

LEVELS = (0, 1, 2)
STEPS = 50


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    for level in LEVELS:
        gpu_compiler.start(*(f"training_steps:{name}" for name in ("sgd", "adam", "dropping", "networks")), level=level)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    training_steps.deterministic()
    yield
    torch.use_deterministic_algorithms(mode=False)


def run(exe: nimblert.Executable, seed: int) -> np.ndarray:
    return np.asarray(exe(*(tensor.numpy() for tensor in training_steps.batch(seed)), entry="train"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_steps_are_eagers(gpu_compiler: "GpuCompiler", name: str, level: int) -> None:
    """Bit by bit at -O0; above it losses stay within rounding for as long as that does not grow."""
    plan = gpu_compiler.plan(f"training_steps:{name}", level=level)
    model = training_steps.images().cuda().train()
    optimizer = training_steps.OPTIMIZERS[name](model)
    with nimblert.load(plan, poison=True) as exe:
        for seed in range(STEPS if level == 0 else 5):
            images, labels = (tensor.cuda() for tensor in training_steps.batch(seed))
            optimizer.zero_grad()
            value = nn.functional.cross_entropy(model(images), labels)
            value.backward()
            optimizer.step()
            found, wanted = run(exe, seed), value.detach().cpu().numpy()
            assert found.tobytes() == wanted.tobytes() if level == 0 else np.allclose(found, wanted, rtol=1e-3), seed
        for key, tensor in model.state_dict().items():
            found, wanted = exe.state[f"model.{key}"], tensor.cpu().numpy()
            if level == 0:
                assert found.tobytes() == wanted.tobytes(), key
            else:
                assert np.allclose(found, wanted, rtol=1e-2, atol=1e-3), key


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
        for name, exact in found[torch.float64].items():
            key, scale = f"model.{name}", max(float(np.abs(exact).max()), 1e-3)
            gradient = before[key].astype(np.float64) - exe.state[key]
            eager = float(np.abs(found[torch.float32][name] - exact).max())
            rounding = 2e-7 * float(np.abs(before[key]).max())  # of the parameter that was read back
            assert np.abs(gradient - exact).max() <= 8 * eager + rounding + 1e-5 * scale, name


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
