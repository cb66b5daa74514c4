"""Training steps under torch.autocast on the GPU: eager's bits at -O0, its values and skipped steps at all levels."""

from functools import partial
from typing import TYPE_CHECKING

import autocast_steps
import numpy as np
import pytest
import torch
from autocast_steps import HUGE, Eager
from numpy.typing import ArrayLike

import nimblec
import nimblert
from nimblec.training.scaler import SCALE, TRACKER

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile", "gpu_training")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("without_tf32", "deterministic"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

LEVELS = (0, 1, 2)
NAMES = ("sgd_bf16", "adam_bf16", "sgd_fp16", "adam_fp16", "clipped_fp16")


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    for level in reversed(LEVELS):
        gpu_compiler.start(*(f"autocast_steps:{name}" for name in NAMES), level=level)


def run(exe: nimblert.Executable, seed: int) -> np.ndarray:
    """Return the loss of a batch, before the step."""
    return np.asarray(exe(*(tensor.numpy() for tensor in autocast_steps.batch(seed)), entry="train"))


def assign(exe: nimblert.Executable, name: str, value: ArrayLike) -> None:
    """Give a tensor of the state another value."""
    exe.state[name] = np.asarray(value)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_eagers(gpu_compiler: "GpuCompiler", name: str) -> None:
    """Bit by bit at -O0, those that are skipped, too."""
    eager = Eager(name, "cuda")
    with nimblert.load(gpu_compiler.plan(f"autocast_steps:{name}"), poison=True) as exe:
        for seed, wanted, found in autocast_steps.run_events(eager, partial(run, exe), partial(assign, exe)):
            assert found.tobytes() == wanted.tobytes(), seed
            state = dict(exe.state)
            for key, value in eager.state().items():
                assert state[key].tobytes() == value.tobytes(), (seed, key)
        x, _ = autocast_steps.batch(0)
        scores = torch.from_numpy(np.asarray(exe(x.numpy(), entry="evaluate")).astype(np.float32))
        assert torch.equal(scores, eager.evaluate(0).float())
        if eager.scaler.is_enabled():
            assert TRACKER in state
            other = Eager(name, "cuda")
            nimblec.load_state(other.model, exe.state, other.optimizer, other.scaler)
            assert other.scaler.get_scale() == eager.scaler.get_scale()
            assert other(11).tobytes() == run(exe, 11).tobytes()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_a_graph_are_near_eagers(gpu_compiler: "GpuCompiler", name: str, level: int) -> None:
    """Losses within a few roundings of half precision, and the same steps are skipped."""
    eager = Eager(name, "cuda")
    with nimblert.load(gpu_compiler.plan(f"autocast_steps:{name}", level=level), poison=True) as exe:
        x, _ = autocast_steps.batch(0)
        scores = torch.from_numpy(np.asarray(exe(x.numpy(), entry="evaluate")).astype(np.float32))
        torch.testing.assert_close(scores, eager.evaluate(0).float(), rtol=5e-2, atol=5e-2)
        for seed, wanted, found in autocast_steps.run_events(eager, partial(run, exe), partial(assign, exe)):
            assert found == pytest.approx(wanted, rel=5e-2), seed
            if eager.scaler.is_enabled():
                state = eager.state()
                assert (exe.state[SCALE], exe.state[TRACKER]) == (state[SCALE], state[TRACKER]), seed


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["sgd_fp16", "adam_fp16"])
def test_overflow_leaves_all_but_statistics(gpu_compiler: "GpuCompiler", name: str, level: int) -> None:
    """The scale's own change included."""
    with nimblert.load(gpu_compiler.plan(f"autocast_steps:{name}", level=level)) as exe:
        run(exe, 0)
        assign(exe, SCALE, np.float32(HUGE))
        before = dict(exe.state)
        run(exe, 1)
        after = dict(exe.state)
        changed = {key for key, value in after.items() if value.tobytes() != before[key].tobytes()}
        parts = ("running_mean", "running_var", "num_batches_tracked")
        assert changed == {SCALE, TRACKER, *(f"model.{layer}.{part}" for layer in (1, 4) for part in parts)}
        assert (float(after[SCALE]), int(after[TRACKER])) == (HUGE / 2, 0)
