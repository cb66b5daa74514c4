"""One training step, in one mode; prints one JSON object of figures and nothing else.

Usage: python -m bench.training_peer MODE MODEL [--cpu] [--turns]; MODE is eager, compile (torch.compile's whole step in
one CUDA graph) or a level, O0, O1 or O2; MODEL is NETWORK_batch_N of bench.models.training_networks, or
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
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import clocks, compiling, nimblec_peer, peer_calls, torch_peer
from bench.memory import held
from bench.models import training_networks
from bench.turns import Scenario, peer_parser, run_peer
from nimblec.training.state import autocasting
from nimblert.check.verify import read_plan
from nimblert.loading import load
from nimblert.plan import Plan

LEVELS = ("O0", "O1", "O2")
MODES = ("eager", "compile", *LEVELS)
_LOSSES = 5


class TorchStep:
    """PyTorch's own step, eager or compiled, on a device."""

    def __init__(self, model: str, device: str, *, compiled: bool) -> None:
        network, count, autocast = training_networks.split(model)
        module, optimizer, (inputs, targets) = training_networks.parts(network, count)
        self.dtype, self.device = (torch.bfloat16 if autocast else None), torch.device(device)
        self.module, self.batch = module.to(device).train(), (inputs.to(device), targets.to(device))
        self.loss = training_networks.loss_of(network)
        settings = optimizer.param_groups[0]
        self.optimizer = torch.optim.SGD(self.module.parameters(), settings["lr"], momentum=settings["momentum"])
        self.run: Callable[[], torch.Tensor] = torch.compile(self.step, fullgraph=False) if compiled else self.step

    def step(self) -> torch.Tensor:
        """Take a step on the device; the loss stays there."""
        self.optimizer.zero_grad()
        inputs, targets = self.batch
        with autocasting(self.dtype, self.device):
            value = self.loss(self.module(inputs), targets)
        value.backward()
        self.optimizer.step()
        return value.detach()

    def __call__(self) -> float:
        """Take a step; return its loss."""
        return float(self.run())


def torch_ready(mode: str, model: str, device: str) -> Scenario:
    """Prepare PyTorch's step."""
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
    return Scenario(measure=lambda: {**clocks.quietest(groups), **figures})


def _wall_us(device: str) -> Callable[[Callable[[], object]], list[float]]:
    """Return the wall clock of synchronised steps on a device."""
    return torch_peer.wall_us if device == "cuda" else peer_calls.wall_us


def peak(step: Callable[[], object]) -> dict[str, int]:
    """Return the peaks of PyTorch's allocator over a step: allocated, and reserved from the driver."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {
        "peak_allocated_nbytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_nbytes": torch.cuda.max_memory_reserved(),
    }


def plan_ready(mode: str, model: str, device: str, folder: Path) -> Scenario:
    """Prepare a plan's step at a level."""
    level = None if device == "cpu" else int(mode[1:])
    path, spec = folder / "train.plan", f"{training_networks.__name__}:{model}"
    plan, figures = compiling.compiled(spec, compiling.options(folder, level), path)
    (program,) = plan.entries["train"]
    figures |= {
        "plan_nbytes": path.stat().st_size,
        "arena_nbytes": program.arena_nbytes,
        "state_nbytes": plan.state_nbytes,
        "weights_nbytes": plan.weights_nbytes,
        "commands": len(program.commands),
        "work": Counter(type(command).__name__ for _, command in program.work),
        "streams": program.stream_count,
        "policy": program.schedule.policy if program.schedule else None,
    }
    if program.schedule:
        tried = program.schedule.candidates
        figures["chain_arena_nbytes"] = next(c.arena_nbytes for c in tried if c.stream_count == 1)
    network, count, _ = training_networks.split(model)
    _, _, example = training_networks.parts(network, count)
    host = [tensor.numpy() for tensor in example]
    loaded = load(path)
    figures["losses"] = [np.asarray(loaded(*host, entry="train")).item() for _ in range(_LOSSES)]
    given = [tensor.to(device) for tensor in example] if device == "cuda" else host
    groups: dict[str, Callable[[], clocks.Samples]] = {
        "call": lambda: {"call_us": _wall_us(device)(partial(loaded, *given, entry="train"))}
    }
    if device == "cuda":
        scheduled, chain = map(load, steps_alone(plan))
        for alone in (scheduled, chain):  # replays are steps on this batch, as calls are
            alone(*given)
        groups["kernels"] = lambda: {
            "kernels_us": nimblec_peer.gpu_us(scheduled),
            "replay_us": peer_calls.wall_us(scheduled.replay),
        }
        groups["chain"] = lambda: {"chain_us": nimblec_peer.gpu_us(chain)}
    return Scenario(measure=lambda: {**grown(path, given), **clocks.quietest(groups), **figures})


def grown(path: Path, batch: Sequence[Any]) -> dict[str, int]:
    """Return the growth of the device's memory by a loaded plan that has taken a step; empty for the CPU target."""
    plan = read_plan(path)
    before = held(plan)
    with load(plan) as loaded:
        loaded(*batch, entry="train")
        after = held(plan)
    return {"driver_nbytes": after["device"] - before["device"]} if "device" in after else {}


def steps_alone(plan: Plan) -> tuple[Plan, Plan]:
    """Return the training step as a plan of its own: its kernels as scheduled, and in one chain."""
    step = replace(plan, programs=plan.entries["train"])
    return step, nimblec_peer.serialised(step)


def prepare(options: argparse.Namespace, folder: Path, _: ExitStack) -> Scenario:
    """Prepare one mode."""
    device = "cpu" if options.cpu else "cuda"
    if options.mode in LEVELS:
        return plan_ready(options.mode, options.model, device, folder)
    return torch_ready(options.mode, options.model, device)


def main() -> None:
    """Measure one mode."""
    parser = peer_parser(__doc__, model=False)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("model", help="NETWORK_batch_N or NETWORK_batch_N_bf16")
    parser.add_argument("--cpu", action="store_true")
    run_peer(parser, prepare)


if __name__ == "__main__":
    main()
