"""Two captures of one model as a graph of tasks: kernels with relocations, reads and writes."""

from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from nimblec.base.errors import TraceError, UnsupportedModelError
from nimblec.base.ir import CopyWork, CropWork, FillWork, Graph, KernelWork, Op, Reference, Task, TensorView
from nimblec.cuda.capture.allocator import Place, Target
from nimblec.cuda.capture.bodies import with_bodies
from nimblec.cuda.capture.buffers import Allocation, BufferTable, Span, allocation_of
from nimblec.cuda.capture.capture import ByteRange, Capture, OpRecord
from nimblec.cuda.capture.modules import CodeIndex, origin, reports_to_host
from nimblec.cuda.capture.nodes import KernelNode, MemcpyNode, MemsetNode, Node, node_handles, read_node, triggers
from nimblec.cuda.capture.relocation import Relocator
from nimblert.plan import Kernel, Module

_MAX_PORTABLE_CLUSTER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """The nodes [first, end) that one op launched, and the tensors that it reads and writes.

    ``opaque``: launched past the dispatcher, so that the tensors are unknown.
    """

    name: str
    source: str
    first: int
    end: int
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    opaque: bool = False


def _outside(first: int, end: int) -> _Launched:
    return _Launched(name="kernels launched past the dispatcher", source="", first=first, end=end, opaque=True)


def _launches(ops: Sequence[OpRecord], node_count: int, buffers: BufferTable) -> Iterator[_Launched]:
    """Yield every node in exactly one op, in order."""

    def spans(ranges: Sequence[ByteRange]) -> tuple[Span, ...]:
        return tuple(s for s in map(buffers.span, dict.fromkeys(ranges)) if s is not None)

    done = 0
    for op in ops:
        if op.first_node > done:
            yield _outside(done, op.first_node)
        yield _Launched(
            name=op.name,
            source=op.source,
            first=op.first_node,
            end=op.end_node,
            reads=spans(op.reads),
            writes=spans(op.writes),
        )
        done = op.end_node
    if node_count > done:
        yield _outside(done, node_count)


@contextmanager
def _naming(op: _Launched) -> Iterator[None]:
    """Prefix errors raised inside the block with the name of the op."""
    try:
        yield
    except UnsupportedModelError as exc:
        where = f" in {op.source}" if op.source else ""
        raise UnsupportedModelError(f"{op.name}{where}: {exc}") from exc


class _KernelTable:
    """Kernels and modules, numbered in order of first use."""

    def __init__(self, code: CodeIndex) -> None:
        self._code = code
        self._symbols: dict[bytes, list[str]] = {}
        self._kernels: dict[tuple[bytes, str], Kernel] = {}
        self._numbers: dict[tuple[bytes, str], int] = {}

    def add(self, node: KernelNode) -> int:
        """Return the number of the node's kernel, whose attributes then allow this launch."""
        symbol = node.function.symbol
        key = (self._code.digest(node.function), symbol)
        if key not in self._kernels:
            module = list(self._symbols).index(key[0]) if key[0] in self._symbols else len(self._symbols)
            self._symbols.setdefault(key[0], []).append(symbol)
            self._numbers[key] = len(self._kernels)
            self._kernels[key] = Kernel(module=module, symbol=symbol, parameters=node.function.parameters)
        kernel = self._kernels[key]
        if node.dynamic_smem_nbytes > kernel.max_dynamic_smem_nbytes:
            kernel = replace(kernel, max_dynamic_smem_nbytes=node.dynamic_smem_nbytes)
        x, y, z = node.cluster
        if x * y * z > _MAX_PORTABLE_CLUSTER:
            kernel = replace(kernel, non_portable_cluster=True)
        self._kernels[key] = kernel
        return self._numbers[key]

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._kernels.values())

    def modules(self) -> tuple[Module, ...]:
        return tuple(
            Module(origin=origin(symbols), code=memoryview(self._code.shrunk(digest, symbols)))
            for digest, symbols in self._symbols.items()
        )


