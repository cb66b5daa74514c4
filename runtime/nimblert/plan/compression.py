"""Decompress segments of plan files, never beyond their declared sizes or the limit of all together."""

from nimblert.errors import PlanFormatError


class Unpacker:
    """Decompresses segments with zstandard, up to ``limit`` bytes in total.

    The package is imported with the first compressed segment: plans without one load as fast as before.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.nbytes = self.packed_nbytes = 0
        """The bytes of all segments so far, decompressed and as stored."""

    def unpack(self, packed: memoryview, nbytes: int) -> memoryview:
        """Return the ``nbytes`` bytes of a segment. Raises PlanFormatError where it holds others, or too many."""
        import zstandard

        self.nbytes += nbytes
        self.packed_nbytes += packed.nbytes
        if self.nbytes > self._limit:
            raise PlanFormatError(
                f"unpacked_nbytes: compressed segments are at least {self.nbytes} bytes, the limit is {self._limit}"
            )
        try:
            # The frame's own size decides how much is allocated and written.
            found = zstandard.frame_content_size(packed)
            if found != nbytes:
                raise PlanFormatError(f"compressed segment of {found} bytes, declared as {nbytes}")
            return memoryview(zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False))
        except zstandard.ZstdError as exc:
            raise PlanFormatError(f"compressed segment is damaged: {exc}") from exc
