"""Inputs that nimblec and nimblert refuse, each with its message."""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from plan_bytes import Lines

from nimblec.cpu import capture
from nimblert.check.verify import read_plan
from nimblert.cuda import driver
from nimblert.errors import NimbleError
from nimblert.loading import load
from nimblert.plan import Device

SAMPLES = Path(__file__).parent.parent / "samples"
MODEL = SAMPLES / "digits.onnx"

RANGE = """<ir_version: 9, opset_import: ["": 18]> model (int64 n) => (int64[k] y) {
    start = Constant <value_int = 0> ()
    step = Constant <value_int = 1> ()
    [node_0] y = Range (start, n, step)
}"""


def refused(path: Path, folder: Path) -> Lines:
    """Refused inputs, each with its message."""
    yield from _refusal("an input of unknown size", lambda: capture.read(_model(folder, "Relu", ("batch", 4))))
    counting = folder / "Range.onnx"
    counting.write_bytes(onnx.parser.parse_model(RANGE).SerializeToString())
    yield from _refusal("an output of any size", lambda: capture.capture(counting))
    yield from _refusal("an unknown operator", lambda: capture.read(_model(folder, "Squareplus", (4,))))
    damaged = folder / "damaged.plan"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    damaged.write_bytes(content)
    yield from _refusal("one bit changed", lambda: read_plan(damaged))
    damaged.write_bytes(path.read_bytes()[:-100])
    yield from _refusal("100 bytes cut off", lambda: read_plan(damaged))
    yield from _refusal("an ONNX file for a plan", lambda: read_plan(MODEL))
    with load(path) as executable:
        image = np.load(SAMPLES / "digit_7.npy")
        yield from _refusal("a wrong dtype", lambda: executable(image.astype(np.float64)))
        yield from _refusal("a wrong shape", lambda: executable(image[0]))
    here = Device(name="this GPU", compute_capability=(8, 0), driver_version=12080)
    there = Device(name="NVIDIA H200", compute_capability=(9, 0), driver_version=13000)
    yield from _refusal("another GPU generation", lambda: driver.check_device(there, here))


def _refusal(what: str, call: Callable[[], object]) -> Lines:
    try:
        call()
    except NimbleError as exc:
        sentence = str(exc).replace(f"{MODEL.parent}/", "")
        sentence = re.sub(rf"{re.escape(tempfile.gettempdir())}\S*/", "", sentence)
        yield f"{what} ({type(exc).__name__}):"
        yield f"    {sentence}"
        return
    raise AssertionError(what)


def _model(folder: Path, operator: str, shape: Sequence[int | str]) -> Path:
    """A model of one node, x to y."""
    make = onnx.helper
    graph = make.make_graph(
        [make.make_node(operator, ["x"], ["y"], name="node_0")],
        "model",
        [make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
    )
    path = folder / f"{operator}.onnx"
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path
