"""Pointers told from numbers by their words in two captures; no GPU is needed for that."""

import ctypes
import struct
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import SimpleNamespace

import pytest

from nimblec.base.errors import UnsupportedModelError
from nimblec.base.ir import BufferKind, Graph
from nimblec.cuda.capture import foreign, tasks
from nimblec.cuda.capture.allocator import STEP_NBYTES, Place, Shift
from nimblec.cuda.capture.buffers import BufferTable
from nimblec.cuda.capture.capture import ByteRange, OpRecord
from nimblec.cuda.capture.earlier import EarlierMemory
from nimblec.cuda.capture.inductor import accesses
from nimblec.cuda.capture.nodes import Function, KernelNode
from nimblec.cuda.capture.relocation import RelocatedParams, Relocator, Target
from nimblert.errors import CudaError

FIRST = [0x7F00_0000_0000, 0x7F00_0000_0400, 0x7F00_0000_2000]
SHIFT = (600 << 30) + 0x1234_5600
SECOND = [address + SHIFT + i * STEP_NBYTES for i, address in enumerate(FIRST)]
RESIDENT = 0x7E00_0000_0000
DEVICE, HOST = 0x7D00_0000_0000, 0x7C00_0000_0000
"""Addresses that the driver knows."""


class _Zone:
    """One live and one freed allocation of 512 bytes."""

    def __init__(self, base: int) -> None:
        self.base, self.end = base, base + (1 << 30)
        self.addresses, self.sizes = (base, base + 512), (512, 512)
        self.live = frozenset({base})

    def find(self, address: int) -> int | None:
        return (address - self.base) // 512 if self.base <= address < self.base + 1024 else None


def _earlier(**known: Collection[int]) -> EarlierMemory:
    """Return the resident zone, and that of another recording, which the driver knows too."""
    return EarlierMemory([_Zone(RESIDENT), _Zone(DEVICE)], **known)  # type: ignore[list-item]


