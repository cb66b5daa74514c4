"""How long a call takes inside a network: in a CUDA graph, after its like, its weights not in the L2 cache."""

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from nimblec.gpu_turn import timing_alone

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
    """Times calls in chains of ``length``, the programmatic edges between them included.

    The graphs it makes, one after the other, share their memory: to free it each time takes
    milliseconds.
    """

    def __init__(self, *, length: int = 40, repeats: int = 9) -> None:
        self.length = length
        self._repeats = repeats
        self._flushed = torch.empty(FLUSH_NBYTES, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._first = self._captured([partial(self._flushed[:16].fill_, 1)])  # a pool lives while a graph has it

    def screen(self, *, length: int = 12, repeats: int = 3) -> "GraphTimer":
        """A quicker timer of shorter chains, with this one's memory, to sort candidates out with."""
        other = copy.copy(self)
        other.length, other._repeats = length, repeats  # noqa: SLF001
        return other

    def __call__(self, call: Callable[[int], object]) -> float:
        """Median microseconds of ``call(n)``, n from 0 on, which are all calls of the same kernels."""
        with self._beside():
            call(0)  # libraries choose and Triton loads on the first call
        return self._chain([partial(call, n) for n in range(self.length)]) / self.length

    def chain(self, calls: Sequence[Callable[[], object]], *, flush: bool = True) -> float:
        """Median microseconds of all ``calls`` in one graph; the cache is emptied before each replay or not."""
        with self._beside():
            for call in calls:
                call()
        return self._chain(calls, flush=flush)

    def _chain(self, calls: Sequence[Callable[[], object]], *, flush: bool = True) -> float:
        graph = self._captured(calls)
        times = []
        with timing_alone():
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

    def _captured(self, calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        """The calls as a graph; without `torch.cuda.graph`, which frees all cached memory before."""
        graph = torch.cuda.CUDAGraph()
        with self._beside():
            graph.capture_begin(pool=self._pool)
            for call in calls:
                call()
            graph.capture_end()
        return graph

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream that graphs are captured from, after the work so far and before what follows."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)
