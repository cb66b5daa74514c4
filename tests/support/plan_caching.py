"""Helpers for tests of the plan cache: small models, and a compiler that counts its calls."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblec.base.stages import Observer
from nimblec.plan.plan_cache import compile_once
from nimblert.plan import Target

KEY = "0123456789abcdef" * 4


def unobserved(stage: str, seconds: float | None) -> None:
    """Ignore the stages."""


def write_model(path: Path, *, seed: int = 0, external: bool = False) -> Path:
    """Write a model of Relu(x @ w), with the weights in the file or in weights.bin next to it."""
    w = np.random.default_rng(seed).standard_normal((8, 8), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path, save_as_external_data=external, location="weights.bin", size_threshold=0)
    return path


class Compiler:
    """Writes a different plan in each call, and counts the calls."""

    def __init__(self, during: Callable[[], object] = bool) -> None:
        self.calls = 0
        self._during = during

    def __call__(self, source: Source, options: Options, output: Path, observer: Observer) -> tuple[str, ...]:
        """Compile."""
        del source, options, observer
        self.calls += 1
        self._during()
        output.write_bytes(b"plan %d" % self.calls)
        return (f"note {self.calls}",)


def onnx_source(path: Path) -> Source:
    return Source(kind="onnx", model=str(path.resolve()))


def compiled(compiler: Compiler, model: Path, options: Options) -> tuple[bytes, tuple[str, ...]]:
    """Return the file and the notes of `compile_once`."""
    output = model.parent / "written"
    notes = compile_once(compiler, onnx_source(model), Target.CPU, options, output, unobserved)
    return output.read_bytes(), notes


def change_byte(path: Path, offset: int = -1) -> None:
    """Flip a bit, and preserve size and time of the file."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
