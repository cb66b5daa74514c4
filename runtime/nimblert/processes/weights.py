"""New weights for the processes of a pool, which change once all are ready to, or not at all."""

import json
from collections.abc import Sequence
from struct import Struct

import numpy as np

from nimblert.arrays.dtypes import numpy_dtype
from nimblert.calls import refitting
from nimblert.calls.refitting import Refit
from nimblert.plan import Plan
from nimblert.processes.channel import Memory, Place

PREPARED = b"\3"
"""The process has prepared the change, and waits."""
COMMIT, ABORT = b"\4", b"\5"
"""What the pool then says."""
REPLACED, KEPT = b"\6", b"\7"
"""What the process has done."""

_NAMES_NBYTES = Struct("<q")


def write(plan: Plan, refits: Sequence[Refit], memory: Memory) -> bytes:
    """Copy the arrays of checked refits to shared memory; the message that tells of them."""
    arrays = {
        tensor.name: array
        for refit in refits
        for tensor, array in zip(refit.program.inputs, refit.arrays, strict=True)
        if array is not None
    }
    names = json.dumps(list(arrays)).encode()
    listed, *views = memory.arrays(_places(plan, list(arrays), len(names)))
    listed[...] = np.frombuffer(names, np.uint8)
    for view, array in zip(views, arrays.values(), strict=True):
        view[...] = array
    return _NAMES_NBYTES.pack(len(names))


def read(plan: Plan, message: bytes, memory: Memory) -> dict[str, np.ndarray]:
    """The arrays that the message of `write` tells of, by name, as views."""
    (nbytes,) = _NAMES_NBYTES.unpack(message)
    (listed,) = memory.arrays(_places(plan, [], nbytes))
    names = json.loads(listed.tobytes())
    _, *views = memory.arrays(_places(plan, names, nbytes))
    return dict(zip(names, views, strict=True))


def _places(plan: Plan, names: Sequence[str], nbytes: int) -> list[Place]:
    """The places of the list of names, which has ``nbytes``, and of each array."""
    tensors = refitting.replaceable(plan)
    places = [Place("", np.dtype(np.uint8), (nbytes,), 0)]
    for name in names:
        tensor = tensors[name]
        places.append(Place(name, numpy_dtype(tensor.dtype), tensor.shape, places[-1].end))
    return places
