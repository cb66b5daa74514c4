"""The memory of torch's generator in captures, and the state in its place; no GPU is needed for that."""

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from nimblec.base.ir import BufferKind, Graph, KernelWork
from nimblec.cuda.capture import tasks
from nimblec.cuda.capture.allocator import STEP_NBYTES, Shift, Target
from nimblec.cuda.capture.buffers import Allocation, BufferTable, Content
from nimblec.cuda.capture.capture import ByteRange, OpRecord
from nimblec.cuda.capture.foreign import ForeignMemory
from nimblec.cuda.capture.generator import GeneratorError, GeneratorMemory, find_memory
from nimblec.cuda.capture.nodes import Function, KernelNode
from nimblec.cuda.capture.relocation import Relocator
from nimblec.pytorch.generator import MARK
from nimblec.schedule.dependencies import dependencies

SIZES = (256, 8, 8, 8, 8, 256, 64)
IMAGE, SEED, OFFSET, OWN_SEED, OWN_OFFSET, RESULT, MASK = range(len(SIZES))
MEMORY = GeneratorMemory(seed=OWN_SEED, offset=OWN_OFFSET, state_seed=SEED, state_offset=OFFSET)
SHIFT = (600 << 30) + 0x1234_5600


class Zone:
    """Allocations one after the other; those of another zone are so far away."""

    def __init__(self, base: int = 0x7F00_0000_0000, step: int = 0, sizes: Sequence[int] = SIZES) -> None:
        self.sizes = list(sizes)
        self.addresses = [base + index * (512 + step) for index in range(len(sizes))]
        self.base, self.end = base, base + (1 << 30)
        self.live = {*self.addresses}

    def find(self, address: int) -> int | None:
        """Return the allocation that holds it."""
        index = bisect_right(self.addresses, address) - 1
        return index if index >= 0 and address < self.addresses[index] + self.sizes[index] else None


FIRST, SECOND = Zone(), Zone(0x7F00_0000_0000 + SHIFT, STEP_NBYTES)
RESIDENT = Zone(0x7E00_0000_0000, sizes=())


def holding(**words: int) -> Callable[[int, int], bytes]:
    """Return a reader of the generator's memory."""
    held = {FIRST.addresses[OWN_SEED]: words["seed"], FIRST.addresses[OWN_OFFSET]: words["offset"]}
    return lambda address, nbytes: struct.pack("<q", held[address])[:nbytes]


def found(
    begun: Sequence[int] = (OWN_SEED, OWN_OFFSET), state: Sequence[int | None] = (SEED, OFFSET)
) -> GeneratorMemory:
    return find_memory(FIRST, begun, state, holding(seed=MARK, offset=0))  # type: ignore[arg-type]


def test_it_is_known_by_its_size_and_its_mark() -> None:
    assert found() == MEMORY
    with pytest.raises(GeneratorError, match=r"^torch began a capture by allocating \[\] bytes, expected \[8, 8\]$"):
        found(begun=())
    for begun in ([OWN_SEED], [OWN_SEED, RESULT], [OFFSET, OWN_SEED, OWN_OFFSET]):
        with pytest.raises(GeneratorError, match=r"^torch began a capture by allocating \["):
            found(begun=begun)
    for state in ((SEED, IMAGE), (None, OFFSET), (SEED, None)):
        with pytest.raises(GeneratorError, match="no memory of their own"):
            found(state=state)
    for words in ({"seed": 0, "offset": MARK}, {"seed": MARK, "offset": 4}, {"seed": 1, "offset": 0}):
        with pytest.raises(GeneratorError, match="where seed and offset are expected"):
            find_memory(FIRST, (OWN_SEED, OWN_OFFSET), (SEED, OFFSET), holding(**words))  # type: ignore[arg-type]


def relocator(memory: GeneratorMemory | None = MEMORY) -> Relocator:
    shift = Shift(FIRST.addresses, SHIFT)
    return Relocator(shift, RESIDENT, ForeignMemory(), generator=memory)  # type: ignore[arg-type]


def words(zone: Zone, *values: int | tuple[int]) -> bytes:
    """Numbers, and of tuples the addresses of allocations."""
    found = [zone.addresses[value[0]] if isinstance(value, tuple) else value for value in values]
    return struct.pack(f"<{len(found)}Q", *found)


def relocated(*values: int | tuple[int], memory: GeneratorMemory | None = MEMORY) -> tuple[tuple[int, Target], ...]:
    return relocator(memory).relocate(words(FIRST, *values), words(SECOND, *values)).targets


def test_kernels_read_the_state_in_its_place() -> None:
    drawing = ((IMAGE,), 7, (OWN_SEED,), (OWN_OFFSET,), 16, 1)
    assert relocated(*drawing) == tuple((at, Target(index=n, offset=0)) for at, n in ((0, IMAGE), (16, 1), (24, 2)))
    assert relocated((SEED,), (OFFSET,)) == relocated((OWN_SEED,), (OWN_OFFSET,))
    plain = relocated(*drawing, memory=None)
    assert [target.index for _, target in plain] == [IMAGE, OWN_SEED, OWN_OFFSET]


@pytest.mark.parametrize(
    "values",
    [
        [(OWN_OFFSET,), (OWN_SEED,)],
        [(OWN_SEED,), 0, (OWN_OFFSET,)],
        [(OWN_SEED,), (SEED,)],
        [(OWN_SEED,)],
        [(OWN_OFFSET,)],
        [(OWN_SEED,), (OWN_OFFSET,), (OWN_OFFSET,)],
    ],
)
def test_no_kernel_may_read_it_otherwise(values: list[int | tuple[int]]) -> None:
    with pytest.raises(GeneratorError, match=r"^at byte \d+ of its parameters, a kernel has an address of torch's"):
        relocated(*values)


