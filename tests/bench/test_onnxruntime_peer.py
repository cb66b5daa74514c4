"""A bound session of ONNX Runtime equals a plain one, and another provider ends the process."""

from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs onnx: not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: not installed")

from bench.onnxruntime_peer import CPU, Bound, cuda  # noqa: E402 - after the skips


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the product and the sum of two inputs."""
    text = "agraph (float[2, 3] x, float[3] y) => (float[2, 3] p, float[2, 3] s) { p = Mul(x, y) s = Add(x, y) }"
    path = tmp_path / "model.onnx"
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(onnx.parser.parse_graph(text), opset_imports=opsets, ir_version=10), path)
    return path


def arrays(seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(shape).astype(np.float32) for shape in ((2, 3), (3,))]


def test_bound_session_computes_on_new_inputs(model: Path) -> None:
    like = [np.zeros((2, 3), np.float32)] * 2
    bound = Bound(model, CPU, arrays(0), like)
    for seed in (1, 2):
        x, y = arrays(seed)
        product, total = bound.run_on([x, y])
        np.testing.assert_array_equal(product, x * y)
        np.testing.assert_array_equal(total, x + y)
    bound.run()


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this onnxruntime has the CUDA provider"
)
@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider' is not in available provider names")
def test_bound_session_refuses_a_fallback(model: Path) -> None:
    with pytest.raises(SystemExit, match="ONNX Runtime takes CPUExecutionProvider: CUDAExecutionProvider cannot"):
        Bound(model, cuda(tf32=True, nhwc=True), arrays(0), [])


def test_cuda_options_are_strings_of_flags() -> None:
    ((_, options),) = cuda(tf32=False, nhwc=True)
    assert options["enable_cuda_graph"] == options["prefer_nhwc"] == "1"
    assert options["use_tf32"] == "0"
