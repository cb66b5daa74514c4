"""The Open Inference Protocol, version 2, over HTTP: between the bytes of a body and numpy arrays.

Tensors stand in the JSON, or as bytes behind it (the binary tensor data extension), as Triton's clients send them.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nimblert.plan import Tensor

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The HTTP header that says how many bytes of a body are JSON."""
DTYPES = {
    "BOOL": "bool",
    **{f"{kind}{bits}": f"{kind.lower()}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}
MOST_AXES = 64
"""Of an array: as many as NumPy's have."""
_TYPES = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}
"""What values in the JSON may be, by the kind of dtype."""


class ProtocolError(ValueError):
    """A request that does not follow the protocol: what is wrong with it, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An infer call: ``arrays`` by input name, and whether the outputs that it names, or all others, are binary."""

    id: str
    arrays: dict[str, np.ndarray]
    binary: dict[str, bool]
    binary_else: bool


def read_request(body: bytes, header_length: str | None) -> Request:
    """The request in the body of an infer call. Raises ProtocolError."""
    try:
        split = _header_length(body, header_length)
        content = json.loads(body[:split])
        outputs = content.get("outputs") or ()
        return Request(
            id=str(content.get("id") or ""),
            arrays=_arrays(content["inputs"], memoryview(body)[split:]),
            binary={output["name"]: bool(_parameters(output).get("binary_data", False)) for output in outputs},
            binary_else=bool(_parameters(content).get("binary_data_output", False)),
        )
    except ProtocolError:
        raise
    except KeyError as exc:
        raise ProtocolError(f"the request has no {exc}") from exc
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise ProtocolError(f"the request is not one of the Open Inference Protocol: {exc}") from exc


def _header_length(body: bytes, given: str | None) -> int:
    """How many bytes of a body are JSON."""
    length = len(body) if given is None else int(given)
    if not 0 <= length <= len(body):
        raise ProtocolError(f"{HEADER_LENGTH}: {length}, expected 0 to {len(body)}, the length of the body")
    return length


def _parameters(tensor: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = tensor.get("parameters") or {}  # some clients send null for what they leave out
    return found


def _arrays(tensors: Iterable[Mapping[str, Any]], binary: memoryview) -> dict[str, np.ndarray]:
    """The arrays of the inputs, of which ``binary`` has those that are not in the JSON."""
    arrays: dict[str, np.ndarray] = {}
    for tensor in tensors:
        if tensor["name"] in arrays:
            raise ProtocolError(f"input {tensor['name']!r} was given twice: give it once")
        arrays[tensor["name"]], binary = _array(tensor, binary)
    if binary:
        raise ProtocolError(f"{len(binary)} bytes follow those of the inputs, expected none")
    return arrays


def _array(tensor: Mapping[str, Any], binary: memoryview) -> tuple[np.ndarray, memoryview]:
    """The array of an input, and the bytes that follow its own."""
    name, datatype, shape = tensor["name"], tensor["datatype"], tuple(tensor["shape"])
    nbytes = _parameters(tensor).get("binary_data_size")
    if nbytes is None:
        return listed_array(name, datatype, shape, tensor["data"]), binary
    dtype, count = _dtype_and_count(name, datatype, shape)
    if nbytes != count * dtype.itemsize or nbytes > len(binary):
        expected = f"{count * dtype.itemsize} bytes for {datatype} of shape {shape}"
        raise ProtocolError(f"input {name!r}: {nbytes} of {len(binary)} bytes, expected {expected}")
    own = binary[:nbytes]
    if dtype.kind == "b" and set(own.tobytes()) - {0, 1}:
        raise ProtocolError(f"input {name!r}: bytes other than 0 and 1 are no BOOL")
    return np.frombuffer(own, dtype).reshape(shape), binary[nbytes:]


def listed_array(name: str, datatype: str, shape: tuple[int, ...], values: Any) -> np.ndarray:
    """The array of an input from its values in the JSON.

    Raises ProtocolError, or what NumPy raises for values of which it makes no array: ValueError, TypeError,
    OverflowError.
    """
    dtype, count = _dtype_and_count(name, datatype, shape)
    array = np.asarray(values, dtype)
    if array.size != count:
        raise ProtocolError(f"input {name!r}: {array.size} values, its shape {shape} has {count}")
    wrong = [value for value in np.asarray(values, object).flat if type(value) not in _TYPES[dtype.kind]]
    if wrong:  # NumPy would have converted them
        raise ProtocolError(f"input {name!r}: {json.dumps(wrong[0])} is no {datatype}")
    return array.reshape(shape)


def _dtype_and_count(name: str, datatype: str, shape: tuple[int, ...]) -> tuple[np.dtype[Any], int]:
    """The dtype of an input, and how many elements it has."""
    if datatype not in DTYPES:
        raise ProtocolError(f"input {name!r}: datatype {datatype!r}, expected one of {sorted(DTYPES)}")
    if len(shape) > MOST_AXES:  # whose product may take minutes
        raise ProtocolError(f"input {name!r}: {len(shape)} sizes in its shape, expected at most {MOST_AXES}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ProtocolError(f"input {name!r}: shape {shape}, expected whole numbers from 0")
    return np.dtype(DTYPES[datatype]), math.prod(shape)


def write_response(model: str, request: Request, arrays: Mapping[str, np.ndarray]) -> tuple[bytes, dict[str, str]]:
    """The body of an answer, and the HTTP headers it needs.

    Raises ProtocolError for an unknown output, and for NaN or an infinity in one that is not to be binary.
    """
    names = list(request.binary or arrays)
    if unknown := [name for name in names if name not in arrays]:
        raise ProtocolError(f"output {unknown[0]!r}: not found, the model has {list(arrays)}")
    outputs, data = [], []
    for name in names:
        array = np.ascontiguousarray(arrays[name])
        output = {"name": name, "datatype": DATATYPES[str(array.dtype)], "shape": arrays[name].shape}
        if request.binary.get(name, request.binary_else):
            data.append(array.tobytes())
            outputs.append({**output, "parameters": {"binary_data_size": array.nbytes}})
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ProtocolError(f"output {name!r}: holds NaN or an infinity, which JSON has not: ask for binary data")
        else:
            outputs.append({**output, "data": array.ravel().tolist()})
    content = {"model_name": model, "outputs": outputs, **({"id": request.id} if request.id else {})}
    header = json.dumps(content).encode()
    if not data:
        return header, {"Content-Type": "application/json"}
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return b"".join((header, *data)), headers


def metadata(model: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> dict[str, Any]:
    """The protocol's model metadata; the first dimension, the batch, may have any size."""

    def described(tensors: Iterable[Tensor]) -> Sequence[dict[str, Any]]:
        return [
            {"name": tensor.name, "datatype": DATATYPES[tensor.dtype], "shape": [-1, *tensor.shape[1:]]}
            for tensor in tensors
        ]

    return {"name": model, "platform": "nimblert", "inputs": described(inputs), "outputs": described(outputs)}
