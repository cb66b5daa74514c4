"""One model in torch alone, in one of its modes. Prints one JSON object of median microseconds.

Usage: python -m bench.torch_peer MODE MODEL; MODE is eager, graph (torch.cuda.CUDAGraph of eager), compile
(torch.compile with CUDA graphs), freeze (the same with freezing), or autotune (max-autotune with freezing).
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nimblec.frontend.pytorch import import_callable, split_arguments

MODES = ("eager", "graph", "compile", "freeze", "autotune")
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


def prepare(mode: str, call: Callable[[], Any]) -> tuple[Callable[[], Any], dict[str, float]]:
    """The call in a mode of torch, and what making it cost."""
    begin = time.perf_counter()
    figures: dict[str, float] = {}
    if mode == "graph":
        call, figures["graph_pool_nbytes"] = _captured(call)
    elif mode != "eager":
        import torch._inductor.config as inductor

        inductor.freezing = mode != "compile"
        call = torch.compile(call, mode="max-autotune" if mode == "autotune" else "reduce-overhead")
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    figures["prepare_s"] = time.perf_counter() - begin
    return call, figures


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


def main(mode: str, spec: str) -> None:
    """Measure the model named ``package.module:callable``."""
    torch.manual_seed(0)
    module, example_inputs = import_callable(spec)
    args, kwargs = split_arguments(example_inputs)
    module = module.cuda()
    args = tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)
    with torch.no_grad():
        call, figures = prepare(mode, lambda: module(*args, **kwargs))
        figures["wall_us"] = float(np.median(wall_us(call)))
        figures["gpu_us"] = float(np.median(gpu_us(call)))
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MODES:
        sys.exit(__doc__)
    main(*sys.argv[1:])
