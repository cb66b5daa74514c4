"""One model in nimblec alone, at one level; prints one JSON object of figures and nothing else.

Usage: python -m bench.nimblec_peer LEVEL MODEL [--fp32] [--precision fp16 | fp8] [--chain] [--clocks GROUPS] [--turns];
--fp32 switches TF32 off, --precision computes a model in float32 as `nimblec compile` does; --chain also times the same
kernels in one chain, and describes the schedule; --turns takes turns with other processes at measuring.

kernels_us: GPU time of the plan's graph, by events around each replay. replay_us: the wall clock of the same replay,
synchronised, inputs in the GPU's memory. numpy_us: the wall clock of a call from arrays in C order to arrays;
other_order_us: the same with images channels last; page_locked_us: the same from arrays of `empty_input`. call_us: the
wall clock of a call from tensors on the GPU to new arrays there, synchronised. launch_us: the caller's time for a
launch on bound arrays, without waiting for the GPU.
"""

import argparse
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from bench import clocks, compiling, reference
from bench.clocks import REPEATS, WARM_UPS
from bench.peer_calls import wall_us
from bench.turns import Scenario, add_model, peer_parser, run_peer
from nimblert import golden
from nimblert.check.hazards import hazards
from nimblert.check.verify import read_plan
from nimblert.cuda import profiling
from nimblert.executable import Executable
from nimblert.loading import load
from nimblert.plan import Launch, Plan, Program, Record, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

_COPIED_NBYTES = 64 << 20


def placed(plan: Plan | Path, **options: Any) -> Executable:
    """Return a loaded plan that has run once, on drawn inputs: a kernel must not take arbitrary bytes for indices."""
    loaded = load(plan, **options)
    loaded.run(golden.draw_inputs(loaded.program, 0))
    return loaded


def gpu_us(loaded: Executable) -> np.ndarray:
    """Return the GPU microseconds of each of many replays, on the inputs of the last run."""
    backend: Any = loaded._backends[loaded.program.name]  # noqa: SLF001 - no public way leads there
    return profiling.replay_times(backend, WARM_UPS + REPEATS)[WARM_UPS:]


def serialised(plan: Plan) -> Plan:
    """Return the same kernels in the same memory on one stream, in issue order."""
    program = plan.programs[0]
    commands = tuple(
        replace(c, stream=0, programmatic=False) if isinstance(c, Launch) else replace(c, stream=0)
        for c in program.commands
        if not isinstance(c, Record | Wait)
    )
    return replace(plan, programs=(replace(program, commands=commands, stream_count=1, event_count=0, schedule=None),))


def schedule(program: Program, loaded: Executable) -> dict[str, Any]:
    """Return the schedule, and whether the outputs are bit-exact."""
    record, recorded = program.schedule, program.golden
    assert record is not None
    assert recorded is not None
    outputs = list(loaded.run(golden.draw_inputs(program, recorded.seed)).values())
    return {
        "bit_exact": golden.record(recorded.seed, outputs, 0.0).outputs == recorded.outputs,
        "hazards": sum(1 for _ in hazards(program)),
        "policy": record.policy,
        "antichain": len(record.antichain),
        "fewest_syncs": record.fewest_sync_count,
        "syncs": sum(isinstance(command, Wait) for command in program.commands),
        "candidates": {
            c.policy: [c.stream_count, c.sync_count, c.arena_nbytes, c.duration_ns] for c in record.candidates
        },
        "arena_lower_bound_nbytes": record.arena_lower_bound_nbytes,
    }


def work(plan: Plan) -> dict[str, dict[str, float]]:
    """Return the number of launches of each kernel, their total time, and the bytes that they read and write."""
    found: dict[str, dict[str, float]] = {}
    program = plan.programs[0]
    for command in program.commands:
        if not isinstance(command, Record | Wait):
            name = program.ops[command.op].name
            if isinstance(command, Launch):
                name += f" {plan.kernels[command.kernel].symbol[:80]} {command.grid}"
            row = found.setdefault(name, {"count": 0, "gpu_us": 0.0, "mbytes": 0.0})
            row["count"] += 1
            row["gpu_us"] = round(row["gpu_us"] + command.duration_ns / 1000, 2)
            if isinstance(command, Launch):
                touched = sum(access.nbytes for access in (*command.reads, *command.writes))
                row["mbytes"] = round(row["mbytes"] + touched / 1e6, 3)
    return dict(sorted(found.items(), key=lambda item: -item[1]["gpu_us"]))


