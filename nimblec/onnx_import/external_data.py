"""The files in which an ONNX model stores its tensors."""

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto, TensorProto, helper

from nimblec.base.errors import CompileError, UnsupportedModelError

_PACKED_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
"""Bits of an element by type, where a byte holds several."""


def data_files(path: Path) -> tuple[Path, ...]:
    """Return the data files that the ONNX file ``path`` names, relative to its folder, in order.

    Raises CompileError if it is not an ONNX file, UnsupportedModelError if one of them is not below its
    folder.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as exc:
        raise CompileError(f"{path}: not an ONNX file") from exc
    entries = (entry for tensor in external_tensors(model) for entry in tensor.external_data)
    names = {entry.value for entry in entries if entry.key == "location"}
    for name in names:
        if not is_below(name):
            raise UnsupportedModelError(f"{path}: names the data file {name!r}, expected one below the model's folder")
    return tuple(map(Path, sorted(names)))


def is_below(name: object) -> bool:
    """Return whether a file name is below the model's folder; protobuf gives bytes for text that is not UTF-8."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    relative = PurePosixPath(name)
    return not relative.is_absolute() and ".." not in relative.parts


def external_tensors(message: Message) -> Iterator[TensorProto]:
    """Yield each tensor that another file stores: in subgraphs, attributes and sparse tensors, too."""
    if isinstance(message, TensorProto):
        if message.data_location == TensorProto.EXTERNAL:
            yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if isinstance(value, Message) else value:
                yield from external_tensors(part)


def check_external_data(model: ModelProto, path: Path) -> None:
    """Raise CompileError unless every data file of the model ``path`` is below its folder and large enough."""
    for tensor in external_tensors(model):
        entry = {item.key: item.value for item in tensor.external_data}
        location = entry.get("location", "")
        if not is_below(location):
            raise CompileError(
                f"{path}: initializer {tensor.name!r} names the data file {location!r}, expected one below the "
                f"model's folder"
            )
        data = path.parent / location
        if not Path(os.path.realpath(data)).is_relative_to(os.path.realpath(path.parent)):
            raise CompileError(
                f"{data}: is a link out of the model's folder; initializer {tensor.name!r} is stored in it: copy the "
                "file there (cp -L)"
            )
        if not data.is_file():
            raise CompileError(f"{data}: missing; initializer {tensor.name!r} of {path} is stored in it")
        try:
            offset = int(entry.get("offset", "0"))
            length = int(entry["length"]) if "length" in entry else 0
        except ValueError as exc:
            raise CompileError(f"{path}: initializer {tensor.name!r} has an offset that is not a number") from exc
        size = data.stat().st_size
        if offset < 0 or length < 0 or offset + length > size:
            raise CompileError(
                f"{data}: has {size} bytes, initializer {tensor.name!r} of {path} needs {offset + length}; the file "
                f"was cut short or belongs to another model"
            )


def read_external_data(model: ModelProto, folder: Path) -> None:
    """Read the data files of a model, which are in ``folder``, into it."""
    for tensor in external_tensors(model):
        read_tensor(tensor, folder)


def read_tensor(tensor: TensorProto, folder: Path) -> None:
    """Read the data of a tensor, which are in a file in ``folder``, into it."""
    tensor.raw_data = read_bytes(tensor, folder)
    tensor.data_location = TensorProto.DEFAULT
    tensor.ClearField("external_data")


def read_bytes(tensor: TensorProto, folder: Path) -> bytes:
    """Return the bytes of a tensor in a file in ``folder``, once `check_external_data` accepted the model.

    Where the model gives no length, or 0 as ONNX Runtime allows, the shape tells it, up to the end of the file. Unlike
    onnx, this takes links: stores that keep equal files once make these.
    """
    entry = {item.key: item.value for item in tensor.external_data}
    path, offset = folder / entry["location"], int(entry.get("offset", "0"))
    left = path.stat().st_size - offset
    with path.open("rb") as file:
        file.seek(offset)
        content: bytes = file.read(int(entry.get("length", "0")) or min(_nbytes(tensor, left), left))
    return content


def _nbytes(tensor: TensorProto, unknown: int) -> int:
    """Return the size of a tensor's data; that which is ``unknown`` for a type that onnx does not know."""
    if tensor.data_type not in helper.get_all_tensor_dtypes():
        return unknown
    packed = _PACKED_BITS.get(TensorProto.DataType.Name(tensor.data_type))
    bits = packed or 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return int(-(-prod(tensor.dims) * bits // 8))
