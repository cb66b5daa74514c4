"""One model in torch alone, in one of its modes; prints one JSON object of figures and nothing else.

Usage: python -m bench.torch_peer MODE MODEL [--fp32] [--clocks GROUPS] [--turns]; MODE is eager, graph
(torch.cuda.CUDAGraph of eager), compile (torch.compile), freeze (the same with freezing), autotune (max-autotune with
freezing) or aoti (a package of AOTInductor, with freezing). --fp32 switches TF32 off; --turns takes turns with other
processes at measuring.

kernels_us: GPU time of the mode's kernels in one CUDA graph, by events around each replay, without Python in between;
the three modes of torch.compile are compiled a second time for it, without CUDA graphs of torch's own. replay_us: the
wall clock of the same replay, synchronised. call_us: the wall clock of a user's call, synchronised, inputs in the GPU's
memory. numpy_us: the same from arrays in C order to tensors on the host. launch_us: the caller's time for a replay of
the CUDA graph, without waiting for the GPU.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bench import clocks, peer_calls, reference
from bench.clocks import REPEATS, WARM_UPS
from bench.turns import Scenario, add_model, peer_parser, run_peer
from nimblec.base.gpu_lock import timing_alone
from nimblec.pytorch.model import set_arithmetic

COMPILED = {
    "compile": ("reduce-overhead", "default"),
    "freeze": ("reduce-overhead", "default"),
    "autotune": ("max-autotune", "max-autotune-no-cudagraphs"),
}
"""The modes of torch.compile with its own CUDA graphs, and without."""
MODES = ("eager", "graph", *COMPILED, "aoti")


def wall_us(call: peer_calls.Call) -> list[float]:
    """Return the microseconds of each of many synchronised calls."""
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def launch_us(replay: peer_calls.Call) -> list[float]:
    """Return the microseconds of the caller in each of many replays, the GPU idle before each."""
    times = []
    for _ in range(WARM_UPS + REPEATS):
        begin = time.perf_counter()
        replay()
        times.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
    return times[WARM_UPS:]


def gpu_us(replay: peer_calls.Call) -> list[float]:
    """Return the GPU microseconds of each of many replays of a CUDA graph, by events around it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(WARM_UPS + REPEATS):
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times[WARM_UPS:]


def kernel_count(call: peer_calls.Call) -> int:
    """Return the number of kernels that a call launches, without copies and fills."""

    def until_done() -> None:
        call()
        torch.cuda.synchronize()

    return len(peer_calls.traced(until_done))


class Inputs:
    """The inputs of a model, in the GPU's memory, and in C order on the host as a user has them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._placed = [leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._host = [leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def call(self, function: Callable[..., Any], leaves: list[Any] | None = None) -> Any:
        """Return a function's result on the inputs in the GPU's memory, or on ``leaves``."""
        args, kwargs = pytree.tree_unflatten(self._placed if leaves is None else leaves, self._structure)
        return function(*args, **kwargs)

    def call_from_host(self, function: Callable[..., Any]) -> list[Any]:
        """Return a function's results on the host, from the host's inputs, uploaded in the layout of the example."""
        moved = [
            _ordered(host.cuda(), placed) if isinstance(host, torch.Tensor) else host
            for host, placed in zip(self._host, self._placed, strict=True)
        ]
        return [leaf.cpu() for leaf in pytree.tree_leaves(self.call(function, moved)) if isinstance(leaf, torch.Tensor)]


def _ordered(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if tensor.stride() == like.stride():
        return tensor
    return tensor.to(memory_format=torch.channels_last)


def user_call(mode: str, module: Any, inputs: Inputs) -> Callable[..., Any]:
    """Return the model as a user of a mode calls it: compiled, its CUDA graph recorded and replayed once."""
    if mode == "aoti":
        function = _package(module, inputs)
    elif mode in COMPILED:
        from torch._inductor import config

        config.freezing = mode != "compile"
        time_kernels_alone()
        function = torch.compile(module, mode=COMPILED[mode][0])
    else:
        function = module
    for _ in range(3):
        inputs.call(function)
    torch.cuda.synchronize()
    return function


def time_kernels_alone() -> None:
    """Have Inductor's timing take turns with that of other processes on this GPU, including nimblec's."""
    from torch._inductor.runtime.benchmarking import benchmarker

    timer: Any = benchmarker
    timed = timer.benchmark_gpu

    def benchmark_gpu(*args: Any, **kwargs: Any) -> Any:
        with timing_alone():
            return timed(*args, **kwargs)

    timer.benchmark_gpu = benchmark_gpu


def _package(module: Any, inputs: Inputs) -> Callable[..., Any]:
    """Return a package of AOTInductor with freezing, without its synchronisation, which no CUDA graph can capture."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    program = inputs.call(lambda *args, **kwargs: torch.export.export(module, args, kwargs))
    with tempfile.TemporaryDirectory() as folder:
        package = aoti_compile_and_package(
            program, package_path=str(Path(folder, "model.pt2")), inductor_configs={"freezing": True}
        )
        loaded: Callable[..., Any] = aoti_load_package(package, run_single_threaded=True)
        return loaded


def captured(call: peer_calls.Call) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture a call in a CUDA graph of torch's; return it, and the bytes of its memory pool."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph, torch.cuda.memory_reserved() - before


def multiply_adds(module: Any, inputs: Inputs) -> int:
    """Return the multiply-adds of convolutions and matrix products: half the operations that torch counts."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # Of other attention, torch counts none with grouped queries.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        inputs.call(module)
    return int(counter.get_total_flops()) // 2


def prepare(options: argparse.Namespace, _: Path, __: ExitStack) -> Scenario:
    """Compile the model in a mode, and capture its CUDA graph."""
    mode = options.mode
    if options.fp32:
        set_arithmetic("fp32")
    module, args, kwargs = reference.seeded(options.model)
    expected = reference.exact(module, args, kwargs)
    module, inputs = module.cuda(), Inputs(args, kwargs)
    groups: dict[str, Callable[[], clocks.Samples]] = {}
    begin = time.perf_counter()
    function = user_call(mode, module, inputs)
    figures: dict[str, Any] = {"prepare_s": time.perf_counter() - begin}
    figures["error"] = reference.error(reference.floats(inputs.call(function)), expected)
    counted: peer_calls.Call = partial(inputs.call, function)
    if mode != "eager":
        plain = torch.compile(module, mode=COMPILED[mode][1]) if mode in COMPILED else function
        graph, pool = captured(lambda: inputs.call(plain))
        figures["graph_pool_nbytes"] = pool
        groups["kernels"] = lambda: {"kernels_us": gpu_us(graph.replay), "replay_us": wall_us(graph.replay)}
        groups["launch"] = lambda: {"launch_us": launch_us(graph.replay)}
        counted = graph.replay
    if mode in {"graph", "freeze"}:
        figures["multiply_adds"] = multiply_adds(module, inputs)
    if mode != "graph":
        groups["call"] = lambda: {"call_us": wall_us(lambda: inputs.call(function))}
        if mode != "eager":
            groups["numpy"] = lambda: {"numpy_us": wall_us(lambda: inputs.call_from_host(function))}
    return Scenario(
        measure=lambda: {**clocks.quietest(groups, options.clocks), **figures},
        facts=lambda: {"kernels": kernel_count(counted)},
    )


def main() -> None:
    """Measure the model named ``package.module:callable``."""
    parser = peer_parser(__doc__, model=False)
    parser.add_argument("mode", choices=MODES)
    add_model(parser)
    clocks.add_option(parser)
    with torch.no_grad():
        run_peer(parser, prepare)


if __name__ == "__main__":
    main()
