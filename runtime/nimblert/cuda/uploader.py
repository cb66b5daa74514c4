"""Uploads from ordinary host memory, through page-locked memory that several threads fill."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nimblert.cuda.driver import NO_TIMING, Context, Handle, call
from nimblert.cuda.memory import DEFAULT_STREAM, host_bytes
from nimblert.plan import Weight
from nimblert.stages import stage

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_SLOT_NBYTES = 4 << 20
_SLOTS = 4
_THREADS = 4


class Upload(NamedTuple):
    """Bytes for the device memory at ``target``; ``then`` enqueues what follows them on the stream."""

    target: int
    source: np.ndarray
    then: Callable[[], object] | None = None


class Uploader:
    """Copies host bytes to the device in parts: threads fill some slots while the GPU reads others.

    The driver copies pageable memory, too, but with one thread, which waits for the stream. Threads and page-locked
    memory end with ``context``.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []

    def enqueue(self, uploads: Iterable[Upload], stream: Handle) -> None:
        """Enqueue ``uploads`` in order; when this returns, their sources may be changed."""
        filling: deque[tuple[Future[None], _Slot, list[Upload]]] = deque()
        with self._lock:  # contexts in several threads share it
            try:
                for number, parts in enumerate(_slotfuls(uploads)):
                    if len(filling) == _SLOTS:
                        _enqueue(*filling[0], stream)
                        filling.popleft()
                    slot = self._slot(number % _SLOTS)
                    call("cuEventSynchronize", slot.read)
                    filling.append((self._threads.submit(_fill, slot, parts), slot, parts))
                while filling:
                    _enqueue(*filling[0], stream)
                    filling.popleft()
            finally:
                # After a failed upload the next one takes the same slots, and callers may change the sources.
                for copy, _, _ in filling:
                    copy.exception()

    def _slot(self, index: int) -> "_Slot":
        """Return a slot, made on first use: page-locking takes longer than a small upload."""
        if index == len(self._slots):
            address = int(self._context.acquire(call("cuMemHostAlloc", _SLOT_NBYTES, 0), "cuMemFreeHost"))
            read = self._context.acquire(call("cuEventCreate", NO_TIMING), "cuEventDestroy")
            self._slots.append(_Slot(host_bytes(address, _SLOT_NBYTES), address, read))
        return self._slots[index]

    @cached_property
    def _threads(self) -> "ThreadPoolExecutor":
        from concurrent.futures import ThreadPoolExecutor  # not imported where inputs are small

        threads = ThreadPoolExecutor(_THREADS, "nimblert-upload")
        self._context.callback(threads.shutdown)
        return threads


@stage("upload")
def upload_region(uploader: Uploader, base: int, contents: Iterable[Weight]) -> None:
    """Copy tensors to their places in the region at ``base``, and wait."""
    sources = ((weight.offset, np.frombuffer(weight.data, np.uint8)) for weight in contents if weight.data.nbytes)
    uploader.enqueue((Upload(base + offset, source) for offset, source in sources), DEFAULT_STREAM)
    call("cuStreamSynchronize", DEFAULT_STREAM)


class _Slot(NamedTuple):
    """A part of the page-locked memory, and the event of the last upload from it."""

    memory: np.ndarray
    address: int
    read: Handle


def _slotfuls(uploads: Iterable[Upload]) -> Iterator[list[Upload]]:
    """Yield lists of parts, each of as many as a slot holds."""
    parts: list[Upload] = []
    nbytes = 0
    for upload in uploads:
        for start in range(0, upload.source.nbytes, _SLOT_NBYTES):
            source = upload.source[start : start + _SLOT_NBYTES]
            is_last = start + _SLOT_NBYTES >= upload.source.nbytes
            if nbytes + source.nbytes > _SLOT_NBYTES:
                yield parts
                parts, nbytes = [], 0
            parts.append(Upload(upload.target + start, source, upload.then if is_last else None))
            nbytes += source.nbytes
    if parts:
        yield parts


def _fill(slot: _Slot, parts: Iterable[Upload]) -> None:
    """Copy parts into a slot, one after the other."""
    start = 0
    for part in parts:
        end = start + part.source.nbytes
        slot.memory[start:end] = part.source
        start = end


def _enqueue(filled: "Future[None]", slot: _Slot, parts: Iterable[Upload], stream: Handle) -> None:
    """Enqueue parts once they are in their slot."""
    filled.result()
    address = slot.address
    for part in parts:
        call("cuMemcpyHtoDAsync", part.target, address, part.source.nbytes, stream)
        address += part.source.nbytes
        if part.then is not None:
            part.then()
    call("cuEventRecord", slot.read, stream)
