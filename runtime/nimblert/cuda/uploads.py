"""Uploads of many arrays of any size, through page-locked memory that several threads fill."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from nimblert.cuda.copiers import PART_NBYTES, Copying
from nimblert.cuda.driver import NO_TIMING, Context, Handle, call
from nimblert.cuda.memory import host_bytes
from nimblert.cuda.page_locked import page_locked

_HALF_NBYTES = 8 * PART_NBYTES


class Upload(NamedTuple):
    """Bytes for the device memory at ``target``; ``then`` enqueues what follows them on the stream.

    ``is_staged``: not read in place, but by way of page-locked memory.
    """

    target: int
    source: np.ndarray
    then: Callable[[], object] | None = None
    is_staged: bool = True

    @property
    def staged_nbytes(self) -> int:
        """The page-locked memory that it takes."""
        return self.source.nbytes if self.is_staged else 0


class Uploader:
    """Page-locked memory of two halves: the threads fill one while the other is enqueued and uploaded.

    The driver would copy pageable memory through memory of its own, too, but with one thread that waits for the stream.
    """

    def __init__(self, context: Context) -> None:
        self._address = int(context.acquire(call("cuMemHostAlloc", 2 * _HALF_NBYTES, 0), "cuMemFreeHost"))
        self._bytes = host_bytes(self._address, 2 * _HALF_NBYTES)
        self._read = [context.acquire(call("cuEventCreate", NO_TIMING), "cuEventDestroy") for _ in range(2)]

    def enqueue(self, uploads: Iterable[Upload], stream: Handle) -> None:
        """Enqueue ``uploads`` in their order; their sources are read by the time ``stream`` has done them."""
        before: _Half | None = None
        with ExitStack() as begun:
            for number, parts in enumerate(_halves(uploads)):
                half = self._filling(parts, number % 2)
                begun.callback(half.copying.close)
                if before is not None:
                    before.enqueue(stream)
                before = half
            if before is not None:
                before.enqueue(stream)

    def _filling(self, parts: Sequence[Upload], number: int) -> "_Half":
        """A half that threads begin to fill once what it held before is uploaded."""
        call("cuEventSynchronize", self._read[number])
        begin = number * _HALF_NBYTES
        starts = list(accumulate((part.staged_nbytes for part in parts), initial=begin))
        copying = Copying(
            [
                (self._bytes[start : start + part.source.nbytes], part.source)
                for part, start in zip(parts, starts, strict=False)
                if part.is_staged
            ]
        )
        addresses = [
            self._address + start if part.is_staged else part.source.ctypes.data
            for part, start in zip(parts, starts, strict=False)
        ]
        return _Half(parts, addresses, copying, self._read[number])


class _Half(NamedTuple):
    """Uploads of one half; ``addresses`` are those of their bytes, and ``read`` is the event of their end."""

    parts: Sequence[Upload]
    addresses: Sequence[int]
    copying: Copying
    read: Handle

    def enqueue(self, stream: Handle) -> None:
        """Enqueue each upload once its bytes are there."""
        copied = iter(self.copying)
        for part, address in zip(self.parts, self.addresses, strict=True):
            if part.is_staged:
                next(copied)
            call("cuMemcpyHtoDAsync", part.target, address, part.source.nbytes, stream)
            if part.then is not None:
                part.then()
        call("cuEventRecord", self.read, stream)


def _halves(uploads: Iterable[Upload]) -> Iterator[list[Upload]]:
    """The parts of the uploads, as many at a time as fit into one half."""
    parts: list[Upload] = []
    room = _HALF_NBYTES
    for part in chain.from_iterable(map(_parts, uploads)):
        if part.staged_nbytes > room:
            yield parts
            parts, room = [], _HALF_NBYTES
        parts.append(part)
        room -= part.staged_nbytes
    if parts:
        yield parts


def _parts(upload: Upload) -> Iterator[Upload]:
    """An upload in parts of `PART_NBYTES`; in one where CUDA reads its bytes in place."""
    target, source, then, _ = upload
    if source.nbytes <= PART_NBYTES // 16:  # copied sooner than it is known where they are
        yield upload
    elif page_locked(source) is not None:
        yield upload._replace(is_staged=False)
    else:
        starts = range(0, source.nbytes, PART_NBYTES)
        for start in starts:
            part = source[start : start + PART_NBYTES]
            yield Upload(target + start, part, then if start == starts[-1] else None)
