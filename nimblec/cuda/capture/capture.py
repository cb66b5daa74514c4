"""Run a model once under stream capture, and record the nodes that each op launched and the memory it touched."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nimblec.base.errors import TraceError, data_dependent, first_line
from nimblec.cuda.capture.allocator import Zone
from nimblec.cuda.capture.bodies import RecordingRunner, Region
from nimblec.cuda.capture.inductor import seeing_compiled_code
from nimblec.graph.control import run_by
from nimblec.graph.writes import written_positions
from nimblec.pytorch.generator import CudaGenerator
from nimblec.pytorch.source_tracker import SetSource, SourceTracker
from nimblert.cuda.driver import call

_MOST_PIECES = 2048
"""Pieces of a tensor with gaps. Some of the channels of 45 x 45 pixels are 2025."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes [begin, end) at absolute device addresses."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """One call of an ATen op that launched the nodes [first_node, end_node).

    ``reads`` and ``writes`` are the memory of its arguments and results.
    """

    name: str
    source: str
    first_node: int
    end_node: int
    reads: tuple[ByteRange, ...]
    writes: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A captured run: the torch graph that owns the nodes, its ops, and the model's result.

    ``begun`` are the allocations that torch made in the zone when the capture began, ``generator`` is the model's own.
    The graph holds every body of the ``regions``, its loops and branches, once.
    """

    graph: torch.cuda.CUDAGraph
    ops: tuple[OpRecord, ...]
    regions: tuple[Region, ...]
    result: Any
    zone: Zone
    begun: range
    generator: CudaGenerator | None

    @property
    def handle(self) -> int:
        """The CUgraph."""
        return int(self.graph.raw_cuda_graph())

    def replay(self) -> None:
        """Run the graph with the random numbers of a first run."""
        if self.generator is not None:
            self.generator.rewind()
        self.graph.replay()
        torch.cuda.synchronize()


class ValueDependentError(TraceError):
    """The model reads a value from the GPU, and control flow depends on it."""


@contextmanager
def pretend_capturing(capturing: bool) -> Iterator[None]:
    """Have ``torch.cuda.is_current_stream_capturing`` return ``capturing`` inside the block.

    Models take another path under capture: transformers then makes attention masks that it otherwise
    omits. A plan is compared with a plain run, so models get the answer of a plain run, or, if only the
    other path can be captured, the same answer inside and outside the capture.
    """
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: capturing
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


class _OpRecorder(TorchDispatchMode):
    """Sees every op that reaches a device, and counts the nodes of the graph around it."""

    def __init__(self, stream: torch.cuda.Stream, sources: SourceTracker) -> None:
        TorchDispatchMode.__init__(self)
        self.ops: list[OpRecord] = []
        self._stream = stream.cuda_stream
        self._sources = sources

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        source = self._sources.source()
        before = self.node_count()
        result = self._call(func, args, kwargs, source)
        if self.node_count() > before:
            self._add(str(func), source, before, *_accesses(func, args, kwargs, result))
        return result

    def record(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], call: Callable[[], Any]
    ) -> Any:
        """Make a call that bypasses the dispatcher, and record what it launched on these tensors."""
        before = self.node_count()
        result = call()
        if self.node_count() > before:
            self._add(name, self._sources.current, before, tuple(_ranges(reads)), tuple(_ranges(writes)))
        return result

    def _add(
        self, name: str, source: str, before: int, reads: tuple[ByteRange, ...], writes: tuple[ByteRange, ...]
    ) -> None:
        self.ops.append(
            OpRecord(
                name=name,
                source=source,
                first_node=before,
                end_node=self.node_count(),
                reads=reads,
                writes=writes,
            )
        )

    def _call(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], source: str) -> Any:
        where = f"{func} in {source or 'the model'}"
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise ValueDependentError(data_dependent(where))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as exc:
            raise TraceError(f"{where}: {first_line(exc)}") from exc

    def node_count(self) -> int:
        """Return the number of nodes so far."""
        graph = call("cuStreamGetCaptureInfo", self._stream)[2]
        return int(call("cuGraphGetNodes", graph, 0)[1])


def _accesses(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[tuple[ByteRange, ...], tuple[ByteRange, ...]]:
    reads: list[ByteRange] = []
    writes: list[ByteRange] = []
    written = written_positions(func, args)
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        (writes if position in written else reads).extend(_ranges(value))
    writes.extend(_ranges(result))
    return tuple(reads), tuple(writes)


def _ranges(value: Any) -> Iterator[ByteRange]:
    """Yield the memory of all tensors in ``value``: the pieces between gaps, or one range if these are many."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.numel():
            begin, nbytes = leaf.data_ptr(), leaf.element_size()
            for first, end in pieces(leaf.shape, leaf.stride(), most=_MOST_PIECES):
                yield ByteRange(begin=begin + first * nbytes, end=begin + end * nbytes)


