"""Read FlatBuffers whose bytes may be hostile.

Every offset, string and vector is bounded before it is read, and all together may not exceed the buffer: in a valid one
no two share bytes, so a small file cannot become a large plan. The encoding is described in "FlatBuffers internals".
"""

from struct import Struct

from nimblert.errors import PlanFormatError

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
