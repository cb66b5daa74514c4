"""One training step, in one mode; prints one JSON object of figures and nothing else.

Usage: python -m bench.training_peer MODE MODEL [--cpu] [--turns]; MODE is eager, compile (torch.compile's whole step in
one CUDA graph) or a level, O0, O1 or O2; MODEL is NETWORK_batch_N of bench.models.cifar_training, or
NETWORK_batch_N_bf16. --cpu runs eager or O0 on the CPU, to try the program; a plan takes only the former.

call_us: the wall clock of a step, synchronised, the batch in the memory of the device. kernels_us: GPU time of the
step's CUDA graph, by events around each replay; replay_us: the wall clock of the same replay of a plan, synchronised;
chain_us: the GPU time of the plan's kernels in one chain. losses: of the first steps; all modes start from the same
state and take the same batch. float32 is multiplied as PyTorch does by default, with TF32 in convolutions.

peak_allocated_nbytes and peak_reserved_nbytes: of PyTorch's allocator over a step, including weights and the
optimizer's state; graph_reserved_nbytes: what it holds for these and the CUDA graph. driver_nbytes: the growth of the
device's memory in use when a plan is loaded and takes a step.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench import clocks, nimblec_peer, peer_calls, torch_peer
from bench.memory import held
from bench.models import cifar_training
from bench.turns import Turn, add_turns
from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblec.training.state import autocasting
from nimblert.check.verify import read_plan
from nimblert.executable import load
from nimblert.plan import Plan

LEVELS = ("O0", "O1", "O2")
MODES = ("eager", "compile", *LEVELS)
_LOSSES = 5


class TorchStep:
    """PyTorch's own step, eager or compiled, on a device."""

    def __init__(self, model: str, device: str, *, compiled: bool) -> None:
        network, count, autocast = cifar_training.split(model)
        module, optimizer, (images, labels) = cifar_training.parts(network, count)
        self.dtype, self.device = (torch.bfloat16 if autocast else None), torch.device(device)
        self.module, self.batch = module.to(device).train(), (images.to(device), labels.to(device))
        settings = optimizer.param_groups[0]
        self.optimizer = torch.optim.SGD(self.module.parameters(), settings["lr"], momentum=settings["momentum"])
        self.run: Callable[[], torch.Tensor] = torch.compile(self.step, fullgraph=False) if compiled else self.step

    def step(self) -> torch.Tensor:
        """One step on the device; the loss stays there."""
        self.optimizer.zero_grad()
        images, labels = self.batch
        with autocasting(self.dtype, self.device):
            value = nn.functional.cross_entropy(self.module(images), labels)
        value.backward()
        self.optimizer.step()
        return value.detach()

    def __call__(self) -> float:
        """One step, and its loss."""
        return float(self.run())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Figures that are known before measuring, the clocks to sample, and the memory to measure alone."""

    figures: dict[str, Any]
    groups: dict[str, Callable[[], clocks.Samples]]
    memory: Callable[[], dict[str, int]] = dict


def torch_ready(mode: str, model: str, device: str) -> Ready:
    """PyTorch's step."""
    if mode == "compile" and device == "cuda":
        torch_peer.time_kernels_alone()
    step = TorchStep(model, device, compiled=mode == "compile")
    figures: dict[str, Any] = {"losses": [step() for _ in range(_LOSSES)]}
    groups: dict[str, Callable[[], clocks.Samples]] = {"call": lambda: {"call_us": _wall_us(device)(step.run)}}
    if device == "cuda":
        figures |= peak(step.run)
    if mode == "compile":
        graph, figures["graph_pool_nbytes"] = torch_peer.captured(step.run)
        figures["graph_reserved_nbytes"] = torch.cuda.memory_reserved()
        groups["kernels"] = lambda: {"kernels_us": torch_peer.gpu_us(graph.replay)}
        groups["call"] = lambda: {"call_us": torch_peer.wall_us(graph.replay)}
    return Ready(figures=figures, groups=groups)


