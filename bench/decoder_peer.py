"""One step of a decoder whose cache is state, in one mode; prints one JSON object of figures and nothing else.

Usage: python -m bench.decoder_peer MODE MODEL [--cpu] [--steps N] [--turns]; MODEL is package.module:callable, such as
those of bench.models.llama_decoder. MODE is eager, compile (torch.compile, the cache written in place), freeze (the
same with freezing), given (torch.compile with freezing, the cache an input and its new rows an output), or a level, O0,
O1 or O2. --cpu runs eager or O0 on the CPU, to try the program.

tokens: those generated greedily; logits: the highest logit of each step. token_us: the wall clock of such a step, its
token read by the host. kernels_us: GPU time of a step's CUDA graph, by events around each replay. call_us: the wall
clock of a call, synchronised, token and position in the GPU's memory. torch.compile's step is one CUDA graph for all of
these. The state's "uses" are those of `nimblec inspect`; writers and readers are the calls that access it.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import clocks, compiling, nimblec_peer, reference, torch_peer
from bench.models.llama_decoder import GivenCache
from bench.turns import Scenario, peer_parser, run_peer
from nimblec.inspect.inspection import state_uses
from nimblert.check.verify import read_plan
from nimblert.loading import load
from nimblert.plan import Access, Launch, Memcpy, Plan, Program, Region

LEVELS = ("O0", "O1", "O2")
MODES = ("eager", "compile", "freeze", "given", *LEVELS)
STEPS = 200
_FIRST = 1
_COLD = 10
"""The first steps, whose time is left out."""

Next = Callable[[int, int], tuple[int, float]]
"""The next token, and its logit, after a token at a position."""


class TorchDecoder:
    """PyTorch's own step on a device; ``given`` where the cache is an input."""

    def __init__(self, spec: str, device: str, *, given: bool) -> None:
        module, inputs, _ = reference.seeded(spec)
        self._inputs = [tensor.to(device) for tensor in inputs]
        self._given = given
        if given:
            shape = module.shape
            cache = torch.zeros(2 * shape.layers, shape.key_heads, shape.length, shape.head)
            self._inputs.append(cache.to(device, next(module.parameters()).dtype))
            module = GivenCache(module).eval()
        self._function: Callable[..., Any] = module.to(device)
        self._result: Any = None
        self.step: Callable[[], object] = self.run
        """Runs the step of the current token and position."""

    def compile(self, *, freezing: bool) -> None:
        """Run the step by torch.compile from now on."""
        from torch._inductor import config

        torch_peer.time_kernels_alone()
        config.freezing = freezing
        self._function = torch.compile(self._function)

    def capture(self) -> int:
        """Replay the step as a CUDA graph from now on; returns the bytes of its memory pool."""
        graph, pool = torch_peer.captured(self.run)
        self.step = graph.replay
        return pool

    def run(self) -> None:
        """Run the step by PyTorch's own calls."""
        self._result = self._function(*self._inputs)

    def next(self, token: int, position: int) -> tuple[int, float]:
        """Run a step; writes its rows into a cache that is an input."""
        self._inputs[0].fill_(token)
        self._inputs[1].fill_(position)
        self.step()
        logits = self._result[0] if self._given else self._result
        if self._given:
            self._inputs[2][:, :, position : position + 1] = self._result[1]
        best = logits.argmax()
        return int(best), float(logits.flatten()[best])


def generated(step: Next, steps: int) -> dict[str, Any]:
    """Return the tokens after the first, their logits, and the time of a step."""
    token, tokens, logits, times = _FIRST, [], [], []
    for position in range(steps):
        begin = time.perf_counter()
        token, logit = step(token, position)
        times.append((time.perf_counter() - begin) * 1e6)
        tokens.append(token)
        logits.append(logit)
    return {"tokens": tokens, "logits": logits, "token_us": clocks.spread(times[_COLD:])}


Figures = dict[str, Any]
Groups = dict[str, Callable[[], clocks.Samples]]


