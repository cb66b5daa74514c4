"""Read the weights that a stripped plan does not hold from a safetensors file, and check them by their digests."""

import hashlib
import json
import struct
from dataclasses import replace
from os import PathLike, fsdecode

from nimblert.errors import InputError
from nimblert.plan import Plan, Weight
from nimblert.plan.container import read_file

DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
"""The dtypes that both safetensors files and plans have, by their names in the files."""

METADATA = "__metadata__"
"""The entry of a safetensors file's header that is no tensor."""

_LARGEST_HEADER_NBYTES = 100_000_000
"""As the safetensors library limits it."""


def names(plan: Plan) -> list[str]:
    """Return the names of weights, then state, in a file of weights: those of the plan, each made unique."""
    chosen: dict[str, None] = {}
    for index, tensor in enumerate((*plan.weights, *plan.state)):
        name = tensor.name
        while name in chosen or name in ("", METADATA):
            name = f"{name}#{index}"
        chosen[name] = None
    return list(chosen)


def filled(plan: Plan, path: str | PathLike[str] | None, *, copy: bool = False) -> Plan:
    """Return a stripped plan with its weights and state, which are slices of the mapped file at ``path``.

    A plan that holds them is returned as it is. See `container.open_image` for ``copy``. Raises PlanError where there
    is no such file; InputError for a missing or needless ``path``, a file that is no safetensors file, and a tensor
    that the file lacks or has otherwise.
    """
    if not plan.is_stripped:
        if path is None:
            return plan
        raise InputError("weights: the plan holds its weights: leave the file out")
    if path is None:
        raise InputError(
            "the plan does not hold its weights: give the file that was written with it,"
            " nimblert.load(PLAN, weights=FILE) or --weights FILE"
        )
    if not isinstance(path, str | PathLike):
        raise InputError(f"weights: got {type(path).__name__}, expected the path of a safetensors file")
    tensors = _tensors(read_file(path, "a safetensors file", copy=copy), fsdecode(path))
    found = [
        _filled(tensor, name, tensors.get(name), fsdecode(path))
        for name, tensor in zip(names(plan), (*plan.weights, *plan.state), strict=True)
    ]
    count = len(plan.weights)
    return replace(plan, weights=tuple(found[:count]), state=tuple(found[count:]))


def _filled(tensor: Weight, name: str, data: memoryview | None, path: str) -> Weight:
    if not tensor.sha256:
        return tensor
    if data is None:
        raise InputError(f"{path}: has no tensor {name!r}: these are the weights of another plan")
    if hashlib.sha256(data).digest() != tensor.sha256:
        raise InputError(f"{path}: tensor {name!r} is not that of the plan (SHA-256 differs): it is another plan's")
    return replace(tensor, data=data, sha256=b"")


def _tensors(image: memoryview, path: str) -> dict[str, memoryview]:
    """Return the bytes of each tensor in a safetensors file by name."""
    try:
        (nbytes,) = struct.unpack_from("<Q", image)
        header = json.loads(bytes(image[8 : 8 + min(nbytes, _LARGEST_HEADER_NBYTES)]))
        content = image[8 + nbytes :]
        places = {name: value["data_offsets"] for name, value in header.items() if name != METADATA}
        return {name: _part(content, *place) for name, place in places.items()}
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as exc:
        raise InputError(f"{path}: is no safetensors file, or a damaged one: {exc}") from exc


def _part(content: memoryview, start: int, end: int) -> memoryview:
    if not 0 <= start <= end <= len(content):
        raise ValueError(f"a tensor is at bytes {start} to {end} of {len(content)}")
    return content[start:end]