def _wall_us(device: str) -> Callable[[Callable[[], object]], list[float]]:
    """The wall clock of synchronised steps on a device."""
    return torch_peer.wall_us if device == "cuda" else peer_calls.wall_us


def peak(step: Callable[[], object]) -> dict[str, int]:
    """The peaks of PyTorch's allocator over a step: allocated, and reserved from the driver."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {
        "peak_allocated_nbytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_nbytes": torch.cuda.max_memory_reserved(),
    }


def plan_ready(mode: str, model: str, device: str, folder: Path) -> Ready:
    """A plan's step at a level."""
    options = Options(
        target="cuda" if device == "cuda" else "cpu",
        level=None if device == "cpu" else int(mode[1:]),
        timing_cache=folder / "timings",
        plan_cache=None,
    )
    path, begin = folder / "train.plan", time.perf_counter()
    spec = f"{cifar_training.__name__}:{model}"
    made = compile_model(spec, options=options, output=path, observer=lambda *_: None)
    (program,) = made.plan.entries["train"]
    figures: dict[str, Any] = {
        "prepare_s": time.perf_counter() - begin,
        "stages_s": made.stages,
        "notes": made.notes,
        "plan_nbytes": path.stat().st_size,
        "arena_nbytes": program.arena_nbytes,
        "state_nbytes": made.plan.state_nbytes,
        "weights_nbytes": made.plan.weights_nbytes,
        "commands": len(program.commands),
        "work": Counter(type(command).__name__ for _, command in program.work),
        "streams": program.stream_count,
        "policy": program.schedule.policy if program.schedule else None,
    }
    network, count, _ = cifar_training.split(model)
    _, _, example = cifar_training.parts(network, count)
    host = [tensor.numpy() for tensor in example]
    loaded = load(path)
    figures["losses"] = [np.asarray(loaded(*host, entry="train")).item() for _ in range(_LOSSES)]
    given = [tensor.to(device) for tensor in example] if device == "cuda" else host
    groups: dict[str, Callable[[], clocks.Samples]] = {
        "call": lambda: {"call_us": _wall_us(device)(partial(loaded, *given, entry="train"))}
    }
    if device == "cuda":
        scheduled, chain = map(load, steps_alone(made.plan))
        for alone in (scheduled, chain):  # replays are steps on this batch, as calls are
            alone(*given)
        groups["kernels"] = lambda: {
            "kernels_us": nimblec_peer.gpu_us(scheduled),
            "replay_us": peer_calls.wall_us(scheduled.replay),
        }
        groups["chain"] = lambda: {"chain_us": nimblec_peer.gpu_us(chain)}
    return Ready(figures=figures, groups=groups, memory=partial(grown, path, given))


def grown(path: Path, batch: Sequence[Any]) -> dict[str, int]:
    """The growth of the device's memory by a loaded plan that has taken a step; empty for the CPU target."""
    plan = read_plan(path)
    before = held(plan)
    with load(plan) as loaded:
        loaded(*batch, entry="train")
        after = held(plan)
    return {"driver_nbytes": after["device"] - before["device"]} if "device" in after else {}


def steps_alone(plan: Plan) -> tuple[Plan, Plan]:
    """The training step as a plan of its own: its kernels as scheduled, and in one chain."""
    step = replace(plan, programs=plan.entries["train"])
    return step, nimblec_peer.serialised(step)


def main() -> None:
    """Measure one mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("model", help="NETWORK_batch_N or NETWORK_batch_N_bf16")
    parser.add_argument("--cpu", action="store_true")
    add_turns(parser)
    options = parser.parse_args()
    turn = Turn(wait=options.turns)
    device = "cpu" if options.cpu else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        if options.mode in LEVELS:
            ready = plan_ready(options.mode, options.model, device, Path(folder))
        else:
            ready = torch_ready(options.mode, options.model, device)
        turn.begin()
        turn.report(**ready.memory(), **clocks.quietest(ready.groups), **ready.figures)
    turn.end()


if __name__ == "__main__":
    main()
