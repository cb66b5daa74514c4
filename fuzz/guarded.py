"""Memory of a plan between guard pages: reading or writing past it is a segmentation fault."""

import ctypes
import mmap

import numpy as np

from nimblert.cpu import host_memory
from nimblert.plan import Weight

_libc = ctypes.CDLL(None, use_errno=True)
_NO_ACCESS = 0

LARGEST_NBYTES = 1 << 28
"""The largest region: drawing and filling more takes too long for a case."""


def install() -> None:
    """Put every region and weight of plans that are loaded from now on before a guard page."""
    host_memory.allocate = _allocate
    host_memory._in_place = _in_place  # noqa: SLF001 - replaced by guarded memory


def _allocate(nbytes: int, *, poison: bool = False) -> np.ndarray:
    """Allocate bytes that end at a guard page, so they are aligned no better than their items."""
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
