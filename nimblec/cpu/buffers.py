"""The buffers of a graph under construction, by the values that they hold."""

import hashlib
from collections.abc import Mapping

import numpy as np
from onnx import TensorProto

from nimblec.base.ir import Access, Buffer, BufferKind
from nimblec.cpu.constants import TensorType, type_of


class Buffers:
    """The buffers so far, ``items``, and those of values by name, ``of_value``.

    ``types`` are the types of computed values; ``constants`` and ``arrays`` have the constants, and their contents.
    """

    def __init__(
        self,
        types: Mapping[str, TensorType],
        constants: Mapping[str, TensorProto],
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        self.items: list[Buffer] = []
        self.of_value: dict[str, int] = {}
        self._types, self._constants, self._arrays = types, constants, arrays
        self._constant_of: dict[bytes, int] = {}

    def type(self, name: str) -> TensorType:
        """Return the type of a value."""
        return type_of(self._constants[name]) if name in self._constants else self._types[name]

    def of(self, name: str) -> int:
        """Return the buffer of a value; that of a constant is made when it is first used."""
        if name not in self.of_value:
            self.of_value[name] = self._add_constant(self._constants[name])
        return self.of_value[name]

    def whole(self, buffer: int) -> Access:
        """Return the access to all bytes of a buffer."""
        return Access(buffer=buffer, offset=0, nbytes=self.items[buffer].nbytes)

    def add(
        self,
        kind: BufferKind,
        name: str,
        tensor_type: TensorType,
        data: memoryview | None = None,
        storage: int = 0,
    ) -> int:
        """Return a new buffer for a tensor."""
        self.items.append(
            Buffer(
                kind=kind,
                nbytes=tensor_type.nbytes,
                name=name,
                dtype=tensor_type.dtype,
                shape=tensor_type.shape,
                data=data,
                storage=storage,
            )
        )
        return len(self.items) - 1

    def _add_constant(self, tensor: TensorProto) -> int:
        """Return the buffer with the bytes of a constant, which all equal ones share."""
        data = self._arrays[tensor.name].reshape(-1).view(np.uint8).data.toreadonly()
        digest = hashlib.sha256(data).digest()
        if digest not in self._constant_of:
            self._constant_of[digest] = self.add(BufferKind.CONSTANT, tensor.name, type_of(tensor), data)
        return self._constant_of[digest]
