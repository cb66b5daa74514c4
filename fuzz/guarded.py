"""Memory of a plan between pages that nobody may touch: what reads or writes past it dies at once."""

import ctypes
import mmap

import numpy as np

from nimblert.cpu import host_memory
from nimblert.plan import Weight

_libc = ctypes.CDLL(None, use_errno=True)
_NO_ACCESS = 0

LARGEST_NBYTES = 1 << 28
"""Of a region: to draw and fill more takes longer than a case may."""


def install() -> None:
    """Let every region and every weight of plans loaded from now on end at such a page."""
    host_memory.allocate = _allocate
    host_memory._in_place = _in_place  # noqa: SLF001 - what guards memory replaces it


def _allocate(nbytes: int, *, poison: bool = False) -> np.ndarray:
    """Bytes that end where a forbidden page begins; kernels see no more alignment than their items have."""
    page = mmap.PAGESIZE
    room = -(-max(nbytes, 1) // page) * page
    if room > LARGEST_NBYTES:
        raise MemoryError(nbytes)
    memory = mmap.mmap(-1, room + 2 * page)
    array = np.frombuffer(memory, np.uint8)
    for place in (0, room + page):
        if _libc.mprotect(ctypes.c_void_p(array.ctypes.data + place), ctypes.c_size_t(page), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    region = array[page + room - nbytes : page + room]
    region[:] = 0xFF if poison else 0
    return region


def _in_place(weight: Weight) -> np.ndarray:
    data = np.frombuffer(weight.data, np.uint8)
    copy = _allocate(data.nbytes)
    copy[:] = data
    copy.flags.writeable = False
    return copy