def _relocator(**known: Collection[int]) -> Relocator:
    return Relocator(Shift(FIRST, SHIFT), _earlier(**known), foreign.ForeignMemory())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the addresses that the driver was asked about; it knows 4 KiB of device and 4 KiB of host memory."""
    addresses = []

    def call(api: str, *args: int) -> object:
        address = args[-1]
        if api == "cuMemGetAddressRange":
            return address // 4096 * 4096, 4096
        addresses.append(address)
        if address // 4096 == DEVICE // 4096:
            return 2
        if address // 4096 == HOST // 4096:
            return 1
        raise CudaError(api, "CUDA_ERROR_INVALID_VALUE")

    attributes = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2)
    monkeypatch.setattr(foreign, "bindings", lambda: SimpleNamespace(CUpointer_attribute=attributes))
    monkeypatch.setattr(foreign, "call", call)
    return addresses


@pytest.fixture
def relocator(asked: list[int]) -> Relocator:
    assert not asked
    resident = EarlierMemory([_Zone(RESIDENT)])  # type: ignore[list-item]
    return Relocator(Shift(FIRST, SHIFT), resident, foreign.ForeignMemory())


def _pack(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}Q", *words)


@pytest.mark.parametrize("offset", [64, -4096, 1 << 20])
def test_relocation_finds_word_that_moved(relocator: Relocator, offset: int) -> None:
    """By how far it moved: a pointer with a bias may be anywhere."""
    found = relocator.relocate(_pack(FIRST[0], 7, FIRST[2] + offset), _pack(SECOND[0], 7, SECOND[2] + offset))
    assert found.targets == ((0, Target(index=0, offset=0)), (16, Target(index=2, offset=offset)))
    assert found.params == _pack(0, 7, 0)


def test_padding_loses_only_the_bytes_that_differ(relocator: Relocator) -> None:
    # A dtype of one byte, three bytes of padding, a float.
    first = struct.pack("<B3sf", 11, b"\x10\x20\x30", 1.0)
    second = struct.pack("<B3sf", 11, b"\x99\x20\x31", 1.0)
    found = relocator.relocate(first, second)
    assert found.targets == ()
    assert found.params == struct.pack("<B3sf", 11, b"\x00\x20\x00", 1.0)


def test_an_int_beside_a_stale_half_pointer_is_no_pointer(relocator: Relocator) -> None:
    stale = [address >> 32 for address in (FIRST[0], SECOND[0])]
    found = relocator.relocate(_pack(42 | stale[0] << 32), _pack(42 | stale[1] << 32))
    assert found.targets == ()
    assert found.params[:4] == (42).to_bytes(4, "little")


def test_a_number_on_a_stale_pointer_is_kept(relocator: Relocator) -> None:
    """A byte that the kernel reads, then seven of an older address: the word looks like one on the heap."""
    on_heap = ctypes.addressof(ctypes.create_string_buffer(1 << 20)) & ~255 | 15
    assert relocator.relocate(_pack(on_heap), _pack(on_heap)).params == _pack(on_heap)


def test_the_tail_of_odd_parameters_is_kept(relocator: Relocator) -> None:
    assert relocator.relocate(b"\x01\x02\x03", b"\x01\x05\x03").params == b"\x01\x00\x03"


def test_a_word_that_stayed_may_be_resident(relocator: Relocator) -> None:
    found = relocator.relocate(_pack(RESIDENT + 8, RESIDENT + 520, 5), _pack(RESIDENT + 8, RESIDENT + 520, 5))
    assert found.targets == ((0, Target(index=0, offset=8, place=Place.EARLIER)),)
    assert found.params == _pack(0, RESIDENT + 520, 5)  # the second one was freed: a number, or padding


def test_relocation_ignores_other_zone(asked: list[int]) -> None:
    relocator = _relocator()
    # The first was freed, the second never allocated.
    words = _pack(DEVICE + 520, DEVICE + (1 << 20))
    assert relocator.relocate(words, words) == RelocatedParams(params=words, targets=())
    assert not asked


def test_relocation_ignores_other_weight(asked: list[int]) -> None:
    relocator = _relocator(others={DEVICE})
    words = _pack(DEVICE + 8)
    assert relocator.relocate(words, words, declared=()) == RelocatedParams(params=words, targets=())
    for declared in ({0}, None):
        found = relocator.relocate(words, words, declared=declared)
        assert found.targets == ((0, Target(index=0, offset=8, place=Place.EARLIER)),)
    assert not asked


def test_relocation_counts_unowned_memory(asked: list[int]) -> None:
    relocator = _relocator(others={DEVICE})
    found = relocator.relocate(_pack(RESIDENT + 8), _pack(RESIDENT + 8), declared=())
    assert found.targets == ((0, Target(index=0, offset=8, place=Place.EARLIER)),)
    assert not asked


@pytest.mark.parametrize("read", [(), (DEVICE,)])
def test_relocation_refuses_earlier_memory(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, read: tuple[int, ...]
) -> None:
    """The kernel has the address twice, as stale padding may; the op reads a tensor there, or none."""
    building = _building(monkeypatch, [(FIRST[0], DEVICE, DEVICE + 520)], [(read, FIRST[:1])])
    if read:
        with pytest.raises(UnsupportedModelError, match=r"^aten\.le in head: 512 bytes that were allocated before"):
            building()
    else:
        (buffer,) = building().buffers
        assert (buffer.kind, buffer.nbytes) == (BufferKind.TEMPORARY, 512)
    assert not asked


def test_a_pointer_to_a_tensor_of_another_op_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in lists of fewer tensors than they have room for; a kernel may point to any tensor of its own op."""
    other, own = FIRST[0], FIRST[0] + 512
    ops = [((), [other]), ((), [own]), ([other], [own])]
    _, stale, reading = _building(monkeypatch, [(other,), (other, own), (other, own)], ops)().tasks
    assert [reference.param_offset for reference in stale.work.references] == [8]  # type: ignore[union-attr]
    assert [reference.param_offset for reference in reading.work.references] == [0, 8]  # type: ignore[union-attr]
    assert (stale.reads, [access.buffer for access in reading.reads]) == ((), [0])


