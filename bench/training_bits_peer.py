"""Many training steps of a plan at -O0 compared with eager's; prints one JSON object of figures and nothing else.

Usage: python -m bench.training_bits_peer MODE NETWORK [--steps N] [--runs K] [--fp32] [--cpu] [--turns]; MODE is
deterministic or default, NETWORK one of bench.models.training_bits. Both start from the same state and take the same
batches. --fp32 switches TF32 off. --cpu compares a plan of the CPU target, to try the program.

With deterministic algorithms: equal_losses counts the steps whose loss equals eager's bit for bit, first_other is the
first that does not, unequal_state the tensors that differ in the end. By default eager runs K times, and a distance is
the root mean square of the losses' differences, or the relative distance of the final states: "own" is the largest
between two of eager's runs, "plan" that of the plan from the nearest run.

"draws" is the source of a step's random numbers: "none"; "torch" where the plan holds torch's own kernels, and eager's
generator starts from the seed in the plan's state; or "plan" where the plan computes Philox, as on the CPU, and eager
draws the same numbers by nimblec's dispatch mode, which does nothing else.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import compiling
from bench.models import training_bits
from bench.turns import Turn, peer_parser
from nimblec.pytorch.model import set_arithmetic
from nimblec.training.random import Draws
from nimblec.training.state import SEED
from nimblert.loading import load
from nimblert.plan import Plan, Target

MODES = ("deterministic", "default")
STEPS, RUNS = 1000, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The loss of each step, and the final parameters and buffers."""

    losses: np.ndarray
    state: dict[str, np.ndarray]


def eager(network: str, steps: int, device: str, source: str, seed: int) -> Run:
    """Take PyTorch's own steps; its random numbers begin with ``seed``, from the plan's ``source`` (see "draws")."""
    model, batch = training_bits.parts(network)
    model.to(device)
    optimizer = training_bits.optimizer(network, model)
    losses, offset = [], torch.tensor(0, device=device)
    draws = partial(Draws, torch.tensor(seed, device=device)) if source == "plan" else None
    if source == "torch":
        torch.cuda.manual_seed(seed % (1 << 64))
    for number in range(steps):
        inputs, labels = (tensor.to(device) for tensor in batch(number))
        optimizer.zero_grad()
        with (nullcontext() if draws is None else draws(offset)) as drawn:
            loss = training_bits.loss(model(inputs), labels)
        loss.backward()
        offset += 0 if drawn is None else drawn.used
        optimizer.step()
        losses.append(loss.detach())
    state = {f"model.{name}": tensor.cpu().numpy() for name, tensor in model.state_dict().items()}
    return Run(losses=torch.stack(losses).cpu().numpy(), state=state)


def drawn(plan: Plan) -> str:
    """Return the source of the random numbers of a plan's training step: "plan", "torch" or "none"."""
    if SEED not in {tensor.name for tensor in plan.state}:
        return "none"
    (program,) = plan.entries["train"]
    computes_philox = any("bitwise" in op.name for op in program.ops)
    return "plan" if plan.target is Target.CPU or computes_philox else "torch"


def seed_of(plan: Plan) -> int:
    """Return the seed in the initial state of a plan; 0 where it draws no random numbers."""
    return next((int.from_bytes(t.data, "little", signed=True) for t in plan.state if t.name == SEED), 0)


def planned(path: Path, network: str, steps: int) -> Run:
    """Take the steps of a plan."""
    _, batch = training_bits.parts(network)
    with load(path) as exe:
        losses = [np.array(exe(*(t.numpy() for t in batch(number)), entry="train")) for number in range(steps)]
        state = {name: np.array(exe.state[name]) for name in exe.state if name.startswith("model.")}
    return Run(losses=np.array(losses), state=state)


def bits(plan: Run, wanted: Run) -> dict[str, Any]:
    """Return the losses and tensors of two runs that are equal bit for bit."""
    differs = plan.losses.view(np.uint32) != wanted.losses.view(np.uint32)
    return {
        "equal_losses": int((~differs).sum()),
        "first_other": int(differs.argmax()) if differs.any() else None,
        "unequal_state": [key for key, value in wanted.state.items() if value.tobytes() != plan.state[key].tobytes()],
    }


def distances(plan: Run, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the distance of the plan from the nearest of eager's runs, and the largest between those."""
    measures: dict[str, Callable[[Run, Run], float]] = {"losses": _of_losses, "state": _of_state}
    return {
        name: {
            "plan": min(measure(plan, run) for run in runs),
            "own": max(measure(*pair) for pair in combinations(runs, 2)),
        }
        for name, measure in measures.items()
    }


def _of_losses(one: Run, other: Run) -> float:
    return float(np.sqrt(np.mean((one.losses.astype(np.float64) - other.losses) ** 2)))


def _of_state(one: Run, other: Run) -> float:
    squares = [
        (np.sum((other.state[key].astype(np.float64) - value) ** 2), np.sum(value.astype(np.float64) ** 2))
        for key, value in one.state.items()
        if value.dtype.kind == "f"
    ]
    return float(np.sqrt(sum(part for part, _ in squares) / sum(whole for _, whole in squares)))


def figures(network: str, mode: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compile, run both, and compare."""
    device = "cpu" if options.cpu else "cuda"
    how = compiling.options(folder, None if options.cpu else 0, precision="fp32" if options.fp32 else "keep")
    if options.fp32:
        set_arithmetic("fp32")
    if mode == "deterministic":
        training_bits.make_deterministic()
    path = folder / "train.plan"
    made, compilation = compiling.compiled(f"{training_bits.__name__}:{network}_{mode}", how, path)
    source, seed = drawn(made), seed_of(made)
    plan = planned(path, network, options.steps)
    count = 1 if mode == "deterministic" else options.runs
    runs = [eager(network, options.steps, device, source, seed) for _ in range(count)]
    return {
        **compilation,
        "steps": options.steps,
        "fp32": options.fp32,
        "draws": source,
        "losses": plan.losses.tolist(),
        "eager_losses": [run.losses.tolist() for run in runs],
        **(bits(plan, runs[0]) if mode == "deterministic" else {"distances": distances(plan, runs)}),
    }


def main() -> None:
    """Compare one network's steps; nothing is timed."""
    parser = peer_parser(__doc__, model=False)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("network", choices=training_bits.NETWORKS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--runs", type=int, default=RUNS, help="of eager, by default")
    parser.add_argument("--fp32", action="store_true", help="without TF32")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    turn = Turn(wait=options.turns)
    with tempfile.TemporaryDirectory() as folder:
        turn.report(**figures(options.network, options.mode, options, Path(folder)))
    turn.end()


if __name__ == "__main__":
    main()
