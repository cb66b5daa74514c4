"""One model in torch alone, in one of its modes. Prints one JSON object of figures, and nothing else.

Usage: python -m bench.torch_peer MODE MODEL [--fp32] [--turns]; MODE is eager, graph (torch.cuda.CUDAGraph of
eager), compile (torch.compile with CUDA graphs), freeze (the same with freezing), autotune (max-autotune with
freezing) or aoti (a package of AOTInductor). --fp32 switches TF32 off; --turns waits to be told when to measure.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.cpu_overhead import spread
from bench.turns import Turn
from nimblec.frontend.pytorch import set_arithmetic
from nimblec.frontend.torch_sources import import_callable

MODES = ("eager", "graph", "compile", "freeze", "autotune", "aoti")
_WARM_UPS = 20
_REPEATS = 100


def wall_us(call: Callable[[], object]) -> list[float]:
    """Microseconds of each of many synchronised calls."""
    for _ in range(_WARM_UPS):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def gpu_us(call: Callable[[], object]) -> list[float]:
    """GPU microseconds of each of many calls, by events around them."""
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


def kernel_count(call: Callable[[], object]) -> int:
    """How many kernels a call launches, by torch's profiler; copies and fills are none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = (e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA)
    return sum(not (e.is_user_annotation or e.name.startswith(("Memcpy", "Memset"))) for e in on_device)


def prepare(
    mode: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any], dict[str, float]]:
    """The call of a model in a mode of torch, and what making it cost."""
    begin = time.perf_counter()
    figures: dict[str, float] = {}
    if mode == "graph":
        call, figures["graph_pool_nbytes"] = _captured(lambda: module(*args, **kwargs))
    else:
        made = _compiled(mode, module, args, kwargs)

        def call() -> Any:
            return made(*args, **kwargs)

        for _ in range(3):  # compile, record the CUDA graph, replay it
            call()
    torch.cuda.synchronize()
    figures["prepare_s"] = time.perf_counter() - begin
    return call, figures


def _compiled(mode: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model as a mode runs it."""
    if mode == "eager":
        return module
    if mode == "aoti":
        from torch._inductor import aoti_compile_and_package, aoti_load_package

        program = torch.export.export(module, args, kwargs)
        with tempfile.TemporaryDirectory() as folder:
            package = aoti_compile_and_package(program, package_path=str(Path(folder, "model.pt2")))
            return aoti_load_package(package)
    from torch._inductor import config

    config.freezing = mode != "compile"
    return torch.compile(module, mode="max-autotune" if mode == "autotune" else "reduce-overhead")


def _captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """A replay of torch's CUDA graph of a call, and the bytes of its memory pool."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay, torch.cuda.memory_reserved() - before


def main() -> None:
    """Measure the model named ``package.module:callable``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("model")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args()
    turn = Turn(wait=options.turns)
    if options.fp32:
        set_arithmetic("fp32")
    torch.manual_seed(0)
    module, args, kwargs = import_callable(options.model)
    module = module.cuda()
    args = tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)
    with torch.no_grad():
        call, figures = prepare(options.mode, module, args, kwargs)
        turn.begin()
        wall, gpu = wall_us(call), gpu_us(call)
        turn.say(wall_us=spread(np.array(wall)), gpu_us=spread(np.array(gpu)), **figures)
        turn.say(kernels=kernel_count(call))
    turn.end()


if __name__ == "__main__":
    main()
