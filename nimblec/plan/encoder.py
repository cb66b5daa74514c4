# mypy: disable-error-code="no-untyped-call"
# (flatbuffers.Builder has no types)
"""Write plan files, by the table of fields in `nimblert.plan.schema`, by which nimblert reads them."""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import chain
from os import PathLike
from typing import Any, BinaryIO, NamedTuple

import zstandard
from flatbuffers.builder import Builder, BuilderSizeError

from nimblert.check import verify
from nimblert.errors import PlanFormatError
from nimblert.plan import Module, Part, Plan, Target, Weight, schema
from nimblert.plan.container import digests
from nimblert.plan.files import replacing
from nimblert.plan.records import DEFAULT_LIMITS
from nimblert.plan.schema import ALIGNMENT, ENUMS, NUMBERS, STRUCTS, TABLES, TRAILER, Compression, Field, Segment

_MODEL_ALIGNMENT = 64
"""For ONNX models, which are small and many: with a page each, most of the file would be padding."""

_CHUNK_NBYTES = 16 << 20

_LARGE_NBYTES = 64 << 20
"""Code and weights from which a plan has digests of its segments; hashing less takes no longer than starting a GPU."""

_LEVEL = 9
"""Of Zstandard: beyond it cubins shrink by a few percent more, in many times the time."""
_LEAST_SAVED_NBYTES = 4096
_LEAST_SAVED_SHARE = 10
"""A segment is compressed where that saves a page, and a tenth of it."""

_ALIGNMENTS = {
    kind: max(struct.calcsize(code) for code in layout.format if code.isalpha()) for kind, layout in STRUCTS.items()
}
"""A struct is aligned like the largest of its numbers."""

_PREPEND = {
    "bool": Builder.PrependBoolSlot,
    "ubyte": Builder.PrependUint8Slot,
    "uint": Builder.PrependUint32Slot,
    "long": Builder.PrependInt64Slot,
    "ulong": Builder.PrependUint64Slot,
    "double": Builder.PrependFloat64Slot,
}


class Encoded(NamedTuple):
    """A FlatBuffer; of code and weights, in order, the places in the file and the bytes there; the trailer's place."""

    flatbuffer: bytes
    segments: tuple[Segment, ...]
    contents: tuple[memoryview, ...]
    trailer: Segment


def write(plan: Plan, path: str | PathLike[str], *, compress_weights: bool = False) -> None:
    """Write the plan to ``path``, whole or not at all.

    The bytes go to a temporary file beside it, which is renamed once they are on disk. Code and weights are streamed.
    Code and state are compressed where that saves enough; weights, which are else used in the mapped file, only with
    ``compress_weights``.
    Raises PlanInvalidError where the plan contradicts itself, and NimbleError where the file cannot be written; an
    existing file is unchanged then.
    """
    verify.check(plan)
    with replacing(path) as file:
        _stream(encode(plan, compress_weights=compress_weights), file)


def encode_file(plan: Plan) -> bytes:
    """Return the bytes of the plan's file. Unlike `write`, takes plans that contradict themselves."""
    file = BytesIO()
    _stream(encode(plan), file)
    return file.getvalue()


def encode(plan: Plan, *, compress_weights: bool = False) -> Encoded:
    """Encode everything but code and weights, which only get their places.

    Equal plans give equal bytes. Raises PlanFormatError where a number does not fit its field or the FlatBuffer would
    pass 2 GiB.
    """
    of_segments = b""
    if sum(data.nbytes for _, data in _contents(plan)) >= _LARGE_NBYTES:
        of_segments = digests(memoryview(b""), plan)[schema.DIGEST_NBYTES :]
    plan = replace(plan, digests=bytes(schema.DIGEST_NBYTES) + of_segments if of_segments else b"")
    packed = _packed(plan, compress_weights=compress_weights)
    encoder = _Encoder(packed)
    try:
        buffer = encoder.finish(plan)
    except (struct.error, TypeError, UnicodeEncodeError, OverflowError, BuilderSizeError) as exc:
        raise PlanFormatError(f"the plan does not fit its file format: {exc}") from exc
    placed = _place(plan, packed, len(buffer))
    end = placed[-1].offset + placed[-1].nbytes if placed else len(buffer)
    trailer = Segment(end, TRAILER.size)
    for position, segment in zip(encoder.segments, (*placed, trailer), strict=True):
        # Builder offsets count from the end of the buffer.
        STRUCTS["Segment"].pack_into(buffer, len(buffer) - position, *segment)
    contents = tuple(packed.get(id(record), data) for record, data in _contents(plan))
    if of_segments:
        own = buffer.index(of_segments) - schema.DIGEST_NBYTES
        buffer[own : own + schema.DIGEST_NBYTES] = hashlib.sha256(buffer).digest()
    return Encoded(bytes(buffer), placed, contents, trailer)


