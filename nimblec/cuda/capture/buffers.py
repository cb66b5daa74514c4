"""Allocations of a capture as buffers of the IR."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nimblec.base.errors import UnsupportedModelError
from nimblec.base.ir import LIBRARY_MEMORY, Access, Buffer, BufferKind
from nimblec.cuda.capture.allocator import Place, Target, Zone
from nimblec.cuda.capture.capture import ByteRange
from nimblec.cuda.capture.earlier import EarlierMemory
from nimblec.cuda.capture.foreign import ForeignMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The contents, before a run, of an allocation that outlives it: a weight, an input, a state.

    ``dtype`` and ``shape`` describe ``data``. ``is_input`` marks the memory of a model input, ``mutated`` memory that a
    run was seen to change, ``is_state`` state that counts as such even if no run changes it, ``is_scratch`` scratch
    memory of a kernel; ``storage`` is that of `nimblec.base.ir.Buffer`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview = field(repr=False)
    is_input: bool = False
    mutated: bool = False
    is_state: bool = False
    is_scratch: bool = False
    storage: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """The ``index``-th allocation of a place."""

    index: int
    place: Place = Place.CAPTURE


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes [offset, offset + nbytes) of an allocation."""

    allocation: Allocation
    offset: int
    nbytes: int


class BufferTable:
    """Buffers of the IR, numbered in order of first use."""

    def __init__(
        self, zone: Zone, earlier: EarlierMemory, foreign: ForeignMemory, contents: Mapping[Allocation, Content]
    ) -> None:
        self._zone = zone
        self._earlier = earlier
        self._foreign = foreign
        self._places: dict[Place, Zone | EarlierMemory | ForeignMemory] = {
            Place.CAPTURE: zone,
            Place.EARLIER: earlier,
            Place.FOREIGN: foreign,
        }
        self._contents = contents
        self._numbers: dict[Allocation, int] = {}
        self._tensors: set[Allocation] = set()
        self._outputs: set[Allocation] = set()

    def span(self, where: ByteRange) -> Span | None:
        """Return the allocation under absolute addresses of the first capture; None for foreign memory."""
        for memory, place in ((self._zone, Place.CAPTURE), (self._earlier, Place.EARLIER)):
            index = memory.find(where.begin)
            if index is not None:
                allocation = Allocation(index, place)
                self.note_tensor(allocation)
                offset = where.begin - memory.addresses[index]
                return Span(allocation=allocation, offset=offset, nbytes=where.end - where.begin)
        return None

    def output(self, where: ByteRange) -> Span | None:
        """Return the span of a tensor that the model returns, as `span` does."""
        found = self.span(where)
        if found is not None:
            self._outputs.add(found.allocation)
        return found

    def note_tensor(self, allocation: Allocation) -> None:
        """Mark an allocation whose contents may outlive the op that wrote them, so that it is no workspace."""
        self._tensors.add(allocation)

    def number(self, allocation: Allocation) -> int:
        """Return the buffer's number. Raises UnsupportedModelError for memory from before the captures."""
        if allocation.place is Place.EARLIER:
            raise UnsupportedModelError(
                f"{self._nbytes(allocation)} bytes that were allocated before the run are used in it, and no tensor "
                "that Python can see owns them: keep such tensors as parameters, buffers or attributes of the module"
            )
        return self._numbers.setdefault(allocation, len(self._numbers))

    def has(self, allocation: Allocation) -> bool:
        """Return whether an allocation is one of the buffers so far."""
        return allocation in self._numbers

    def access(self, span: Span) -> Access:
        """Return a span as an access of its buffer."""
        return Access(buffer=self.number(span.allocation), offset=span.offset, nbytes=span.nbytes)

    def byte_at(self, address: int) -> Access:
        """Return the byte at an absolute address of the first capture."""
        span = self.span(ByteRange(begin=address, end=address + 1))
        assert span is not None
        return self.access(span)

    def whole(self, allocation: Allocation) -> Span:
        """Return every byte of an allocation."""
        return Span(allocation=allocation, offset=0, nbytes=self._nbytes(allocation))

    def is_temporary(self, allocation: Allocation) -> bool:
        """Return whether it has no contents from before the run: it is no weight, input or state."""
        return allocation not in self._contents

    def is_mutated(self, allocation: Allocation) -> bool:
        """Return whether a run was seen to change a weight or input, declared or not."""
        content = self._contents.get(allocation)
        return content is not None and content.mutated

    def buffers(self, written: Iterable[int]) -> tuple[Buffer, ...]:
        """Return all buffers, by number; a weight among the ``written`` ones is state."""
        changed = set(written)
        return tuple(self._buffer(a, written=n in changed) for a, n in self._numbers.items())

    def addresses(self) -> tuple[int, ...]:
        """Return the address of each buffer in the first capture, by number."""
        return tuple(self._places[a.place].addresses[a.index] for a in self._numbers)

    def _nbytes(self, allocation: Allocation) -> int:
        return self._places[allocation.place].sizes[allocation.index]

    def _buffer(self, allocation: Allocation, *, written: bool) -> Buffer:
        nbytes = self._nbytes(allocation)
        content = self._contents.get(allocation)
        if content is None:
            if allocation.place is Place.FOREIGN:
                return self._foreign_buffer(allocation)
            return Buffer(kind=self._temporary_kind(allocation), nbytes=nbytes)
        if content.is_input:
            return Buffer(kind=BufferKind.INPUT, nbytes=nbytes, name=content.name)
        return Buffer(
            kind=BufferKind.STATE if written or content.is_state else BufferKind.CONSTANT,
            nbytes=content.data.nbytes,
            name="" if content.is_scratch else content.name,
            dtype=content.dtype,
            shape=content.shape,
            data=content.data,
            storage=content.storage,
        )

    def _foreign_buffer(self, allocation: Allocation) -> Buffer:
        data = self._foreign.content(allocation.index)
        name = f"{LIBRARY_MEMORY} {allocation.index}"
        return Buffer(kind=BufferKind.STATE, nbytes=data.nbytes, name=name, shape=(data.nbytes,), data=data)

    def _temporary_kind(self, allocation: Allocation) -> BufferKind:
        if allocation in self._outputs:
            return BufferKind.OUTPUT
        return BufferKind.TEMPORARY if allocation in self._tensors else BufferKind.WORKSPACE


def allocation_of(target: Target) -> Allocation:
    """Return the allocation that a relocation points to."""
    return Allocation(target.index, target.place)
