"""One model in torch alone: eager, and torch's own CUDA graph of it. Prints one JSON object.

Usage: python -m bench.torch_graph bench.models.resnet50:fp32
"""

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from nimblec.frontend.pytorch import import_callable, split_arguments

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


def gpu_us(graph: torch.cuda.CUDAGraph) -> list[float]:
    """GPU microseconds of each of many replays, by events around them."""
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


def main(spec: str) -> None:
    """Measure the model named ``package.module:callable``."""
    torch.manual_seed(0)
    module, example_inputs = import_callable(spec)
    args, kwargs = split_arguments(example_inputs)
    module = module.cuda()
    args = tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)
    with torch.no_grad():
        for _ in range(3):
            module(*args, **kwargs)
        eager = wall_us(lambda: module(*args, **kwargs))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(*args, **kwargs)
        pool = torch.cuda.memory_reserved() - before
        replay = wall_us(graph.replay)
        gpu = gpu_us(graph)
    figures = {"eager_wall_us": eager, "graph_wall_us": replay, "graph_gpu_us": gpu}
    json.dump({name: float(np.median(t)) for name, t in figures.items()} | {"graph_pool_nbytes": pool}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