def _stream(encoded: Encoded, file: BinaryIO) -> None:
    """Write the bytes of the file in order."""
    sha256 = hashlib.sha256()
    position = 0

    def put(data: bytes | memoryview) -> None:
        nonlocal position
        sha256.update(data)
        file.write(data)
        position += len(data)

    put(encoded.flatbuffer)
    for segment, data in zip(encoded.segments, encoded.contents, strict=True):
        put(bytes(segment.offset - position))
        # An empty memoryview of several dimensions cannot be cast.
        content = data.cast("B") if data.nbytes else memoryview(b"")
        for start in range(0, len(content), _CHUNK_NBYTES):
            put(content[start : start + _CHUNK_NBYTES])
    trailer = TRAILER.pack(schema.MAGIC, len(encoded.flatbuffer), position + TRAILER.size, b"")
    put(trailer[: -schema.DIGEST_NBYTES])
    file.write(sha256.digest())


def _contents(plan: Plan) -> Iterator[tuple[Module | Weight | Part, memoryview]]:
    """Yield each record with a segment and its bytes, in file order: modules, weights, state, parts."""
    for module in plan.modules:
        yield module, module.code
    for weight in (*plan.weights, *plan.state):
        yield weight, weight.data
    for part in plan.parts:
        yield part, part.file


