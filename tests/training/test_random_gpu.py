"""Random numbers of training steps on the GPU: at -O0 those that PyTorch draws, from any state of its generator."""

from typing import TYPE_CHECKING

import numpy as np
import pytest
import random_steps
import torch
from random_steps import NAMES, SEED, Eager

import nimblec
import nimblert
from nimblert.plan import Launch

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile", "gpu_training")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("without_tf32", "deterministic"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

STEPS = 24
TORCHS_OWN = {
    "dropouts": {"aten.native_dropout.default": 3, "aten.bernoulli_.float": 1},
    "depth": {"aten.native_dropout.default": 1, "aten.bernoulli_.float": 3},
}


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    gpu_compiler.start(*(f"random_steps:{name}" for name in NAMES))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.cuda.manual_seed(SEED)


def run(exe: nimblert.Executable, seed: int) -> np.ndarray:
    """Return the loss of a batch, before the step."""
    return np.asarray(exe(*(tensor.numpy() for tensor in random_steps.batch(seed)), entry="train"))


def differences(exe: nimblert.Executable, eager: Eager) -> dict[str, object]:
    """Return what differs in the states, by name: by how much at most, and in how many elements.

    What an optimizer keeps may have zeros of either sign: a plan begins with zeros where eager begins with nothing.
    """
    found = {}
    for name, wanted in eager.state():
        if name not in exe.state:
            found[name] = "not in the plan's state"
            continue
        value = np.asarray(exe.state[name])
        if not np.array_equal(value, wanted) or (name.startswith("model.") and value.tobytes() != wanted.tobytes()):
            apart = np.abs(value.astype(np.float64) - wanted.astype(np.float64))
            found[name] = f"{apart.max():.3g} in {np.count_nonzero(value != wanted)} of {value.size}"
    return found


def compare(exe: nimblert.Executable, eager: Eager, seeds: range) -> None:
    """Compare steps of both, bit by bit, and how far the generator is after each."""
    for seed in seeds:
        before = {key: int(exe.state[f"generator.{key}"]) for key in ("seed", "offset")}
        start = torch.cuda.get_rng_state().numpy().view(np.int64).tolist()
        found, wanted = run(exe, seed), eager(seed)
        offset, expected = int(exe.state["generator.offset"]), int(torch.cuda.default_generators[0].get_offset())
        assert (found.tobytes(), offset) == (wanted.tobytes(), expected), (
            f"step {seed}: loss of the plan {found!r}, of eager {wanted!r}; offset of the plan {offset}, of eager "
            f"{expected}; before the step plan {before}, eager {start}; state: {differences(exe, eager)}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_holds_torchs_own_kernels(gpu_compiler: "GpuCompiler", name: str) -> None:
    """The plan has torch's own kernel for each op that draws, and none that computes Philox."""
    plan = gpu_compiler.plan(f"random_steps:{name}")
    program = next(program for program in plan.programs if program.name == "train")
    ops = [program.ops[command.op].name for command in program.commands if isinstance(command, Launch)]
    wanted = TORCHS_OWN[name.partition("_")[0]]
    found = {op: ops.count(op) for op in wanted}  # and launches that fill new memory
    assert all(found[op] >= count for op, count in wanted.items()), (found, sorted({*ops}))
    assert not [op for op in ops if "bitwise" in op or "xor" in op or "shift" in op], sorted({*ops})
    assert {"generator.seed", "generator.offset", "optimizer.lr"} <= {tensor.name for tensor in plan.state}


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_eagers(gpu_compiler: "GpuCompiler", name: str) -> None:
    """Losses, what they leave, and the generator, from the seed of the process that made the step."""
    eager = Eager(name)
    torch.cuda.manual_seed(SEED)
    with nimblert.load(gpu_compiler.plan(f"random_steps:{name}"), poison=True) as exe:
        assert (int(exe.state["generator.seed"]), int(exe.state["generator.offset"])) == (SEED, 0)
        compare(exe, eager, range(STEPS))
        assert not differences(exe, eager)
        assert int(exe.state["generator.offset"]) > 0


@pytest.mark.parametrize("name", NAMES)
def test_both_go_on_from_the_others_state(gpu_compiler: "GpuCompiler", name: str) -> None:
    """A plan from eager's generator, wherever that is, eager from a plan's; a reset gives the first numbers again."""
    eager = Eager(name)
    torch.cuda.manual_seed(SEED)
    with nimblert.load(gpu_compiler.plan(f"random_steps:{name}"), poison=True) as exe:
        first = [run(exe, seed).tobytes() for seed in range(3)]
        exe.reset()
        assert [run(exe, seed).tobytes() for seed in range(3)] == first
        exe.reset()
        torch.cuda.manual_seed((1 << 64) - 9)
        torch.rand(100_000, device="cuda")
        seed, offset = torch.cuda.get_rng_state().numpy().view(np.int64)
        assert (seed, offset > 0) == (-9, True)
        exe.state["generator.seed"], exe.state["generator.offset"] = seed, offset
        compare(exe, eager, range(5))
        other = Eager(name)
        nimblec.load_state(other.model, exe.state, other.optimizer)
        torch.cuda.manual_seed(int(exe.state["generator.seed"]) % (1 << 64))
        torch.cuda.default_generators[0].set_offset(int(exe.state["generator.offset"]))
        compare(exe, other, range(5, 10))
        assert not differences(exe, other)


@pytest.mark.parametrize("name", ["dropouts_sgd", "dropouts_adam"])
def test_the_learning_rate_is_state(gpu_compiler: "GpuCompiler", name: str) -> None:
    """That a caller may set, though no step writes it."""
    eager = Eager(name)
    torch.cuda.manual_seed(SEED)
    with nimblert.load(gpu_compiler.plan(f"random_steps:{name}"), poison=True) as exe:
        compare(exe, eager, range(2))
        exe.state["optimizer.lr"] = np.float32(1 / 256)
        eager.optimizer.param_groups[0]["lr"] = 1 / 256
        compare(exe, eager, range(2, 5))
        assert not differences(exe, eager)