def _building(
    monkeypatch: pytest.MonkeyPatch,
    pointers: Sequence[Sequence[int]],
    tensors: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> Callable[[], Graph]:
    """Return what builds the graph of one kernel per op: its pointers, and the tensors that the op reads and writes."""
    zone = _Zone(FIRST[0])
    moves = {address: SHIFT + i * STEP_NBYTES for i, address in enumerate(zone.addresses)}
    nodes = [[_kernel(_pack(*(a + n * moves.get(a, 0) for a in kernel))) for kernel in pointers] for n in range(2)]
    monkeypatch.setattr(tasks, "node_handles", nodes.__getitem__)
    monkeypatch.setattr(tasks, "read_node", lambda node: node)
    monkeypatch.setattr(tasks, "triggers", lambda *_: ())
    spans = [[tuple(ByteRange(begin=a, end=a + 8) for a in found) for found in of] for of in tensors]
    ops = [OpRecord(name="aten.le", source="head", first_node=n, end_node=n + 1, reads=r, writes=w)
           for n, (r, w) in enumerate(spans)]  # fmt: skip
    first, second = (SimpleNamespace(handle=n, ops=ops, regions=()) for n in range(2))
    earlier, memory = _earlier(others={DEVICE}), foreign.ForeignMemory()
    code = SimpleNamespace(digest=lambda _: b"", shrunk=lambda *_: b"")
    return partial(
        tasks.build_graph, first, second, code=code, relocator=Relocator(Shift([*moves], SHIFT), earlier, memory),
        buffers=BufferTable(zone, earlier, memory, {}), inputs=(), outputs=(),
    )  # fmt: skip


def _kernel(params: bytes) -> KernelNode:
    function = Function(symbol="le", parameters=(), module=0, library=0)
    one = (1, 1, 1)
    return KernelNode(
        function=function, grid=one, block=one, cluster=one, dynamic_smem_nbytes=0, cooperative=False, params=params
    )


def test_no_kernel_reads_what_the_recorder_keeps(asked: list[int]) -> None:
    relocator = _relocator(moved={RESIDENT})
    found = relocator.relocate(_pack(RESIDENT + 24, FIRST[0]), _pack(RESIDENT + 24, SECOND[0]))
    assert found.targets == ((8, Target(index=0, offset=0)),)
    assert found.params == _pack(RESIDENT + 24, 0)
    assert not asked


def test_device_memory_outside_the_allocator_is_found(relocator: Relocator, asked: list[int]) -> None:
    words = _pack(DEVICE + 16, DEVICE + 24, 1 << 40)
    found = relocator.relocate(words, words)
    assert [t for _, t in found.targets] == [Target(index=0, offset=n, place=Place.FOREIGN) for n in (16, 24)]
    assert found.params == _pack(0, 0, 1 << 40)
    relocator.relocate(words, words)
    assert asked == [DEVICE + 16, DEVICE + 24, 1 << 40]


def test_host_memory_is_refused(relocator: Relocator) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^at byte 0 of its parameters, .* host memory"):
        relocator.relocate(_pack(HOST), _pack(HOST))


def test_a_kernel_is_told_to_report_nowhere(relocator: Relocator) -> None:
    words = _pack(3, HOST, FIRST[0]), _pack(3, HOST, SECOND[0])
    found = relocator.relocate(*words, reports=True)
    assert found.params == _pack(3, 0, 0)
    assert found.targets == ((16, Target(index=0, offset=0)),)


def test_relocation_ignores_half_a_pointer(relocator: Relocator) -> None:
    first, second = ((1 << 48) + address for address in (FIRST[0], SECOND[0]))
    found = relocator.relocate(_pack(first), _pack(second))
    assert found.targets == ()
    assert found.params[6:] == b"\x01\x00"


def test_an_address_must_be_one(relocator: Relocator) -> None:
    assert relocator.locate(FIRST[1], SECOND[1]) == Target(index=1, offset=0)
    with pytest.raises(UnsupportedModelError, match="did not allocate"):
        relocator.locate(FIRST[1], SECOND[1] + 8)


def test_the_shift_of_every_allocation_is_its_own() -> None:
    assert len({b - a for a, b in zip(FIRST, SECOND, strict=True)}) == len(FIRST)
    assert Shift(FIRST, SHIFT).locate(FIRST[2], SECOND[2] + STEP_NBYTES) is None


def test_the_names_of_a_generated_kernel_tell_what_it_writes() -> None:
    torch = pytest.importorskip("torch")
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    names = ("in_ptr0", "out_ptr0", "in_out_ptr0", "table_ptr", "xnumel", "XBLOCK")
    reads, writes = accesses(names, {"table_ptr"}, (a, b, c, d, 16))
    assert [id(t) for t in reads] == [id(a), id(c), id(d)]
    assert [id(t) for t in writes] == [id(b), id(c), id(d)]
