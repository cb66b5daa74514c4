"""Decode the bytes of a plan file into a `Plan`, by the table of fields in `nimblert.plan.schema`."""

import struct
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, TypeAlias

from nimblert.errors import PlanFormatError
from nimblert.plan import Access, Plan, Pointer, Region, Relocation, schema
from nimblert.plan.compression import Unpacker
from nimblert.plan.records import DEFAULT_LIMITS, Limits
from nimblert.plan.schema import TABLES, Compression, Segment, Table

_U16 = Struct("<H")
_U32 = Struct("<I")
_I32 = Struct("<i")


class FlatBuffer:
    """A buffer, and the number of its bytes that may still be read.

    The methods raise PlanFormatError, or struct.error where they read a number outside of the buffer.
    """

    __slots__ = ("_unread", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._unread = len(view)

    def claim(self, position: int, nbytes: int) -> None:
        """Count bytes as read. Raises PlanFormatError where the buffer does not have them, or not as many unread."""
        self._unread -= nbytes
        if position + nbytes > len(self.view) or self._unread < 0:
            raise PlanFormatError(
                f"flatbuffer: {nbytes} bytes at byte {position} are more than it has ({len(self.view)} bytes)"
            )

    def target(self, at: int) -> int:
        """Return the position of the table or vector that the offset at byte ``at`` leads to."""
        position: int = at + _U32.unpack_from(self.view, at)[0]
        return position

    def vtable(self, table: int) -> int:
        """Return the position of the vtable of the table at byte ``table``."""
        position: int = table - _I32.unpack_from(self.view, table)[0]
        return position

    def layout(self, vtable: int, count: int) -> tuple[int, list[int]]:
        """Return the size of the tables with this vtable, and the places of their first ``count`` fields, 0: absent."""
        if vtable < 0:
            raise PlanFormatError(f"flatbuffer: vtable at byte {vtable} lies before its start")
        nbytes, table_nbytes = (int(_U16.unpack_from(self.view, vtable + at)[0]) for at in (0, 2))
        if nbytes < 4 or nbytes % 2 or table_nbytes < 4 or vtable + nbytes > len(self.view):
            raise PlanFormatError(f"flatbuffer: vtable at byte {vtable} is damaged")
        places = [place for (place,) in _U16.iter_unpack(self.view[vtable + 4 : vtable + nbytes])]
        if max(places, default=0) >= table_nbytes:
            raise PlanFormatError(f"flatbuffer: vtable at byte {vtable} names a field beyond its table")
        return table_nbytes, (places + [0] * count)[:count]

    def vector(self, at: int, item_nbytes: int) -> tuple[int, memoryview]:
        """Return the position and the bytes of the elements of the vector that the offset at byte ``at`` leads to."""
        view = self.view
        start = at + _U32.unpack_from(view, at)[0] + 4
        nbytes = _U32.unpack_from(view, start - 4)[0] * item_nbytes
        self.claim(start, nbytes)
        return start, view[start : start + nbytes]


_Reader: TypeAlias = Callable[[int], Any]
"""A function that returns the value at a position of the FlatBuffer."""
_Layout: TypeAlias = tuple[int, list[tuple[str, int, _Reader]]]
"""The size of a table, and of each field that it has the name, the place in the table and the reader."""


def decode(image: memoryview, flatbuffer_nbytes: int, limits: Limits = DEFAULT_LIMITS) -> Plan:
    """Return the plan in a file's bytes; its code and weights are slices of ``image``, or decompressed copies.

    Raises PlanFormatError where the bytes are not a plan, or of an unsupported major version of the schema, or where
    compressed segments are beyond ``limits``. Whether the plan is valid is for `nimblert.check.verify` to check.
    """
    buffer = FlatBuffer(image[:flatbuffer_nbytes])
    try:
        major, minor = _header(buffer, "schema")
    except struct.error as exc:
        raise PlanFormatError(f"flatbuffer is damaged: {exc}") from exc
    if not schema.OLDEST_MAJOR <= major <= schema.MAJOR:
        raise PlanFormatError(
            f"made with plan schema {major}.{minor}, this nimblert reads {schema.OLDEST_MAJOR}.x to {schema.MAJOR}.x;"
            f" {'install a newer nimblert' if major > schema.MAJOR else 'compile the model again'}"
        )
    unpacker = Unpacker(limits.unpacked_nbytes)
    decoder = _Decoder(buffer, image, unpacker)
    try:
        plan: Plan = decoder.plan()
        trailer, *segments = decoder.segments
        _check_segments([*segments, trailer], image, flatbuffer_nbytes)
    except PlanFormatError as exc:
        raise PlanFormatError(f"{exc}{_hint(major, minor)}") from exc
    except (struct.error, TypeError, IndexError, ValueError, OverflowError) as exc:
        raise PlanFormatError(f"flatbuffer is damaged: {exc}{_hint(major, minor)}") from exc
    object.__setattr__(plan, "image", image)
    object.__setattr__(plan, "saved_nbytes", unpacker.nbytes - unpacker.packed_nbytes)
    return plan


def file_nbytes(image: memoryview) -> int | None:
    """Return the full length of the file that ``image`` is the start of; None where it is too short to tell."""
    try:
        return sum(_header(FlatBuffer(image), "trailer"))
    except (struct.error, PlanFormatError):
        return None


def _header(buffer: FlatBuffer, name: str) -> tuple[int, int]:
    """Return the two numbers of a required struct of the root table."""
    fields = TABLES["Plan"].fields
    slot = [field.name for field in fields].index(name)
    root = buffer.target(0)
    _, places = buffer.layout(buffer.vtable(root), len(fields))
    if not places[slot]:
        raise PlanFormatError(f"flatbuffer: Plan at byte {root} lacks its field {name}")
    first, second = schema.STRUCTS[fields[slot].type].unpack_from(buffer.view, root + places[slot])
    return first, second


def _hint(major: int, minor: int) -> str:
    """Return a possible reason why a plan cannot be decoded, for the end of a message."""
    if (major, minor) <= (schema.MAJOR, schema.MINOR):
        return ""
    return (
        f"; it is of plan schema {major}.{minor}, which this nimblert knows up to {schema.MAJOR}.{schema.MINOR}:"
        f" a newer one may read it"
    )


def _check_segments(segments: list[Segment], image: memoryview, start: int) -> None:
    """Raise PlanFormatError unless ``segments`` fill ``image`` from ``start`` to its end; the last is the trailer.

    They ascend without overlap, with less than a page of zeros between them.
    """
    trailer = segments[-1]
    if trailer.nbytes != schema.TRAILER.size:
        raise PlanFormatError(f"trailer of {trailer.nbytes} bytes, expected {schema.TRAILER.size}")
    for segment in segments:
        if not start <= segment.offset < start + schema.ALIGNMENT:
            raise PlanFormatError(
                f"segment at byte {segment.offset}: the one before it ends at byte {start},"
                f" expected less than {schema.ALIGNMENT} bytes between"
            )
        if image[start : segment.offset] != bytes(segment.offset - start):
            raise PlanFormatError(f"bytes {start} to {segment.offset}: expected zero padding")
        start = segment.offset + segment.nbytes
        if start > len(image):
            raise PlanFormatError(f"segment at byte {segment.offset} ends at byte {start} of {len(image)}")
    if start != len(image):
        raise PlanFormatError(f"the last segment ends at byte {start} of {len(image)}")


class _Pointers(dict[tuple[int, int, int], Pointer]):
    """Pointers by (offset, index, region), made once each: a plan repeats most of them."""

    def __missing__(self, key: tuple[int, int, int]) -> Pointer:
        offset, index, region = key
        made = self[key] = Pointer(region=Region(region), index=index, offset=offset)
        return made


class _Decoder:
    """The readers of one FlatBuffer, one for each type.

    No reader refers to the decoder: there is no cycle that would keep a file mapped.
    """

    def __init__(self, buffer: FlatBuffer, image: memoryview, unpacker: Unpacker) -> None:
        self.segments: list[Segment] = []
        """Those that were read, in the order of the fields: the trailer first."""
        self._buffer = buffer
        self._image = image
        self._unpacker = unpacker
        self._pointers = _Pointers()
        self._tables: dict[str, _Reader] = {}
        for name, table in TABLES.items():
            read = self._table(name, table)
            self._tables[name] = self._command(read) if name == "Command" else read

    def plan(self) -> Plan:
        """Read the root table."""
        plan: Plan = self._tables["Plan"](self._buffer.target(0))
        return plan

    def _table(self, name: str, table: Table) -> _Reader:
        """Return the reader of the tables of this type."""
        buffer, record, apart, unpacker = self._buffer, table.record, table.apart, self._unpacker
        readers = [(field, self._field(field.type)) for field in table.fields]
        defaults = {field.name: field.default for field in table.fields}
        data = next((field.name for field in table.fields if field.type == "Segment"), "")
        layouts: dict[int, _Layout] = {}

        def layout(position: int, vtable: int) -> _Layout:
            nbytes, places = buffer.layout(vtable, len(readers))
            present = []
            for (field, reader), place in zip(readers, places, strict=True):
                if place:
                    present.append((field.name, place, reader))
                elif field.default is schema.REQUIRED:
                    raise PlanFormatError(f"flatbuffer: {name} at byte {position} lacks its field {field.name}")
            return nbytes, present

        def read(position: int) -> Any:
            vtable = buffer.vtable(position)
            if vtable not in layouts:
                layouts[vtable] = layout(position, vtable)
            nbytes, present = layouts[vtable]
            buffer.claim(position, nbytes)
            values = defaults | {name: reader(position + place) for name, place, reader in present}
            stored = {other: values.pop(other) for other in apart}
            if (compression := stored.get("compression")) is not None:
                if (compression is Compression.EXTERNAL) != bool(values.get("sha256")):
                    raise PlanFormatError(f"flatbuffer: {name} at byte {position} has no data, or no digest of it")
                if compression is Compression.ZSTD:
                    values[data] = unpacker.unpack(values[data], stored["unpacked_nbytes"])
            return tuple(values.values()) if record is tuple else record(**values)

        return read

    def _command(self, read: _Reader) -> _Reader:
        """Return the reader of commands: ``read`` returns the number of an action and its position."""
        members = [self._tables[name] for name in schema.ACTIONS]

        def command(position: int) -> Any:
            kind, action = read(position)
            if not 1 <= kind <= len(members):
                raise PlanFormatError(f"command of kind {kind}: this nimblert knows kinds 1 to {len(members)}")
            return members[kind - 1](action)

        return command

    def _field(self, kind: str) -> _Reader:
        """Return the reader of the fields of this type."""
        buffer = self._buffer
        if kind.startswith("["):
            return self._vector(kind.strip("[]"))
        if kind in self._tables:
            read = self._tables[kind]
            return lambda at: read(buffer.target(at))
        if kind in schema.STRUCTS:
            return self._struct(kind)
        if kind == "string":
            return lambda at: str(buffer.vector(at, 1)[1], "utf-8")
        return buffer.target if kind == "Action" else self._number(kind)

    def _number(self, kind: str) -> _Reader:
        view = self._buffer.view
        if kind in schema.NUMBERS:
            unpack = schema.NUMBERS[kind].unpack_from
            return lambda at: unpack(view, at)[0]
        enum = schema.ENUMS[kind]
        return lambda at: enum(view[at])

    def _struct(self, kind: str) -> _Reader:
        view, image, segments, pointers = self._buffer.view, self._image, self.segments, self._pointers
        unpack = schema.STRUCTS[kind].unpack_from

        def segment(at: int) -> memoryview:
            """Return the bytes of a segment, fewer where it leaves the file; places are checked once all are known."""
            segments.append(found := Segment(*unpack(view, at)))
            return image[found.offset : found.offset + found.nbytes]

        if kind == "Segment":
            return segment
        if kind == "Pointer":
            return lambda at: pointers[unpack(view, at)]
        return lambda at: unpack(view, at)

    def _vector(self, item: str) -> _Reader:
        """Return the reader of the vectors of this type."""
        buffer, pointers = self._buffer, self._pointers
        if item in self._tables:
            read = self._tables[item]

            def tables(at: int) -> tuple[Any, ...]:
                start, offsets = buffer.vector(at, 4)
                return tuple([read(start + 4 * i + offset) for i, (offset,) in enumerate(_U32.iter_unpack(offsets))])

            return tables
        if item == "ubyte":
            return lambda at: bytes(buffer.vector(at, 1)[1])
        if item in schema.ENUMS:
            enum = schema.ENUMS[item]
            return lambda at: tuple(map(enum, buffer.vector(at, 1)[1]))
        layout = schema.STRUCTS.get(item) or schema.NUMBERS[item]

        def rows(at: int) -> Iterator[tuple[Any, ...]]:
            return layout.iter_unpack(buffer.vector(at, layout.size)[1])

        if item == "Relocation":
            return lambda at: tuple([Relocation(param_offset=n, pointer=pointers[o, i, r]) for o, i, r, n in rows(at)])
        if item == "Access":
            return lambda at: tuple([Access(pointer=pointers[o, i, r], nbytes=n) for o, i, r, n in rows(at)])
        return lambda at: tuple([number for (number,) in rows(at)])
