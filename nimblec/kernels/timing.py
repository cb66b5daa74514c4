"""How long a call takes inside a network: in a CUDA graph, after its like, its weights not in the L2 cache."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

FLUSH_NBYTES = 256 << 20
"""Written before each replay: several times the L2 cache."""


class WeightPool:
    """Random numbers to cut copies of weights from; their values matter to no kernel's time."""

    def __init__(self, *, nbytes: int, dtype: torch.dtype) -> None:
        self._numbers = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="cuda").normal_(0, 0.02)
        self._taken = 0

    def take(self, shape: Sequence[int]) -> Tensor:
        """Weights of a shape, beside the ones taken before; from the start again where the pool ends."""
        size = math.prod(shape)
        if self._taken + size > len(self._numbers):
            self._taken = 0
        cut = self._numbers[self._taken : self._taken + size]
        self._taken += -(-size // 128) * 128
        return cut.view(tuple(shape))


class GraphTimer:
    """Times calls in chains of ``length``, the programmatic edges between them included."""

    def __init__(self, *, length: int = 40, repeats: int = 9) -> None:
        self.length = length
        self._repeats = repeats
        self._flushed = torch.empty(FLUSH_NBYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, call: Callable[[int], object]) -> float:
        """Median microseconds of ``call(n)``, n from 0 on."""
        return self.chain([partial(call, n) for n in range(self.length)]) / self.length

    def chain(self, calls: Sequence[Callable[[], object]], *, flush: bool = True) -> float:
        """Median microseconds of all ``calls`` in one graph; the cache is emptied before each replay or not."""
        graph = captured(calls)
        times = []
        for _ in range(self._repeats + 2):
            if flush:
                self._flushed.fill_(1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return 1000 * statistics.median(float(begin.elapsed_time(end)) for begin, end in times[2:])


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls as a graph, each called once before: libraries choose and Triton loads on the first call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph
