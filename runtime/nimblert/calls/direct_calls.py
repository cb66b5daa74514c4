"""The direct calls of a context: where an entry has several programs, calls of each size have one of their own."""

from collections.abc import Hashable, Mapping
from typing import Any

from nimblert.calls.entries import Signature
from nimblert.calls.remembering import remembered
from nimblert.calls.turn import DirectCall


class DirectCalls(dict[str, DirectCall]):
    """Direct calls by the name of the entry."""

    def add(self, signature: Signature, arrays: Mapping[str, Any], direct: DirectCall) -> None:
        """Serve calls of an entry by ``direct``; if it has several programs, those with ``arrays`` of these shapes."""
        if len(signature.programs) == 1:
            self[signature.name] = direct
            return
        known = self.get(signature.name)
        if not isinstance(known, _BySize):
            known = self[signature.name] = _BySize()
        known.add(arrays, direct)


class _BySize:
    """Direct calls by the shape of the first array."""

    def __init__(self) -> None:
        self._known: dict[Hashable, DirectCall] = {}

    def add(self, arrays: Mapping[str, Any], direct: DirectCall) -> None:
        remembered(self._known, _first_shape(arrays), direct)

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, Any] | None:
        direct = self._known.get(_first_shape(arrays))
        return None if direct is None else direct(arrays)


def _first_shape(arrays: Mapping[str, Any]) -> Hashable:
    """None where a call cannot be direct, or the array does not tell its shape."""
    if type(arrays) is not dict or not arrays:
        return None
    shape: Hashable = getattr(next(iter(arrays.values())), "shape", None)
    try:
        hash(shape)
    except TypeError:  # PyTorch's symbolic sizes
        return None
    return shape
