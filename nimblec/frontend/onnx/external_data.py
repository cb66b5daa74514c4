"""The files in which an ONNX model stores its tensors."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto, TensorProto

from nimblec.errors import CompileError, UnsupportedModelError


def data_files(path: Path) -> tuple[Path, ...]:
    """The data files that the ONNX file ``path`` names, relative to its folder, in order.

    Raises CompileError if it is not an ONNX file, UnsupportedModelError if one of them is not below its
    folder.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as exc:
        raise CompileError(f"{path}: not an ONNX file") from exc
    names = {entry.value for tensor in _external(model) for entry in tensor.external_data if entry.key == "location"}
    for name in names:
        if not is_below(name):
            raise UnsupportedModelError(f"{path}: names the data file {name!r}, expected one below the model's folder")
    return tuple(map(Path, sorted(names)))


def is_below(name: object) -> bool:
    """Whether a file of this name is below the model's folder; protobuf gives bytes for text that is not UTF-8."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    relative = PurePosixPath(name)
    return not relative.is_absolute() and ".." not in relative.parts


def _external(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor stored in another file, wherever in the model it stands: parts of sparse ones too."""
    left: list[Message] = [model]
    while left:
        message = left.pop()
        if isinstance(message, TensorProto):
            if message.data_location == TensorProto.EXTERNAL:
                yield message
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                left.extend([value] if isinstance(value, Message) else value)
