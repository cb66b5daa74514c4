"""Checked reading of FlatBuffers.

The accessors that flatc generates for Python trust their buffer: a damaged offset reads other bytes, and a damaged
length loops for minutes. Here every offset, string and vector is bounded before it is read, and all together may not
exceed the buffer: in a valid one no two share bytes, so a small file cannot become a large plan. The encoding:
"FlatBuffers internals", https://flatbuffers.dev/internals/.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Any

from nimblert.errors import PlanFormatError

_U8 = Struct("<B")
_U16 = Struct("<H")
_U32 = Struct("<I")
_I32 = Struct("<i")
_U64 = Struct("<Q")
_F64 = Struct("<d")

_NO_FIELDS = (0,) * 32
"""At least as many slots as any table of the schema has; 0 is an absent field."""


class FlatBuffer:
    """A buffer, the number of bytes that may still be read, and the field offsets of tables by vtable.

    Reading raises PlanFormatError, or struct.error where a fixed-size field leaves the buffer.
    """

    __slots__ = ("_layouts", "_unread", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._unread = len(view)
        self._layouts: dict[int, tuple[int, tuple[int, ...]]] = {}

    def root(self) -> "Table":
        """The table that the buffer starts with."""
        return self.table_at(_U32.unpack_from(self.view)[0])

    def table_at(self, position: int) -> "Table":
        """The table at ``position``."""
        vtable = position - _I32.unpack_from(self.view, position)[0]
        layout = self._layouts.get(vtable)
        if layout is None:
            layout = self._layouts[vtable] = self._read_vtable(vtable)
        nbytes, fields = layout
        self.claim(position, nbytes)
        return Table(self, position, fields)

    def claim(self, position: int, nbytes: int) -> None:
        """Count ``nbytes`` bytes at ``position`` as read. Raises PlanFormatError where they are not in the buffer."""
        self._unread -= nbytes
        if position + nbytes > len(self.view) or self._unread < 0:
            raise PlanFormatError(
                f"flatbuffer: {nbytes} bytes at byte {position} are more than it has ({len(self.view)} bytes)"
            )

    def _read_vtable(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Size of the tables that use this vtable, and the offset of each field in them."""
        if position < 0:
            raise PlanFormatError(f"flatbuffer: vtable at byte {position} lies before its start")
        nbytes = _U16.unpack_from(self.view, position)[0]
        table_nbytes = _U16.unpack_from(self.view, position + 2)[0]
        end = position + nbytes
        if nbytes < 4 or nbytes % 2 or table_nbytes < 4 or end > len(self.view):
            raise PlanFormatError(f"flatbuffer: vtable at byte {position} is damaged")
        fields = tuple(offset for (offset,) in _U16.iter_unpack(self.view[position + 4 : end]))
        if max(fields, default=0) >= table_nbytes:
            raise PlanFormatError(f"flatbuffer: vtable at byte {position} names a field beyond its table")
        return table_nbytes, fields + _NO_FIELDS[len(fields) :]


class Table:
    """One table. A slot is the position of a field in the schema, from 0."""

    __slots__ = ("_buffer", "_fields", "_position")

    def __init__(self, buffer: FlatBuffer, position: int, fields: tuple[int, ...]) -> None:
        self._buffer = buffer
        self._position = position
        self._fields = fields

    def _scalar(self, slot: int, layout: Struct) -> Any:
        field = self._fields[slot]
        return layout.unpack_from(self._buffer.view, self._position + field)[0] if field else 0

    def u8(self, slot: int) -> int:
        """An 8-bit unsigned field, 0 where it is absent."""
        return int(self._scalar(slot, _U8))

    def u32(self, slot: int) -> int:
        """A 32-bit unsigned field, 0 where it is absent."""
        return int(self._scalar(slot, _U32))

    def u64(self, slot: int) -> int:
        """A 64-bit unsigned field, 0 where it is absent."""
        return int(self._scalar(slot, _U64))

    def f64(self, slot: int) -> float:
        """A double field, 0 where it is absent."""
        return float(self._scalar(slot, _F64))

    def boolean(self, slot: int) -> bool:
        """A bool field, False where it is absent."""
        return bool(self._scalar(slot, _U8))

    def record(self, slot: int, layout: Struct) -> tuple[Any, ...]:
        """The numbers of a required struct field."""
        found = self.optional_record(slot, layout)
        if found is None:
            raise PlanFormatError(f"flatbuffer: table at byte {self._position} lacks its field {slot}")
        return found

    def optional_record(self, slot: int, layout: Struct) -> tuple[Any, ...] | None:
        """The numbers of a struct field, None where it is absent."""
        field = self._fields[slot]
        return layout.unpack_from(self._buffer.view, self._position + field) if field else None

    def table(self, slot: int) -> "Table":
        """A required table field."""
        found = self.optional_table(slot)
        if found is None:
            raise PlanFormatError(f"flatbuffer: table at byte {self._position} lacks its field {slot}")
        return found

    def optional_table(self, slot: int) -> "Table | None":
        """A table field, None where it is absent."""
        field = self._fields[slot]
        if not field:
            return None
        at = self._position + field
        return self._buffer.table_at(at + _U32.unpack_from(self._buffer.view, at)[0])

    def tables(self, slot: int) -> Iterator["Table"]:
        """The tables of a vector."""
        start, content = self._vector(slot, 4)
        for at, (offset,) in enumerate(_U32.iter_unpack(content)):
            yield self._buffer.table_at(start + 4 * at + offset)

    def records(self, slot: int, layout: Struct) -> Iterator[tuple[Any, ...]]:
        """The numbers of each struct of a vector."""
        return layout.iter_unpack(self._vector(slot, layout.size)[1])

    def numbers(self, slot: int, layout: Struct) -> tuple[Any, ...]:
        """The numbers of a vector of scalars; ``layout`` is that of one."""
        return tuple(number for (number,) in self.records(slot, layout))

    def data(self, slot: int) -> bytes:
        """A copy of a vector of bytes."""
        return bytes(self._vector(slot, 1)[1])

    def string(self, slot: int) -> str:
        """A string, empty where it is absent."""
        return str(self._vector(slot, 1)[1], "utf-8")

    def _vector(self, slot: int, item_nbytes: int) -> tuple[int, memoryview]:
        """Position and bytes of a vector's elements; empty where it is absent."""
        view = self._buffer.view
        field = self._fields[slot]
        if not field:
            return 0, view[:0]
        at = self._position + field
        at += _U32.unpack_from(view, at)[0]
        nbytes = _U32.unpack_from(view, at)[0] * item_nbytes
        self._buffer.claim(at + 4, nbytes)
        return at + 4, view[at + 4 : at + 4 + nbytes]