def test_none_may_read_beside_it() -> None:
    first, second = words(FIRST, (OWN_SEED,), (OWN_OFFSET,)), words(SECOND, (OWN_SEED,), (OWN_OFFSET,))
    beside = [struct.pack("<2Q", a + 4, b) for a, b in map(struct.Struct("<2Q").unpack, (first, second))]
    with pytest.raises(GeneratorError):
        relocator().relocate(*beside)


def test_copies_and_fills_leave_it_alone() -> None:
    assert relocator().locate(FIRST.addresses[MASK], SECOND.addresses[MASK]) == Target(index=MASK, offset=0)
    with pytest.raises(GeneratorError, match="a copy or a fill"):
        relocator().locate(FIRST.addresses[OWN_SEED], SECOND.addresses[OWN_SEED])


def node(zone: Zone, symbol: str, *values: int | tuple[int]) -> KernelNode:
    function = Function(symbol=symbol, parameters=(), module=0, library=0)
    sizes = {"grid": (1, 1, 1), "block": (32, 1, 1), "cluster": (0, 0, 0), "dynamic_smem_nbytes": 0}
    return KernelNode(function=function, **sizes, cooperative=False, params=words(zone, *values))  # type: ignore[arg-type]


def tensor(index: int) -> ByteRange:
    return ByteRange(begin=FIRST.addresses[index], end=FIRST.addresses[index] + SIZES[index])


def step() -> tuple[list[tuple[Any, ...]], list[OpRecord]]:
    """Return two dropouts, and the offset moved on, as they are captured."""
    drawn = ((OWN_SEED,), (OWN_OFFSET,))
    nodes = [
        ("dropout", (IMAGE,), (RESULT,), (MASK,), *drawn, 0, 1),
        ("dropout", (RESULT,), (RESULT,), (MASK,), *drawn, 4, 1),
        ("add", (OFFSET,), 8),
    ]
    dropout = {"name": "aten.native_dropout.default", "source": "", "writes": (tensor(RESULT), tensor(MASK))}
    ops = [
        OpRecord(first_node=0, end_node=1, reads=(tensor(IMAGE),), **dropout),  # type: ignore[arg-type]
        OpRecord(first_node=1, end_node=2, reads=(tensor(RESULT),), **dropout),  # type: ignore[arg-type]
        OpRecord(name="aten.add_.Tensor", source="", first_node=2, end_node=3, reads=(), writes=(tensor(OFFSET),)),
    ]
    return nodes, ops


def captured(monkeypatch: pytest.MonkeyPatch, *, state: bool) -> tuple[Graph, BufferTable]:
    """Return the graph of two captures of `step`; ``state``: the seed is state though nothing writes it."""
    nodes, ops = step()
    handles = {zone: [node(zone, *each) for each in nodes] for zone in (FIRST, SECOND)}
    monkeypatch.setattr(tasks, "node_handles", handles.__getitem__)
    monkeypatch.setattr(tasks, "read_node", lambda read: read)
    monkeypatch.setattr(tasks, "triggers", lambda *_: ())
    one = {"dtype": "int64", "shape": (), "data": memoryview(bytes(8))}
    contents = {
        Allocation(IMAGE): Content(name="x", dtype="uint8", shape=(256,), data=memoryview(bytes(256)), is_input=True),
        Allocation(SEED): Content(name="generator.seed", is_state=state, storage=11, **one),  # type: ignore[arg-type]
        Allocation(OFFSET): Content(name="generator.offset", mutated=True, storage=12, **one),  # type: ignore[arg-type]
    }
    code = SimpleNamespace(digest=lambda _: b"", shrunk=lambda *_: b"code")
    buffers = BufferTable(FIRST, RESIDENT, ForeignMemory(), contents)  # type: ignore[arg-type]
    captures = (SimpleNamespace(handle=zone, ops=ops, regions=()) for zone in (FIRST, SECOND))
    graph = tasks.build_graph(*captures, code=code, relocator=relocator(), buffers=buffers, inputs=(), outputs=())  # type: ignore[arg-type]
    return graph, buffers


def test_a_plan_reads_seed_and_offset_from_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, buffers = captured(monkeypatch, state=True)
    named = {buffer.name: number for number, buffer in enumerate(graph.buffers) if buffer.kind is BufferKind.STATE}
    assert {*named} == {"generator.seed", "generator.offset"}
    assert buffers.has(Allocation(SEED))
    assert not buffers.has(Allocation(OWN_SEED))
    first, second, add = graph.tasks
    for task, offset in ((first, 0), (second, 4)):
        assert isinstance(task.work, KernelWork)
        places = [(reference.param_offset, reference.buffer) for reference in task.work.references[3:]]
        assert places == [(24, named["generator.seed"]), (32, named["generator.offset"])]
        assert struct.unpack("<7Q", task.work.params) == (0, 0, 0, 0, 0, offset, 1)
        assert {*named.values()} <= {access.buffer for access in task.reads}
        assert {*named.values()}.isdisjoint(access.buffer for access in task.writes)
    assert {access.buffer for access in add.writes} == {named["generator.offset"]}
    assert [*dependencies(graph).edges] == [(0, 1), (0, 2), (1, 2)]


def test_what_no_run_writes_is_a_constant_unless_it_is_state(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = captured(monkeypatch, state=False)
    kinds = {buffer.name: buffer.kind for buffer in graph.buffers}
    assert (kinds["generator.seed"], kinds["generator.offset"]) == (BufferKind.CONSTANT, BufferKind.STATE)
