"""Where the arrays of a call lie in shared memory, and the message that tells the other process of the call."""

from collections.abc import Sequence
from struct import Struct, unpack_from

import numpy as np

from nimblert.arrays.dtypes import numpy_dtype
from nimblert.calls.entries import Entries, Signature
from nimblert.calls.remembering import remembered
from nimblert.dimensions import Shapes
from nimblert.errors import InputError
from nimblert.plan import Tensor
from nimblert.processes.channel import LONGEST_NBYTES, Memory, Place

_MOST_VIEWS = 64
"""The most calls whose views of a slot's memory are remembered."""

_NUMBER, _SIZE = Struct("<H"), Struct("<q")


class Layout:
    """Both processes have the plan, so that the entry's number and the shapes of the inputs tell everything."""

    __slots__ = ("entry", "inputs", "inputs_nbytes", "message", "output_tensors", "outputs", "outputs_nbytes", "places")

    def __init__(self, number: int, signature: Signature, shapes: Shapes) -> None:
        """Raises InputError for ``shapes`` that no program of the entry serves."""
        self.entry = signature.name
        self.output_tensors = signature.outputs(shapes)
        self.inputs = _placed(signature.programs[0].inputs, shapes, 0)
        end = self.inputs[-1].end if self.inputs else 0
        self.outputs = _placed(self.output_tensors, [tensor.shape for tensor in self.output_tensors], end)
        self.places = [*self.inputs, *self.outputs]
        self.inputs_nbytes = end
        self.outputs_nbytes = self.outputs[-1].end - end if self.outputs else 0
        sizes = [size for shape in shapes for size in shape]
        self.message = _NUMBER.pack(number) + b"".join(map(_SIZE.pack, sizes))


class Layouts:
    """The layouts of the calls of a plan."""

    def __init__(self, signatures: Entries) -> None:
        """Raises InputError for an entry whose inputs have more axes than a message can tell the sizes of."""
        most = (LONGEST_NBYTES - _NUMBER.size) // _SIZE.size
        for name in signatures.names:
            axes = sum(len(tensor.shape) for tensor in signatures[name].programs[0].inputs)
            if axes > most:
                raise InputError(
                    f"entry {name!r}: its inputs have {axes:,} axes, pools of processes take {most:,}: load it without "
                    "processes=True"
                )
        self._signatures = [signatures[name] for name in signatures.names]
        self._numbers = {name: number for number, name in enumerate(signatures.names)}
        self._known: dict[tuple[str, Shapes], Layout] = {}
        self._read: dict[bytes, Layout] = {}

    def of(self, signature: Signature, shapes: Shapes) -> Layout:
        """The layout of a call of an entry. Raises InputError for shapes that no program of it serves."""
        key = signature.name, shapes
        found = self._known.get(key)
        return found or remembered(self._known, key, Layout(self._numbers[signature.name], signature, shapes))

    def read(self, message: bytes) -> Layout:
        """The layout whose message this is."""
        found = self._read.get(message)
        return found or remembered(self._read, message, self._unpacked(message))

    def _unpacked(self, message: bytes) -> Layout:
        (number,) = _NUMBER.unpack_from(message)
        signature = self._signatures[number]
        position, shapes = _NUMBER.size, []
        for tensor in signature.programs[0].inputs:
            shapes.append(unpack_from(f"<{len(tensor.shape)}q", message, position))
            position += _SIZE.size * len(tensor.shape)
        return self.of(signature, tuple(shapes))


class Views:
    """The arrays of calls in the memory of a slot: its inputs, and its outputs."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._known: dict[Layout, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def of(self, layout: Layout) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Those of a call. Raises InputError where the system has too little memory."""
        found = self._known.get(layout)
        if found is None:
            if len(self._known) >= _MOST_VIEWS or not self._memory.holds(layout.places):
                self._known.clear()  # else they would keep another map of the memory
            arrays, count = self._memory.arrays(layout.places), len(layout.inputs)
            found = self._known[layout] = arrays[:count], arrays[count:]
        return found


def _placed(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], after: int) -> list[Place]:
    """Places for arrays of these dtypes and shapes, one behind the other."""
    places = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        places.append(Place(tensor.name, numpy_dtype(tensor.dtype), shape, after))
        after = places[-1].end
    return places
