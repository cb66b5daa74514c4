"""One training step, in one mode. Prints one JSON object of figures, and nothing else.

Usage: python -m bench.training_peer MODE MODEL [--cpu] [--turns]; MODE is eager, compile (torch.compile's whole step
in one CUDA graph) or a level, O0, O1 or O2; MODEL is NETWORK_batch_N of bench.models.cifar_training, or
NETWORK_batch_N_bf16. --cpu takes eager or O0 on the CPU, to see that the rest works; a plan only of the former.

call_us: the wall clock of a step, synchronised, the batch in the memory of the device. kernels_us: GPU time of the
step's CUDA graph, by events around each replay; chain_us: that of the plan's kernels in one chain. losses: of the first
steps, all modes from one state and batch. Float32 is multiplied as PyTorch does by default, TF32 in convolutions.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench import clocks
from bench.models import cifar_training
from bench.turns import Turn
from nimblec.compiler import compile_model
from nimblec.frontend.pytorch.training.state import autocasting
from nimblec.options import Options
from nimblert.executable import Executable, load
from nimblert.plan import Plan

LEVELS = ("O0", "O1", "O2")
MODES = ("eager", "compile", *LEVELS)
_WARM_UPS, _REPEATS, _LOSSES = 10, 50, 5

Step = Callable[[], float]


class TorchStep:
    """PyTorch's own step, eager or compiled, on a device."""

    def __init__(self, model: str, device: str, *, compiled: bool) -> None:
        network, count, autocast = cifar_training.split(model)
        module, optimizer, (images, labels) = cifar_training.parts(network, count)
        self.type, self.device = (torch.bfloat16 if autocast else None), torch.device(device)
        self.module, self.batch = module.to(device).train(), (images.to(device), labels.to(device))
        settings = optimizer.param_groups[0] | {"params": list(self.module.parameters())}
        self.optimizer = torch.optim.SGD(settings["params"], settings["lr"], momentum=settings["momentum"])
        self.run: Callable[[], torch.Tensor] = torch.compile(self.step, fullgraph=False) if compiled else self.step

    def step(self) -> torch.Tensor:
        """One step on the device; the loss stays there."""
        self.optimizer.zero_grad()
        images, labels = self.batch
        with autocasting(self.type, self.device):
            value = nn.functional.cross_entropy(self.module(images), labels)
        value.backward()
        self.optimizer.step()
        return value.detach()

    def __call__(self) -> float:
        """One step, and its loss."""
        return float(self.run())


def wall_us(step: Callable[[], object]) -> list[float]:
    """Microseconds of each of many synchronised steps."""
    times = []
    for _ in range(_WARM_UPS + _REPEATS):
        begin = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return times[_WARM_UPS:]


def torch_clocks(mode: str, model: str, device: str) -> tuple[dict[str, Any], dict[str, Callable[[], clocks.Samples]]]:
    """Figures that are known before measuring, and what to sample, of PyTorch."""
    step = TorchStep(model, device, compiled=mode == "compile")
    figures: dict[str, Any] = {"losses": [step() for _ in range(_LOSSES)]}
    groups: dict[str, Callable[[], clocks.Samples]] = {"call": lambda: {"call_us": wall_us(step.run)}}
    if mode == "compile":
        from bench.torch_peer import captured, gpu_us

        graph, pool = captured(step.run)
        figures["graph_pool_nbytes"] = pool
        groups["kernels"] = lambda: {"kernels_us": gpu_us(graph.replay)}
        groups["call"] = lambda: {"call_us": wall_us(graph.replay)}
    return figures, groups


def plan_clocks(
    mode: str, model: str, device: str, folder: Path
) -> tuple[dict[str, Any], dict[str, Callable[[], clocks.Samples]]]:
    """The same of a plan at a level."""
    options = Options(
        target="cuda" if device == "cuda" else "cpu",
        level=None if device == "cpu" else int(mode[1:]),
        timing_cache=folder / "timings",
        plan_cache=None,
    )
    path, begin = folder / "train.plan", time.perf_counter()
    spec = f"{cifar_training.__name__}:{model}"
    made = compile_model(spec, options=options, output=path, observer=lambda *_: None)
    figures: dict[str, Any] = {
        "prepare_s": time.perf_counter() - begin,
        "notes": made.notes,
        "plan_nbytes": path.stat().st_size,
        "arena_nbytes": made.plan.programs[0].arena_nbytes,
        "state_nbytes": made.plan.state_nbytes,
        "commands": len(made.plan.programs[0].commands),
        "streams": made.plan.programs[0].stream_count,
    }
    network, count, _ = cifar_training.split(model)
    _, _, example = cifar_training.parts(network, count)
    host = [tensor.numpy() for tensor in example]
    loaded = load(path)
    figures["losses"] = [np.asarray(loaded(*host, entry="train")).item() for _ in range(_LOSSES)]
    given = [tensor.to(device) for tensor in example] if device == "cuda" else host
    groups: dict[str, Callable[[], clocks.Samples]] = {
        "call": lambda: {"call_us": wall_us(partial(loaded, *given, entry="train"))}
    }
    if device == "cuda":
        groups |= {clock: partial(_sampled, clock, load(plan)) for clock, plan in steps_alone(made.plan).items()}
    return figures, groups


def steps_alone(plan: Plan) -> dict[str, Plan]:
    """The training step as a plan of its own: its kernels as they are scheduled, and in one chain."""
    from bench.nimblec_peer import serialised

    step = replace(plan, programs=plan.entries["train"])
    return {"kernels": step, "chain": serialised(step)}


def _sampled(clock: str, step: Executable) -> dict[str, np.ndarray]:
    from bench.nimblec_peer import gpu_us

    return {f"{clock}_us": gpu_us(step)}


def main() -> None:
    """Measure one mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("model", help="NETWORK_batch_N or NETWORK_batch_N_bf16")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--turns", action="store_true", help="wait to be told when to measure")
    options = parser.parse_args()
    turn = Turn(wait=options.turns)
    device = "cpu" if options.cpu else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        if options.mode in LEVELS:
            figures, groups = plan_clocks(options.mode, options.model, device, Path(folder))
        else:
            figures, groups = torch_clocks(options.mode, options.model, device)
        turn.begin()
        turn.say(**clocks.quietest(groups), **figures)
    turn.end()


if __name__ == "__main__":
    main()
