"""Large models: compiled for the CPU in less than twice their size, loaded by mapping.

A page of a mapped file counts as resident while it is in memory, but may go at any time; so both
are asserted, what is resident and what is anonymous (no file backs it).
"""

import json
import os
import shutil
import sys
from pathlib import Path

import memory_use
import numpy as np
import onnx
import pytest
from memory_use import Peak
from onnx import TensorProto, helper
from subprocesses import SOURCES

GIB = 1 << 30
ROWS, WIDTH, INNER = 1 << 15, 1 << 12, 1 << 14
"""The rows are those of the table for each layer."""

TABLE_NBYTES, MATRICES_NBYTES = 2 * ROWS * WIDTH, 2 * 4 * WIDTH * INNER
"""Of each layer. ONNX Runtime computes with packed copies of the matrices, also in a plain session of the model."""

CHUNK = 1 << 24
"""Elements that are drawn at a time."""

LITTLE = 192 << 20
"""More than Python, numpy and ONNX Runtime take, and less than a weight that is copied."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory by /proc"),
]

COMPILE = """
import sys
from nimblec.cli import main
main(["compile", *sys.argv[1:], "--target", "cpu", "-q"])
"""

RUN = """
import json, sys
import numpy as np
import memory_use
import nimblert
from nimblert.plan import container
from nimblert.check.verify import read_plan

uses = [memory_use.current()]
plan = read_plan(sys.argv[1])
uses.append(memory_use.current())
with nimblert.load(plan) as model:
    uses.append(memory_use.current())
    y = model(np.array([7, 32767]))
    uses.append(memory_use.current())
np.save(sys.argv[2], y)
print(json.dumps([use.anonymous for use in uses]))
"""

REFERENCE = """
import sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
(y,) = session.run(None, {"ids": np.array([7, 32767])})
np.save(sys.argv[2], y)
"""


def write_large_model(path: Path, layers: int) -> None:
    """Write a model of rows of an fp16 table through pairs of fp32 matrices, all in one file of external data."""
    random = np.random.default_rng(0)
    shapes = {"table": (layers * ROWS, WIDTH)}
    for layer in range(layers):
        shapes |= {f"up_{layer}": (WIDTH, INNER), f"down_{layer}": (INNER, WIDTH)}
    initializers = []
    with path.with_suffix(".data").open("wb") as file:
        for name, shape in shapes.items():
            dtype = np.float16 if name == "table" else np.float32
            begin = file.tell()
            for _ in range(shape[0] * shape[1] // CHUNK):
                values = random.standard_normal(CHUNK, np.float32)
                values *= 1 if name == "table" else (2 / shape[0]) ** 0.5
                file.write(values.astype(dtype, copy=False).data)
            initializers.append(_external(name, dtype, shape, path.with_suffix(".data").name, begin, file.tell()))
        assert file.tell() == layers * (TABLE_NBYTES + MATRICES_NBYTES)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["x_0"], to=TensorProto.FLOAT),
    ]
    for layer in range(layers):
        nodes += [
            helper.make_node("MatMul", [f"x_{layer}", f"up_{layer}"], [f"u_{layer}"]),
            helper.make_node("Relu", [f"u_{layer}"], [f"r_{layer}"]),
            helper.make_node("MatMul", [f"r_{layer}", f"down_{layer}"], [f"x_{layer + 1}"]),
        ]
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [2])],
        [helper.make_tensor_value_info(f"x_{layers}", TensorProto.FLOAT, [2, WIDTH])],
        initializers,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def _external(name: str, dtype: type, shape: tuple[int, ...], location: str, begin: int, end: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": begin, "length": end - begin}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def run(code: str, *args: Path | str) -> tuple[Peak, str]:
    """Run ``code`` in a process of its own: the memory it took, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*SOURCES, Path(memory_use.__file__).parent)))}
    return memory_use.run([sys.executable, "-c", code, *map(str, args)], environment=environment, timeout_s=900)


@pytest.mark.parametrize(("layers", "beside"), [(1, LITTLE), (4, 0)], ids=["768 MiB", "3 GiB"])
def test_memory_and_results(tmp_path: Path, layers: int, beside: int) -> None:
    """``beside`` is what Python and the libraries take, which counts beside a small model."""
    packed_nbytes, nbytes = layers * MATRICES_NBYTES, layers * (TABLE_NBYTES + MATRICES_NBYTES)
    needed, free = 4 * nbytes, shutil.disk_usage(tmp_path).free  # model, optimised weights, plan, and some room
    if free < needed:
        pytest.skip(f"needs {needed / GIB:.0f} GiB of disk, {free / GIB:.0f} GiB are free")
    model, plan = tmp_path / "large.onnx", tmp_path / "large.plan"
    write_large_model(model, layers)

    compiling, _ = run(COMPILE, model, "-o", plan)
    assert compiling.resident < 2 * nbytes + beside  # pages of mapped files too, this process and the checking one
    assert compiling.anonymous < packed_nbytes + LITTLE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.data", "large.onnx", "large.plan"]
    assert nbytes < plan.stat().st_size < nbytes + LITTLE

    _, printed = run(RUN, plan, tmp_path / "plan.npy")
    imported, read, loaded, ran = json.loads(printed)
    assert read - imported < 16 << 20  # all is mapped
    assert loaded - imported < packed_nbytes + LITTLE  # ONNX Runtime packs what MatMul reads, and nothing else
    assert ran - loaded < LITTLE

    run(REFERENCE, model, tmp_path / "reference.npy")
    found, expected = (np.load(tmp_path / name) for name in ("plan.npy", "reference.npy"))
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    np.testing.assert_array_equal(found, expected)