def pieces(shape: Sequence[int], strides: Sequence[int], *, most: int) -> list[tuple[int, int]]:
    """Return the contiguous pieces of a tensor as (first, end) in elements; one with the gaps if more than ``most``."""
    axes = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    length = 1
    while axes and axes[0][0] <= length:
        stride, size = axes.pop(0)
        length += (size - 1) * stride
    if prod(size for _, size in axes) > most:
        return [(0, length + sum((size - 1) * stride for stride, size in axes))]
    starts = [0]
    for stride, size in reversed(axes):
        starts = [start + n * stride for start in starts for n in range(size)]
    return [(start, start + length) for start in sorted(starts)]


def describe_failure(exc: RuntimeError, sources: SourceTracker) -> str:
    """Return the message for a failed call outside the dispatcher, such as a copy from host memory."""
    frame = traceback.extract_tb(exc.__traceback__)[-1]
    where = f"{frame.line} ({Path(frame.filename).name}, line {frame.lineno}) in {sources.failed or 'the model'}"
    return (
        f"{where}: {first_line(exc)}; a plan cannot take data from the host, or wait for it: "
        "make such tensors once, in __init__"
    )


def capture(
    run: Callable[[SetSource], Any],
    zone: Zone,
    sources: SourceTracker,
    *,
    compiled: bool,
    generator: CudaGenerator | None = None,
) -> Capture:
    """Capture one call of ``run``, whose allocations come from ``zone``.

    ``compiled`` if the model goes through torch.compile: a dispatch mode around it would make it fall
    back to eager, hooks on modules would make it compile again. ``generator`` stands in for torch's
    default one. Raises TraceError, naming op and module, for a call that cannot be captured.
    """
    # Workspaces of earlier runs would change the allocations.
    torch._C._cuda_clearCublasWorkspaces()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream()
    recorder = _OpRecorder(stream, sources)
    bodies = RecordingRunner(recorder.node_count, sources.set)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        first = len(zone.addresses)
        graph.capture_begin(capture_error_mode="relaxed")
        begun = range(first, len(zone.addresses))
        try:
            with ExitStack() as seeing:
                seeing.enter_context(run_by(bodies))
                if compiled:
                    seeing.enter_context(seeing_compiled_code(recorder, recorder.record))
                else:
                    seeing.enter_context(sources.following_modules())
                    seeing.enter_context(recorder)
                result = run(sources.set)
        except BaseException as exc:
            # The first error is reported; torch aborts on a graph left open.
            with suppress(RuntimeError):
                graph.capture_end()
            if isinstance(exc, RuntimeError):
                raise TraceError(describe_failure(exc, sources)) from exc
            raise
        graph.capture_end()
    return Capture(
        graph=graph,
        ops=tuple(recorder.ops),
        regions=tuple(bodies.regions),
        result=result,
        zone=zone,
        begun=begun,
        generator=generator,
    )

