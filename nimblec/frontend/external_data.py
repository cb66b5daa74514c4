"""Which files an ONNX file stores its tensors in."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from google.protobuf.message import Message
from onnx import ModelProto, TensorProto

from nimblec.errors import UnsupportedModelError
from nimblec.frontend import onnx_file


def data_files(path: Path) -> tuple[Path, ...]:
    """The data files that the ONNX file ``path`` names, relative to its folder, in order.

    Raises what `onnx_file.load` raises, and UnsupportedModelError where one is not below that folder.
    """
    model = onnx_file.load(path, external_data=False)
    names = {entry.value for tensor in _external(model) for entry in tensor.external_data if entry.key == "location"}
    for name in names:
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise UnsupportedModelError(f"{path}: names the data file {name!r}, expected one below the model's folder")
    return tuple(map(Path, sorted(names)))


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