def arrays(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the example inputs by the plan's names, in C order."""
    host = reference.host_arrays((args, kwargs))
    return {tensor.name: array for tensor, array in zip(program.inputs, host, strict=True)}


def tensors(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the example inputs by the plan's names, on the GPU as the plan reads them."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return {
        t.name: torch.empty_strided(t.shape, t.strides, dtype=leaf.dtype, device="cuda").copy_(leaf)
        for t, leaf in zip(program.inputs, leaves, strict=True)
    }


def launch_us(loaded: Executable, placed: dict[str, torch.Tensor]) -> list[float]:
    """Return the microseconds of each of many launches on bound arrays, the GPU idle before each."""
    program = loaded.program
    given = {name: torch.utils.dlpack.from_dlpack(output) for name, output in loaded.run(placed).items()}
    for tensor in (*program.inputs, *program.outputs):
        loaded.bind(tensor.name, {**placed, **given}[tensor.name])
    stream = torch.cuda.current_stream().cuda_stream
    times = []
    for _ in range(WARM_UPS + REPEATS):
        begin = time.perf_counter()
        loaded.launch(stream)
        times.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
    for tensor in (*program.inputs, *program.outputs):
        loaded.bind(tensor.name, None)
    return times[WARM_UPS:]


def channels_last(array: np.ndarray) -> np.ndarray:
    """Return images channels last in memory; other arrays as they are."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) if array.ndim == 4 else array


def page_locked_gbps() -> dict[str, float]:
    """Return the gigabytes per second of 64 MiB between page-locked memory and the GPU, each way."""
    host = torch.empty(_COPIED_NBYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")

    def up() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    def down() -> None:
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()

    return {way.__name__: round(_COPIED_NBYTES / (min(wall_us(way)) * 1e3), 2) for way in (up, down)}


def prepare(options: argparse.Namespace, folder: Path, opened: ExitStack) -> Scenario:
    """Compile the model, and load its plan."""
    module, args, kwargs = reference.seeded(options.model)
    expected = reference.exact(module, args, kwargs)
    how = compiling.options(folder, options.level, precision="fp32" if options.fp32 else options.precision)
    _, figures = compiling.compiled(options.model, how, folder / "model.plan")
    plan = read_plan(folder / "model.plan")
    program = plan.programs[0]
    loaded = opened.enter_context(load(plan))
    inputs, placed = arrays(program, args, kwargs), tensors(program, args, kwargs)
    turned = {name: channels_last(array) for name, array in inputs.items()}
    locked = {name: loaded.empty_input(name) for name in inputs}
    for name, array in inputs.items():
        locked[name][...] = array
    groups: dict[str, Callable[[], clocks.Samples]] = {}
    if options.chain:
        figures |= schedule(program, loaded)
        chain = opened.enter_context(load(serialised(plan)))
        chain.run(inputs)
        groups["chain"] = lambda: {"chain_us": gpu_us(chain)}
    outputs = [array.astype(np.float64) for array in loaded.run(inputs).values() if array.dtype.kind not in "iub"]
    groups |= {
        "kernels": lambda: {"kernels_us": gpu_us(loaded), "replay_us": wall_us(loaded.replay)},
        "numpy": lambda: {"numpy_us": wall_us(lambda: loaded(*inputs.values()))},
        "other_order": lambda: {"other_order_us": wall_us(lambda: loaded(*turned.values()))},
        "page_locked": lambda: {"page_locked_us": wall_us(lambda: loaded(*locked.values()))},
        "call": lambda: {"call_us": wall_us(lambda: loaded.run(placed))},
        "launch": lambda: {"launch_us": launch_us(loaded, placed)},
    }
    figures |= {
        "error": reference.error(outputs, expected),
        "kernels": sum(isinstance(c, Launch) for c in program.commands),
        "commands": len(program.commands),
        "streams": program.stream_count,
        "moved_nbytes": sum(tensor.span_nbytes for tensor in (*program.inputs, *program.outputs)),
        "arena_nbytes": program.arena_nbytes,
        "weights_nbytes": plan.weights_nbytes,
        "work": work(plan),
    }
    return Scenario(
        measure=lambda: {
            **clocks.quietest(groups, options.clocks),
            **({} if options.clocks else {"page_locked_gbps": page_locked_gbps()}),
        },
        facts=lambda: figures,
    )


def main() -> None:
    """Measure the plan of the model named ``package.module:callable``."""
    parser = peer_parser(__doc__, model=False)
    parser.add_argument("level", type=int)
    add_model(parser)
    clocks.add_option(parser)
    parser.add_argument("--precision", choices=("keep", "fp16", "fp8"), default="keep")
    parser.add_argument("--chain", action="store_true")
    run_peer(parser, prepare)


if __name__ == "__main__":
    main()