class _TaskReader:
    """Turns pairs of nodes into tasks."""

    def __init__(
        self, kernels: _KernelTable, relocator: Relocator, buffers: BufferTable, launched: Sequence[_Launched]
    ) -> None:
        self._kernels = kernels
        self._declared = {span.allocation for op in launched for span in op.writes}
        self._tensors = {span.allocation for op in launched for span in (*op.reads, *op.writes)}
        self._relocator = relocator
        self._buffers = buffers

    def read(self, op: int, launched: _Launched, node: Node, twin: Node) -> Task:
        """Return the task of one node; ``twin`` is the same node of the second capture."""
        match node, twin:
            case KernelNode(), KernelNode() if _same_launch(node, twin):
                return self._launch(op, launched, node, twin)
            case MemcpyNode(), MemcpyNode() if node.nbytes == twin.nbytes:
                locate = self._relocator.locate
                dst, src = locate(node.dst, twin.dst), locate(node.src, twin.src)
                copy = CopyWork(
                    dst=self._buffers.access(_span(dst, node.nbytes)),
                    src=self._buffers.access(_span(src, node.nbytes)),
                )
                return Task(op=op, work=copy, reads=(copy.src,), writes=(copy.dst,))
            case MemsetNode(), MemsetNode() if node.count == twin.count:
                dst = self._relocator.locate(node.dst, twin.dst)
                access = self._buffers.access(_span(dst, node.count * node.element_nbytes))
                fill = FillWork(dst=access, value=node.value, element_nbytes=node.element_nbytes)
                return Task(op=op, work=fill, reads=(), writes=(access,))
        raise UnsupportedModelError(
            "two captures of it gave different launches: it does not run the same way each time"
        )

    def _launch(self, op: int, launched: _Launched, node: KernelNode, twin: KernelNode) -> Task:
        own = {span.allocation for span in (*launched.reads, *launched.writes)}
        declared = None if launched.opaque else {each.index for each in own if each.place is Place.EARLIER}
        with _naming_kernel(node):
            reports = reports_to_host(node.function.symbol)
            relocated = self._relocator.relocate(node.params, twin.params, reports=reports, declared=declared)
            kernel = self._kernels.add(node)
        targets = relocated.targets
        if not launched.opaque:
            targets = tuple((at, t) for at, t in targets if not self._is_anothers(allocation_of(t), own))
        touched = dict.fromkeys(allocation_of(t) for _, t in targets)
        reads, writes = self._accesses(launched, touched)
        work = KernelWork(
            kernel=kernel,
            params=relocated.params,
            references=tuple(
                Reference(param_offset=at, buffer=self._buffers.number(allocation_of(t)), offset=t.offset)
                for at, t in targets
            ),
            grid=node.grid,
            block=node.block,
            cluster=node.cluster,
            dynamic_smem_nbytes=node.dynamic_smem_nbytes,
            cooperative=node.cooperative,
        )
        access = self._buffers.access
        return Task(op=op, work=work, reads=tuple(map(access, reads)), writes=tuple(map(access, writes)))

    def _is_anothers(self, allocation: Allocation, own: Container[Allocation]) -> bool:
        """Return whether only other ops have tensors there than the one with its ``own``: its pointer is left over."""
        return allocation in self._tensors and allocation not in own and self._buffers.is_temporary(allocation)

    def _accesses(self, op: _Launched, touched: dict[Allocation, None]) -> tuple[list[Span], list[Span]]:
        """Return what a kernel reads and writes: those tensors of its op that it has a pointer to.

        Any other memory that it points to is the op's own scratch; for an opaque op all memory is.
        """
        writes = [s for s in op.writes if s.allocation in touched]
        reads = [s for s in op.reads if s.allocation in touched and s not in writes]
        known = {s.allocation for s in (*reads, *writes)}
        for allocation in touched:
            if op.opaque:
                self._buffers.note_tensor(allocation)
            whole = self._buffers.whole(allocation)
            scratch = allocation not in known
            if scratch:
                reads.append(whole)
            if (scratch and self._buffers.is_temporary(allocation)) or self._is_hidden_writer(op, allocation):
                writes.append(whole)
        return reads, writes

    def _is_hidden_writer(self, op: _Launched, allocation: Allocation) -> bool:
        """Return whether an op may write memory that outlives the run though its schema does not declare it.

        Any op may, if a run was seen to change the memory and no op declares to write it.
        """
        return self._buffers.is_mutated(allocation) and (op.opaque or allocation not in self._declared)


def _span(target: Target, nbytes: int) -> Span:
    return Span(allocation=allocation_of(target), offset=target.offset, nbytes=nbytes)


def _same_launch(node: KernelNode, twin: KernelNode) -> bool:
    return replace(node, params=b"") == replace(twin, params=b"") and len(node.params) == len(twin.params)


@contextmanager
def _naming_kernel(node: KernelNode) -> Iterator[None]:
    try:
        yield
    except UnsupportedModelError as exc:
        raise UnsupportedModelError(f"kernel {node.function.symbol}: {exc}") from exc


def build_graph(
    first: Capture,
    second: Capture,
    *,
    code: CodeIndex,
    relocator: Relocator,
    buffers: BufferTable,
    inputs: tuple[TensorView, ...],
    outputs: tuple[TensorView, ...],
    crops: Sequence[CropWork] = (),
) -> Graph:
    """Return the graph of two captures of one model; ``crops`` come after all that was captured.

    Raises UnsupportedModelError naming the op that a plan cannot hold, TraceError where the two
    captures are not the same sequence.
    """
    handles, twins = node_handles(first.handle), node_handles(second.handle)
    if len(handles) != len(twins):
        raise TraceError(
            f"two captures of the model gave {len(handles)} and {len(twins)} nodes: it does not run the same way "
            "each time"
        )
    kernels = _KernelTable(code)
    sequence = tuple(_launches(first.ops, len(handles), buffers))
    reader = _TaskReader(kernels, relocator, buffers, sequence)
    ops: list[Op] = []
    tasks: list[Task] = []
    task_of_node: dict[int, int] = {}
    for launched in sequence:
        with _naming(launched):
            for position in range(launched.first, launched.end):
                node, twin = read_node(handles[position]), read_node(twins[position])
                if node is None and twin is None:
                    continue
                task_of_node[position] = len(tasks)
                tasks.append(reader.read(len(ops), launched, node, twin))
        ops.append(Op(name=launched.name, source=launched.source, opaque=launched.opaque))
    for trigger, waiting in triggers(first.handle, handles):
        before, after = task_of_node.get(trigger), task_of_node.get(waiting)
        if before is not None and after is not None:
            tasks[after] = replace(tasks[after], programmatic_after=before)
    written = {a.buffer for t in tasks for a in t.writes}
    graph = Graph(
        modules=kernels.modules(),
        kernels=kernels.kernels(),
        buffers=buffers.buffers(written),
        ops=tuple(ops),
        tasks=tuple(tasks),
        inputs=inputs,
        outputs=outputs,
    )
    read = sorted(task_of_node)
    whole = with_bodies(graph, first.regions, partial(bisect_left, read), buffers.byte_at)
    cropping = (Task(op=len(whole.ops) + i, work=crop, reads=(crop.sizes,), writes=()) for i, crop in enumerate(crops))
    named = (Op(name="crop", source=outputs[crop.output].name) for crop in crops)
    return replace(whole, ops=(*whole.ops, *named), tasks=(*whole.tasks, *cropping))
