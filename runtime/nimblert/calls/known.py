"""Calls like earlier ones, found by the layouts of their arrays, so that these need not be checked again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nimblert.arrays import dlpack
from nimblert.calls.backend import PreparedCall
from nimblert.plan import Program, Tensor

_MOST_KEPT = 64


class Found(NamedTuple):
    """A prepared call of ``program``: ``run(*args)`` returns its outputs by name."""

    program: Program
    run: Callable[..., dict[str, Any]]
    args: tuple[Any, ...]


class _Library(NamedTuple):
    """The functions by which arrays of one type are read, one for each input, and the library's current stream."""

    readers: Sequence[Callable[[Any], dlpack.Raw]]
    stream: Callable[[], int]
    is_negated: Callable[[Any], bool] | None


class KnownCalls:
    """The prepared calls of one entry of a context, for one thread at a time.

    It remembers host arrays by dtype, shape and strides, and arrays on the GPU by address as well; all arrays of a call
    are of one type.
    """

    def __init__(self, inputs: Sequence[Tensor], device: int) -> None:
        self._names = [tensor.name for tensor in inputs]
        self._device = device
        self._host: dict[object, PreparedCall] = {}
        self._on_device: dict[tuple[dlpack.Raw, ...], PreparedCall] = {}
        self._libraries: dict[type, _Library | None] = {}

    def find(self, arrays: Mapping[str, Any]) -> Found | None:
        """Find the call of these arrays, given by input name; None where it is not known."""
        if type(arrays) is not dict or len(arrays) != len(self._names):
            return None
        try:
            given = [arrays[name] for name in self._names]
        except KeyError:
            return None
        if not given:
            return None
        if type(given[0]) is not np.ndarray:
            return self._find_on_device(given) if self._on_device else None
        call = self._host.get(_host_key(given))
        return None if call is None else Found(call.program, call.run, (given,))

    def _find_on_device(self, given: list[Any]) -> Found | None:
        found = self._read(given)
        if found is None:
            return None
        raw, stream = found
        call = self._on_device.get(raw)
        if call is None or call.run_at is None:
            return None
        return Found(call.program, call.run_at, (tuple([address for address, *_ in raw]), stream()))

    def _read(self, given: list[Any]) -> tuple[tuple[dlpack.Raw, ...], Callable[[], int]] | None:
        """Return each array's address and layout, and their library's stream; None for mixed types and other arrays."""
        kind = type(given[0])
        if kind not in self._libraries:
            self._libraries[kind] = self._library(given[0])
        library = self._libraries[kind]
        if library is None:
            return None
        found = []
        try:
            for array, read in zip(given, library.readers, strict=True):
                if type(array) is not kind or getattr(array, "requires_grad", False):
                    return None
                if library.is_negated is not None and library.is_negated(array):
                    return None
                found.append(read(array))
        except dlpack.REFUSALS:
            return None  # the full check says why
        return tuple(found), library.stream

    def _library(self, array: Any) -> _Library | None:
        exchange = dlpack.exchange(array)
        if exchange is None:
            return None
        readers = [exchange.reader() for _ in self._names]
        return _Library(readers, exchange.stream_reader(self._device), getattr(type(array), "is_neg", None))

    def add(self, arrays: Mapping[str, Any], call: PreparedCall) -> None:
        """Remember a call of numpy arrays, or of arrays on the GPU whose library can be asked in little time."""
        given = [arrays[name] for name in self._names]
        key = _host_key(given)
        if key is not None:
            _keep(self._host, key, call)
        elif call.run_at is not None:
            found = self._read(given)
            if found is not None:
                _keep(self._on_device, found[0], call)

    def clear(self) -> None:
        """Forget all calls: something has changed in the context."""
        self._host.clear()
        self._on_device.clear()


def _host_key(given: Sequence[Any]) -> object:
    key = []
    for array in given:
        if type(array) is not np.ndarray:
            return None
        key.append((array.dtype, array.shape, array.strides))
    return tuple(key)


def _keep(known: dict[Any, PreparedCall], key: object, call: PreparedCall) -> None:
    if len(known) >= _MOST_KEPT:
        known.clear()
    known[key] = call
