"""Arrays in page-locked memory, which the GPU can read where they are."""

from weakref import ref

import numpy as np

from nimblert.cuda import driver
from nimblert.cuda.pools import Lent

_ORDINARY = frozenset({type(None), bytes, bytearray})
"""The owners of memory that numpy and Python have allocated."""

_MOST_REMEMBERED = 64


def page_locked(array: np.ndarray) -> int | None:
    """The address by which the GPU reads a dense array in place; None for ordinary memory."""
    return _known(_address(array), array.nbytes)


class PageLockedArrays:
    """As `page_locked`, for arrays that are given again and again.

    The driver takes 8 us to answer, and 20 while a launch waits (an H100's host). It is asked neither about the memory
    of our pools, nor about that of numpy and Python, which is taken for pageable, nor again about an array or address
    found to be pageable the last time: copying an array is never wrong.
    """

    def __init__(self) -> None:
        self._ordinary: set[int] = set()
        self._last: ref[np.ndarray] | None = None

    def address(self, array: np.ndarray) -> int | None:
        """The address of a dense array in page-locked memory; None where it is to be copied."""
        if self._last is not None and self._last() is array:
            return None
        owner: object = array.base
        while type(owner) is np.ndarray:
            owner = owner.base
        if type(owner) in _ORDINARY:
            return None
        if type(owner) is Lent and owner.nbytes == array.nbytes:  # all of a block
            return owner.address
        address = _address(array)
        if type(owner) is Lent and owner.holds(address, array.nbytes):
            return address
        found = None if address in self._ordinary else _known(address, array.nbytes)
        if found is None:
            if len(self._ordinary) >= _MOST_REMEMBERED:
                self._ordinary.clear()
            self._ordinary.add(address)
            self._last = ref(array)
        return found


def _address(array: np.ndarray) -> int:
    """Of the first byte."""
    return int(array.__array_interface__["data"][0])


def _known(first: int, nbytes: int) -> int | None:
    """The address by which the GPU knows so many bytes of the host from ``first`` on; None if it does not."""
    address, span = _on_device(first), nbytes - 1
    return address if address and _on_device(first + span) == address + span else None


def _on_device(address: int) -> int | None:
    attribute = driver.bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    status, *found = driver.bindings().cuPointerGetAttribute(attribute, address)
    return int(found[0]) if status == 0 else None