def _packed(plan: Plan, *, compress_weights: bool) -> dict[int, memoryview]:
    """Return the compressed bytes of those records that are worth it, and that default limits allow, by id."""
    compressor, left, found = zstandard.ZstdCompressor(level=_LEVEL), DEFAULT_LIMITS.unpacked_nbytes, {}
    tensors = (*plan.state, *(plan.weights if compress_weights else ()))
    candidates = chain(
        ((module, module.code, _code_alignment(plan)) for module in plan.modules),
        ((tensor, tensor.data, ALIGNMENT) for tensor in tensors),
    )
    for record, data, alignment in candidates:
        # What is not compressed is aligned, and the padding behind it saved, too.
        whole = -(-data.nbytes // alignment) * alignment
        if whole > _LEAST_SAVED_NBYTES and data.nbytes <= left:
            packed = memoryview(compressor.compress(data))
            if whole - packed.nbytes >= max(_LEAST_SAVED_NBYTES, whole / _LEAST_SAVED_SHARE):
                found[id(record)] = packed
                left -= data.nbytes
    return found


def _code_alignment(plan: Plan) -> int:
    return _MODEL_ALIGNMENT if plan.target is Target.CPU else ALIGNMENT


def _place(plan: Plan, packed: Mapping[int, memoryview], start: int) -> tuple[Segment, ...]:
    """Return the places of `_contents`, from byte ``start`` on.

    Cubins start on pages, ONNX models close together. The offset of a weight in the file equals that in its region
    modulo the page size, so that adjacent weights keep their distance and one copy can upload them all. Those in
    another file take no place, and compressed segments start where the one before ends.
    """
    places = [(0, _code_alignment(plan))] * len(plan.modules)
    places += [(0, 1) if w.sha256 else (w.offset, ALIGNMENT) for w in (*plan.weights, *plan.state)]
    places += [(0, ALIGNMENT)] * len(plan.parts)
    placed = []
    for (residue, alignment), (record, data) in zip(places, _contents(plan), strict=True):
        stored = packed.get(id(record))
        offset = start + (residue - start) % alignment if stored is None else start
        placed.append(Segment(offset, (data if stored is None else stored).nbytes))
        start = offset + placed[-1].nbytes
    return tuple(placed)


class _Encoder:
    """A FlatBuffer that grows from back to front: what a table holds is written before the table.

    The places of segments depend on the size of the FlatBuffer, so they are written as zeros; ``segments`` holds where
    to fill them in: those of `_contents` in order, then that of the trailer. ``packed`` has the compressed bytes of
    records by id. Methods return the offset of what they wrote, 0 for nothing: an empty string or vector is an absent
    field.
    """

    def __init__(self, packed: Mapping[int, memoryview]) -> None:
        self._packed = packed
        self.segments: list[int] = []
        self._builder = Builder(1 << 16)

    def finish(self, plan: Plan) -> bytearray:
        """Return the FlatBuffer of the plan, with its segments still zero."""
        self._builder.Finish(self._table("Plan", plan), schema.IDENTIFIER)
        buffer: bytearray = self._builder.Output()
        return buffer

    def _table(self, name: str, record: Any) -> int:
        if name == "Command":
            action = type(record).__name__
            record = schema.ACTIONS.index(action) + 1, self._table(action, record)
        fields = TABLES[name].fields
        values = record if isinstance(record, tuple) else [self._value(record, field) for field in fields]
        present = [
            (slot, field.type, self._outside(field.type, value))
            for slot, (field, value) in enumerate(zip(fields, values, strict=True))
            if field.default is schema.REQUIRED or value != field.default
        ]
        self._builder.StartObject(len(fields))
        for slot, kind, value in present:
            if kind in STRUCTS:
                self._builder.PrependStructSlot(slot, self._struct(kind, value), 0)
            elif kind in NUMBERS or kind in ENUMS:
                _PREPEND[kind if kind in NUMBERS else "ubyte"](self._builder, slot, value, 0)
            else:
                self._builder.PrependUOffsetTRelativeSlot(slot, value, 0)
        return int(self._builder.EndObject())

    def _value(self, record: Any, field: Field) -> Any:
        if id(record) in self._packed:
            if field.name == "compression":
                return Compression.ZSTD
            if field.name == "unpacked_nbytes":
                return record.code.nbytes if isinstance(record, Module) else record.data.nbytes
        return _value(record, field)

    def _outside(self, kind: str, value: Any) -> Any:
        """Return the offset of a string, vector or table, which lies outside of the table; other values as they are."""
        if kind == "string":
            return self._builder.CreateString(value)
        if kind in TABLES:
            return self._table(kind, value)
        return self._vector(kind[1:-1], value) if kind.startswith("[") else value

    def _struct(self, kind: str, value: Any) -> int:
        data = STRUCTS[kind].pack(*_numbers(kind, value))
        self._builder.Prep(_ALIGNMENTS[kind], len(data))
        self._put(data)
        if kind == "Segment":
            self.segments.append(self._builder.Offset())
        return int(self._builder.Offset())

    def _vector(self, item: str, values: Sequence[Any]) -> int:
        if not values:
            return 0
        builder = self._builder
        if item in TABLES:
            offsets = [self._table(item, value) for value in values]
            builder.StartVector(4, len(offsets), 4)
            for offset in reversed(offsets):
                builder.PrependUOffsetTRelative(offset)
            return int(builder.EndVector())
        if item == "ubyte" or item in ENUMS:
            return int(builder.CreateByteVector(bytes(values)))
        layout = STRUCTS.get(item) or NUMBERS[item]
        builder.StartVector(layout.size, len(values), 8)
        self._put(b"".join([layout.pack(*_numbers(item, value)) for value in values]))
        return int(builder.EndVector())

    def _put(self, data: bytes) -> None:
        """Write bytes for which there is room."""
        head = self._builder.head = self._builder.head - len(data)
        self._builder.Bytes[head : head + len(data)] = data


def _value(record: Any, field: Field) -> Any:
    """Return the value of a field of a record."""
    # The absence of an entry means the program's name.
    if field.name == "entry" and record.entry == record.name:
        return field.default
    if field.name == "compression" and isinstance(record, Weight) and record.sha256:
        return Compression.EXTERNAL
    return getattr(record, field.name, field.default)


def _numbers(kind: str, value: Any) -> tuple[float, ...]:
    """Return the numbers of a struct, in the order of the schema, or of a number."""
    match kind:
        case "SchemaVersion":
            return schema.MAJOR, schema.MINOR
        case "Segment":
            return 0, 0
        case "Pointer":
            return value.offset, value.index, value.region
        case "Relocation":
            return (*_numbers("Pointer", value.pointer), value.param_offset)
        case "Access":
            return (*_numbers("Pointer", value.pointer), value.nbytes)
    return (value,) if kind in NUMBERS else value
