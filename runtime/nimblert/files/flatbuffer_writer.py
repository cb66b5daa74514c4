# mypy: disable-error-code="no-untyped-call"
# (flatbuffers.Builder has no types)
"""Strings and vectors of a FlatBuffer; empty ones are absent fields."""

import struct
from collections.abc import Iterable, Sequence

import flatbuffers


class Writer:
    """A builder. Each method returns the offset of what it wrote, for a field of a table; 0 for nothing."""

    def __init__(self) -> None:
        self._builder = flatbuffers.Builder(1 << 16)

    def _string(self, text: str) -> int:
        return self._builder.CreateString(text) if text else 0

    def _data(self, data: bytes) -> int:
        return self._builder.CreateByteVector(data) if data else 0

    def _records(self, layout: struct.Struct, rows: Sequence[Iterable[float]]) -> int:
        """A vector of structs, or of scalars as structs of one number."""
        if not rows:
            return 0
        builder = self._builder
        builder.StartVector(layout.size, len(rows), 8)
        data = b"".join(layout.pack(*row) for row in rows)
        builder.head -= len(data)
        builder.Bytes[builder.head : builder.head + len(data)] = data
        return int(builder.EndVector())

    def _numbers(self, code: str, numbers: Iterable[float]) -> int:
        """A vector of numbers of the `struct` format ``code``."""
        return self._records(struct.Struct(f"<{code}"), [(number,) for number in numbers])

    def _tables(self, offsets: Sequence[int]) -> int:
        if not offsets:
            return 0
        self._builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return int(self._builder.EndVector())
