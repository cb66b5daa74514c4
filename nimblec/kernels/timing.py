"""The time of a call as in a network: in a CUDA graph, in a chain of such calls, its weights not in the L2 cache."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from nimblec.base.gpu_lock import undisturbed
from nimblec.kernels.gpu import GPU

_CACHES = 5
"""How many times the size of the L2 cache is written before each replay."""


class WeightPool:
    """Memory of random numbers of which copies of weights are slices: their values do not affect a kernel's time."""

    def __init__(self, gpu: GPU) -> None:
        self._nbytes = 2 * _CACHES * gpu.l2
        self._numbers: dict[torch.dtype, Tensor] = {}
        self._taken: Counter[torch.dtype] = Counter()

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor like the dense ``like``, behind the tensor of its dtype that was returned before.

        Where the numbers of a dtype end, it begins again at their start.
        """
        size, dtype = like.numel(), like.dtype
        if dtype not in self._numbers or size > len(self._numbers[dtype]):
            length = max(self._nbytes // dtype.itemsize, size)
            self._numbers[dtype] = torch.empty(length, dtype=dtype, device="cuda")
            if dtype.is_floating_point:
                self._numbers[dtype].normal_(0, 0.02)
            else:
                self._numbers[dtype].random_()
            self._taken[dtype] = 0
        if self._taken[dtype] + size > len(self._numbers[dtype]):
            self._taken[dtype] = 0
        cut = self._numbers[dtype][self._taken[dtype] : self._taken[dtype] + size]
        self._taken[dtype] += -(-size // 128) * 128
        return cut.as_strided(like.shape, like.stride())


class GraphTimer:
    """Times calls in chains of ``length``, including the programmatic edges between them.

    Its graphs, one after another, share their memory, as freeing it takes milliseconds.
    """

    def __init__(self, gpu: GPU, *, length: int = 40, repeats: int = 9) -> None:
        self.length = length
        self._repeats = repeats
        self._flushed = torch.empty(_CACHES * gpu.l2, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        # A captured graph keeps the pool alive.
        self._first = self._captured([partial(self._flushed[:16].fill_, 1)])

    def screen(self, *, length: int = 12, repeats: int = 3) -> "GraphTimer":
        """Return a quicker timer of shorter chains, on the same memory, that narrows candidates down."""
        other = copy.copy(self)
        other.length, other._repeats = length, repeats
        return other

    def __call__(self, call: Callable[[int], object]) -> float:
        """Return the median microseconds of ``call(n)``, for n from 0 to ``length`` - 1, all of the same kernels."""
        with self._beside():
            call(0)  # libraries choose and Triton loads on the first call
        graph = self._captured([partial(call, n) for n in range(self.length)])
        median, _ = undisturbed(partial(self._replays, graph))
        return 1000 * median / self.length

    def _replays(self, graph: torch.cuda.CUDAGraph) -> list[float]:
        """Return the milliseconds of each of some replays."""
        times = []
        for _ in range(self._repeats + 2):
            self._flushed.fill_(1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return [float(begin.elapsed_time(end)) for begin, end in times[2:]]

    def _captured(self, calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        """Return the calls as a graph; without `torch.cuda.graph`, which frees all cached memory before."""
        graph = torch.cuda.CUDAGraph()
        with self._beside():
            graph.capture_begin(pool=self._pool)
            try:
                for call in calls:
                    call()
            finally:
                # Also where memory runs out, so that nothing after it is captured.
                graph.capture_end()
        return graph

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run the block on the stream for captures, ordered after earlier work and before later work."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)
