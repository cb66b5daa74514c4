"""Strict reading of protobuf messages, and writing in the same canonical form.

Parsers differ in how they treat unknown fields, repeated occurrences of a field, groups, and overlong varints. All of
these are refused here, and fields must be in ascending order. So an accepted message is byte for byte the only way to
write it (deterministic serialization), and every parser reads the same. See
https://protobuf.dev/programming-guides/encoding/.
"""

import dataclasses
from collections.abc import Mapping
from struct import Struct
from typing import Any, NamedTuple

from nimblert.errors import PlanFormatError

MAX_DEPTH = 24
"""The deepest nesting of messages: six for a model's tensors, five more for each level of control flow."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_F32, _F64 = Struct("<f"), Struct("<d")
_WIRE_TYPES = {"int32": _VARINT, "int64": _VARINT, "uint64": _VARINT, "float": _FIXED32, "double": _FIXED64}


class Field(NamedTuple):
    """One field of a message: the name of its attribute in the record, and its encoding.

    ``kind`` is "int32" (enums too), "int64", "uint64", "float", "double", "text", "bytes", or the record class of a
    message. A ``repeated`` field becomes a tuple; ``packed``: encoded as one block.
    """

    name: str
    kind: Any
    repeated: bool = False
    packed: bool = False


Fields = Mapping[type, Mapping[int, Field]]
"""For each record class its fields by tag, in ascending order: number and wire type as encoded before a value."""


def one(number: int, kind: Any) -> Any:
    """Return the field of a record for a value that a message has at most once; None where it is absent."""
    return dataclasses.field(default=None, metadata={"number": number, "kind": kind})


def many(number: int, kind: Any, *, packed: bool = False) -> Any:
    """Return the field of a record for a value that a message may repeat."""
    return dataclasses.field(default=(), metadata={"number": number, "kind": kind, "repeated": True, "packed": packed})


def fields_by_tag(*records: type) -> Fields:
    """Return the fields of each record class by tag. A kind may be the name of a record class that is defined later."""
    classes = {record.__name__: record for record in records}
    found: dict[type, dict[int, Field]] = {record: {} for record in records}
    for record in records:
        for each in dataclasses.fields(record):
            given = dict(each.metadata)
            number, kind = given.pop("number"), given.pop("kind")
            made = Field(name=each.name, kind=classes.get(kind, kind), **given)
            wire_type = _BYTES if made.packed else _WIRE_TYPES.get(made.kind, _BYTES)
            found[record][number << 3 | wire_type] = made
    return {record: dict(sorted(fields.items())) for record, fields in found.items()}


class Budget:
    """The number of fields that may still be read: each becomes an object, so a small file could need much memory."""

    __slots__ = ("left",)

    def __init__(self, fields: int) -> None:
        self.left = fields


def read(data: bytes, record: type, fields: Fields, budget: Budget) -> Any:
    """Read ``data`` as one message of the class ``record``.

    Its fields and those of nested messages count against ``budget``. Absent fields have the defaults of the record.
    Raises PlanFormatError where the bytes are not a message in canonical form, or have fields not in ``fields``.
    """
    return _Reader(data, fields, budget).message(record, 0, len(data), 0)


def write(record: Any, fields: Fields) -> bytes:
    """Return the canonical form of a message: `read(write(x))` is x, `write(read(data))` is data."""
    written = bytearray()
    for tag, field in fields[type(record)].items():
        value = getattr(record, field.name)
        if field.packed:
            if value:
                _append_bytes(written, tag, b"".join(_number_bytes(field.kind, number) for number in value))
        elif field.repeated:
            for item in value:
                _append(written, tag, field, item, fields)
        elif value is not None:
            _append(written, tag, field, value, fields)
    return bytes(written)


def _append(written: bytearray, tag: int, field: Field, value: Any, fields: Fields) -> None:
    if tag & 7 != _BYTES:
        written += _varint_bytes(tag) + _number_bytes(field.kind, value)
    elif field.kind == "text":
        _append_bytes(written, tag, value.encode())
    else:
        _append_bytes(written, tag, value if field.kind == "bytes" else write(value, fields))


def _append_bytes(written: bytearray, tag: int, data: bytes) -> None:
    written += _varint_bytes(tag) + _varint_bytes(len(data)) + data


def _number_bytes(kind: str, value: Any) -> bytes:
    if kind in ("float", "double"):
        return (_F32 if kind == "float" else _F64).pack(value)
    return _varint_bytes(value & 0xFFFF_FFFF_FFFF_FFFF)


def _varint_bytes(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


class _Reader:
    """The bytes, the known fields, and the budget."""

    def __init__(self, data: bytes, fields: Fields, budget: Budget) -> None:
        self._data = data
        self._fields = fields
        self._budget = budget

    def message(self, record: type, at: int, end: int, depth: int) -> Any:
        """Read the bytes from ``at`` to ``end`` as a record."""
        if depth > MAX_DEPTH:
            raise PlanFormatError(f"protobuf: messages within messages at byte {at}, deeper than {MAX_DEPTH}")
        data, known = self._data, self._fields[record]
        values: dict[str, Any] = {}
        lists: dict[str, list[Any]] = {}
        before = 0
        while at < end:
            tag = data[at]
            # Nearly all tags have one byte.
            if tag < 0x80:
                at += 1
            else:
                tag, at = self._varint(at, end)
            field = known.get(tag)
            if field is None:
                raise PlanFormatError(
                    f"protobuf: field {tag >> 3} of wire type {tag & 7} at byte {at} is none that"
                    f" {record.__name__} may have"
                )
            if tag <= before and (tag < before or field.packed or not field.repeated):
                raise PlanFormatError(f"protobuf: {record.__name__}.{field.name} at byte {at} is out of order")
            before = tag
            value, at = self._value(field, tag & 7, at, end, depth)
            self._claim(at)
            if field.repeated and not field.packed:
                lists.setdefault(field.name, []).append(value)
            else:
                values[field.name] = value
        for name, items in lists.items():
            values[name] = tuple(items)
        return record(**values)

    def _claim(self, at: int) -> None:
        self._budget.left -= 1
        if self._budget.left < 0:
            raise PlanFormatError(f"protobuf: more fields by byte {at} than the limit for all models of a plan")

    def _value(self, field: Field, wire_type: int, at: int, end: int, depth: int) -> tuple[Any, int]:
        """Return the value of a field and where it ends."""
        kind = field.kind
        if wire_type != _BYTES:
            return self._number(kind, at, end)
        nbytes, at = self._varint(at, end)
        stop = at + nbytes
        if stop > end:
            raise PlanFormatError(f"protobuf: {field.name} at byte {at} ends at {stop}, beyond its message ({end})")
        if field.packed:
            return self._packed(field, at, stop), stop
        if kind == "text":
            return self._text(field, at, stop), stop
        if kind == "bytes":
            return self._data[at:stop], stop
        return self.message(kind, at, stop, depth + 1), stop

    def _text(self, field: Field, at: int, stop: int) -> str:
        try:
            return self._data[at:stop].decode()
        except UnicodeDecodeError as exc:
            raise PlanFormatError(f"protobuf: {field.name} at byte {at} is not UTF-8") from exc

    def _packed(self, field: Field, at: int, stop: int) -> tuple[Any, ...]:
        if at == stop:
            raise PlanFormatError(f"protobuf: {field.name} at byte {at} is an empty block")
        values = []
        while at < stop:
            value, at = self._number(field.kind, at, stop)
            self._claim(at)
            values.append(value)
        return tuple(values)

    def _number(self, kind: str, at: int, end: int) -> tuple[Any, int]:
        if kind in ("float", "double"):
            layout = _F32 if kind == "float" else _F64
            if at + layout.size > end:
                raise PlanFormatError(f"protobuf: a {kind} at byte {at} is cut short")
            return layout.unpack_from(self._data, at)[0], at + layout.size
        value, at = self._varint(at, end)
        if kind != "uint64" and value >> 63:
            value -= 1 << 64
        if kind == "int32" and not -(1 << 31) <= value < 1 << 31:
            raise PlanFormatError(f"protobuf: {value} before byte {at} does not fit 32 bits")
        return value, at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """Return an unsigned number of at most 64 bits in as few bytes as it needs, and where it ends."""
        if at < end and self._data[at] < 0x80:
            return self._data[at], at + 1
        value = shift = 0
        while at < end:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if (byte == 0 and shift) or value >> 64:
                    break
                return value, at
            shift += 7
            if shift > 63:
                break
        raise PlanFormatError(f"protobuf: the number before byte {at} is cut short, or longer than it need be")