def torch_figures(mode: str, spec: str, device: str, steps: int) -> tuple[Figures, Groups, Callable[[], Figures]]:
    """Return PyTorch's figures before measuring, the clocks to sample, and the generation of tokens."""
    decoder = TorchDecoder(spec, device, given=mode == "given")
    if mode != "eager":
        decoder.compile(freezing=mode != "compile")
    figures: Figures = {}
    if device == "cpu":
        return figures, {}, partial(generated, decoder.next, steps)
    begin = time.perf_counter()
    for _ in range(3):
        decoder.run()
    groups: Groups = {}
    if mode != "eager":
        figures["graph_pool_nbytes"] = decoder.capture()
        groups["kernels"] = lambda: {"kernels_us": torch_peer.gpu_us(decoder.step)}
    groups["call"] = lambda: {"call_us": torch_peer.wall_us(decoder.step)}
    figures["prepare_s"] = time.perf_counter() - begin
    return figures, groups, partial(generated, decoder.next, steps)


def plan_figures(
    mode: str, spec: str, device: str, steps: int, folder: Path
) -> tuple[Figures, Groups, Callable[[], Figures]]:
    """Return the same for a plan at a level."""
    level = None if device == "cpu" else int(mode[1:])
    _, figures = compiling.compiled(spec, compiling.options(folder, level), folder / "decoder.plan")
    plan = read_plan(folder / "decoder.plan")
    figures |= of_plan(plan)
    executable = load(plan)

    def following(token: int, position: int) -> tuple[int, float]:
        logits = np.asarray(executable(np.array([token]), np.array([position]))).ravel()
        best = int(logits.argmax())
        return best, float(logits[best])

    generate = partial(generated, following, steps)
    if device == "cpu":
        return figures, {}, generate
    placed = torch.tensor([_FIRST], device="cuda"), torch.tensor([0], device="cuda")
    groups: Groups = {
        "kernels": lambda: {"kernels_us": nimblec_peer.gpu_us(executable)},
        "call": lambda: {"call_us": torch_peer.wall_us(partial(executable, *placed))},
    }
    return figures, groups, generate


def of_plan(plan: Plan) -> Figures:
    """Return the launches and copies of a plan of one step, and the uses of its state."""
    (program,) = plan.programs
    launches = [program.ops[c.op].name for c in program.commands if isinstance(c, Launch)]
    return {
        "level": dict(plan.versions).get("level"),
        "launches": len(launches),
        "own_launches": sum(name.startswith("nimblec.") for name in launches),
        "copied_nbytes": sum(c.nbytes for c in program.commands if isinstance(c, Memcpy)),
        "state_nbytes": plan.state_nbytes,
        "arena_nbytes": program.arena_nbytes,
        "weights_nbytes": plan.weights_nbytes,
        "uses": dict(Counter(how for uses in _model_uses(plan) for how in uses.values())),
        "readers": dict(Counter(name for name, accesses in _touched(program, "reads") if _state(accesses))),
        "writers": dict(Counter(name for name, accesses in _touched(program, "writes") if _state(accesses))),
    }


def _model_uses(plan: Plan) -> Iterator[dict[str, str]]:
    """Yield the uses of each tensor of the state but kernels' scratch memory."""
    return (uses for tensor, uses in zip(plan.state, state_uses(plan), strict=True) if tensor.name)


def _touched(program: Program, how: str) -> Iterator[tuple[str, tuple[Access, ...]]]:
    for command in program.commands:
        if isinstance(command, Launch):
            yield program.ops[command.op].name, getattr(command, how)
        elif isinstance(command, Memcpy):
            place = command.src if how == "reads" else command.dst
            yield program.ops[command.op].name, (Access(pointer=place, nbytes=command.nbytes),)


def _state(accesses: tuple[Access, ...]) -> bool:
    return any(access.pointer.region is Region.STATE for access in accesses)


def prepare(options: argparse.Namespace, folder: Path, _: ExitStack) -> Scenario:
    """Prepare one mode."""
    device = "cpu" if options.cpu else "cuda"
    if options.mode in LEVELS:
        found = plan_figures(options.mode, options.model, device, options.steps, folder)
    else:
        found = torch_figures(options.mode, options.model, device, options.steps)
    figures, groups, generate = found
    return Scenario(measure=lambda: {**clocks.quietest(groups), **generate(), **figures})


def main() -> None:
    """Measure one mode."""
    parser = peer_parser(__doc__, model=False)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("model", metavar="MODEL", help="package.module:callable")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS, help="tokens to generate")
    with torch.no_grad():
        run_peer(parser, prepare)


if __name__ == "__main__":
    main()
