"""Write an ONNX model in memory to a file."""

from pathlib import Path

from google.protobuf.message import DecodeError, EncodeError
from onnx import ModelProto

from nimblec.base.errors import CompileError
from nimblec.onnx_import.external_data import external_tensors


def write(model: ModelProto | bytes | bytearray | memoryview, folder: Path) -> Path:
    """Write a ModelProto, or the bytes of one, to a file in ``folder``: its path.

    Raises CompileError for bytes that are not an ONNX model, and for a model with data in other files.
    """
    try:
        proto = model if isinstance(model, ModelProto) else ModelProto.FromString(bytes(model))
        image = proto.SerializeToString()
    except DecodeError as exc:
        raise CompileError("the bytes given are not an ONNX model") from exc
    except (EncodeError, ValueError) as exc:  # more than protobuf's 2 GiB
        raise CompileError(
            f"the onnx.ModelProto cannot be written ({exc}): save it with external data and give the file's path"
        ) from exc
    given = {descriptor.name for descriptor, _ in proto.ListFields()}
    for field in ("ir_version", "opset_import", "graph"):
        if field not in given:
            raise CompileError(f"the model given has no {field}: expected an ONNX model")
    for tensor in external_tensors(proto):
        raise CompileError(
            f"initializer {tensor.name!r} of the ONNX model is stored in a file beside it: give the model's path"
        )
    path = folder / "model.onnx"
    path.write_bytes(image)
    return path
