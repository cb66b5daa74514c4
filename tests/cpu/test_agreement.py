"""Rewrites of ONNX Runtime's optimiser that change results, or that do not run, are left out."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from numpy.typing import ArrayLike
from onnx import ModelProto, numpy_helper

import nimblec
import nimblert
from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.cpu import ort_process


def parse(text: str, **constants: ArrayLike) -> ModelProto:
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items())
    return model


def unoptimised(model: ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, feed)
    return found


T = TypeVar("T")

NORM = parse(
    """<ir_version: 8, opset_import: ["": 17]> g (float[4, 4] x) => (float[4, 4] y) {
        m = ReduceMean <axes = [-1]> (x)
        d = Sub (x, m)
        p = Pow (d, two)
        v = ReduceMean <axes = [-1], keepdims = 0> (p)
        e = Add (v, eps)
        s = Sqrt (e)
        n = Div (d, s)
        h = Mul (n, g)
        y = Add (h, b)
    }""",
    two=np.float32(2),
    eps=np.float32(1e-5),
    g=np.linspace(1, 2, 4, dtype=np.float32),
    b=np.ones(4, np.float32),
)
DIVISION = parse(
    """<ir_version: 8, opset_import: ["": 17]> g (int32[4] n, int32[4] k) => (int32[4] y) {
        d = Div (one, n)
        y = Mul (d, k)
    }""",
    one=np.ones(1, np.int32),
)


def test_compile_leaves_out_a_wrong_rewrite(caplog: pytest.LogCaptureFixture) -> None:
    feed = {"x": np.random.default_rng(0).standard_normal((4, 4), np.float32)}
    with nimblert.load(nimblec.compile(NORM, target="cpu", plan_cache=None)) as loaded:
        np.testing.assert_allclose(loaded(*feed.values()), unoptimised(NORM, feed)[0], rtol=1e-5, atol=1e-6)
    assert "ONNX Runtime's optimiser runs without LayerNormFusionL1" in caplog.text
    assert "with it, output 'y' is wrong (largest difference" in caplog.text


def test_compile_divides_integers_before_it_multiplies() -> None:
    """The examples do not tell 1 / n * k from k / n."""
    examples = {"n": np.full(4, 4, np.int32), "k": np.full(4, 2, np.int32)}
    feed = {"n": np.array([1, 2, -3, 5], np.int32), "k": np.array([7, 9, 8, 20], np.int32)}
    with nimblert.load(nimblec.compile(DIVISION, target="cpu", plan_cache=None, examples=examples)) as loaded:
        np.testing.assert_array_equal(loaded(*feed.values()), unoptimised(DIVISION, feed)[0])


def test_compile_leaves_out_a_rewrite_that_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Its QuantizeLinear has a dtype that the changed zero point does not fit."""
    model = parse(
        """<ir_version: 10, opset_import: ["": 21]> g (float[20] x) => (float[20] y) {
            q = QuantizeLinear <output_dtype = 3> (x, s, z)
            y = DequantizeLinear (q, s, z)
        }""",
        s=np.float32(0.02),
        z=np.int8(0),
    )
    x = np.random.default_rng(0).standard_normal(20, np.float32)
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None)) as loaded:
        np.testing.assert_array_equal(loaded(x), unoptimised(model, {"x": x})[0])
    assert "runs without QDQS8ToU8Transformer: with it, ONNX Runtime" in caplog.text


def test_compile_leaves_out_a_refused_rewrite_behind_a_wrong_one(caplog: pytest.LogCaptureFixture) -> None:
    """Without the removal of double pairs, of different zero points, the dtype of the first QuantizeLinear is wrong."""
    model = parse(
        """<ir_version: 10, opset_import: ["": 21]> g (float[20] x) => (float[20] y) {
            q = QuantizeLinear <output_dtype = 3> (x, s, a)
            d = DequantizeLinear (q, s, a)
            r = QuantizeLinear <output_dtype = 3> (d, s, z)
            e = DequantizeLinear (r, s, z)
            y = Add (e, e)
        }""",
        s=np.float32(0.013),
        a=np.int8(-56),
        z=np.int8(0),
    )
    x = np.random.default_rng(0).standard_normal(20, np.float32)
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None)) as loaded:
        np.testing.assert_allclose(loaded(x), unoptimised(model, {"x": x})[0], rtol=1e-6)
    assert "runs without DoubleQDQPairsRemover, QDQS8ToU8Transformer" in caplog.text


def test_compile_leaves_out_a_rewrite_that_is_refused_when_saved(caplog: pytest.LogCaptureFixture) -> None:
    """MatMul_BatchNormalization_Fusion removes an output; ONNX Runtime sees it after it has saved model and weights."""
    model = parse(
        """<ir_version: 8, opset_import: ["": 15]> g (float[4, 3] x) => (float[4, 100, 1, 1] r, float[4, 100, 1, 1] y) {
            m = MatMul (x, w)
            r = Reshape (m, shape)
            y = BatchNormalization (r, ones, ones, ones, ones)
        }""",
        w=np.ones((3, 100), np.float32),
        shape=np.array([4, 100, 1, 1]),
        ones=np.ones(100, np.float32),
    )
    x = np.random.default_rng(0).standard_normal((4, 3), np.float32)
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None)) as loaded:
        for name, right in zip("ry", unoptimised(model, {"x": x}), strict=True):
            np.testing.assert_allclose(loaded.run({"x": x})[name], right, rtol=1e-5)
    assert "runs without MatMul_BatchNormalization_Fusion" in caplog.text


def test_compile_leaves_out_a_rewrite_that_crashes() -> None:
    """ONNX Runtime 1.32 transposes within a product of another type than it looks at."""
    model = parse(
        """<ir_version: 8, opset_import: ["": 18]> g (float16[3, 2, 8] x) => (float[2, 3, 4] y) {
            a = Transpose <perm = [1, 0, 2]> (x)
            b = Cast <to = 1> (a)
            y = MatMul (b, w)
        }""",
        w=np.random.default_rng(0).standard_normal((8, 4), np.float32),
    )
    x = np.random.default_rng(1).standard_normal((3, 2, 8)).astype(np.float16)
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None)) as loaded:
        np.testing.assert_allclose(loaded(x), unoptimised(model, {"x": x})[0], rtol=1e-5, atol=1e-5)


QUANTISED = parse(
    """<ir_version: 10, opset_import: ["": 21]> g (float[3, 64] x) => (float[3, 32] y) {
        w = DequantizeLinear <axis = 1> (q, s)
        y = MatMul (x, w)
    }""",
    q=np.random.default_rng(0).integers(-127, 128, (64, 32)).astype(np.int8),
    s=np.linspace(0.5, 1.5, 32, dtype=np.float32),
)


def test_compile_multiplies_quantised_weights_in_float32() -> None:
    x = np.random.default_rng(1).standard_normal((3, 64), np.float32)
    with nimblert.load(nimblec.compile(QUANTISED, target="cpu", plan_cache=None)) as loaded:
        np.testing.assert_allclose(loaded(x), unoptimised(QUANTISED, {"x": x})[0], rtol=1e-5, atol=1e-3)


def test_approximate_tells_its_error(caplog: pytest.LogCaptureFixture) -> None:
    nimblec.compile(QUANTISED, target="cpu", plan_cache=None, approximate=True)
    assert "--approximate: results differ from exact ones by 0.00" in caplog.text
    with pytest.raises(CompileError, match=r"^output 'y' has a largest difference .* and --max-error allows 0.0001"):
        nimblec.compile(QUANTISED, target="cpu", plan_cache=None, approximate=True, max_error=1e-4)


def test_compile_takes_sizes_that_follow_from_unknown_shapes() -> None:
    """ONNX Runtime knows no shape after ArrayFeatureExtractor with one row, as nearest-neighbours models have it."""
    model = parse(
        """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]> g (float[1, 3] x) => (float[1, 2] y) {
            z = ai.onnx.ml.ArrayFeatureExtractor (x, rows)
            s = Shape (z)
            y = Reshape (w, s)
        }""",
        rows=np.array([0, 2]),
        w=np.ones((2, 1), np.float32),
    )
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None)) as loaded:
        assert loaded(np.ones((1, 3), np.float32)).tolist() == [[1, 1]]


def test_compile_names_a_node_that_never_runs() -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[2] y) {
            y = Gather (x, rows)
        }""",
        rows=np.array([1, 9]),
    )
    model.graph.node[0].name = "lookup"
    with pytest.raises(CompileError, match=r"Gather node.*'lookup'.*indices element out of data bounds"):
        nimblec.compile(model, target="cpu", plan_cache=None)


def test_compile_draws_no_zero_for_a_divisor() -> None:
    """The examples are on both sides of it."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (int64[4] a, int64[4] b) => (int64[4] y) { y = Mod (a, b) }'
    )
    examples = {"a": np.array([7, -7, 8, -8]), "b": np.array([2, 2, -3, -3])}
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None, examples=examples)) as loaded:
        np.testing.assert_array_equal(loaded(*examples.values()), examples["a"] % examples["b"])


def test_compile_observes_shapes_without_a_zero_divisor() -> None:
    """ONNX Runtime knows no shape after MeanVarianceNormalization; the example has no 0."""
    model = onnx.parser.parse_model(
        """<ir_version: 7, opset_import: ["": 12]> g (int32[3] n, float[1, 2, 4, 1] x)
            => (int32[3] q, float[1, 2, 4, 1] y) { q = Div (n, n) m = MeanVarianceNormalization (x) y = Neg (m) }"""
    )
    feed = {"n": np.array([1, 2, 3], np.int32), "x": np.arange(8, dtype=np.float32).reshape(1, 2, 4, 1)}
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None, examples={"n": feed["n"]})) as loaded:
        np.testing.assert_allclose(loaded.run(feed)["y"], unoptimised(model, feed)[1], atol=1e-6)


def test_compile_keeps_the_bias_of_a_quantised_product(caplog: pytest.LogCaptureFixture) -> None:
    """ONNX Runtime rounds it to a multiple of 0.01; then this sum is another one after the last pair."""
    model = parse(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 2] x) => (float[1, 2] y) {
            q = QuantizeLinear (x, a, z)
            d = DequantizeLinear (q, a, z)
            w = DequantizeLinear (k, a, o)
            s = Gemm (d, w, b)
            p = QuantizeLinear (s, t, z)
            y = DequantizeLinear (p, t, z)
        }""",
        a=np.float32(0.1),
        z=np.uint8(128),
        k=np.array([[10, -20], [30, 40]], np.int8),
        o=np.int8(0),
        b=np.array([0.504, 0.496], np.float32),
        t=np.float32(1),
    )
    feed = {"x": np.zeros((1, 2), np.float32)}
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None)) as loaded:
        np.testing.assert_array_equal(loaded.run(feed)["y"], unoptimised(model, feed)[0])
    assert "runs without" not in caplog.text


def test_compile_keeps_casts_that_a_session_would_remove() -> None:
    """ONNX Runtime casts to float32 for Sqrt; opened again, it would remove that with the cast to float16 before."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[64] x) => (double[64] y) {
            a = Cast <to = 10> (x) b = Cast <to = 11> (a) c = Cast <to = 10> (b) s = Sqrt (c) y = Cast <to = 11> (s)
        }"""
    )
    feed = {"x": np.linspace(1, 2, 64, dtype=np.float32)}
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None)) as loaded:
        np.testing.assert_array_equal(loaded.run(feed)["y"], unoptimised(model, feed)[0])


def test_compile_keeps_casts_that_a_session_would_join(caplog: pytest.LogCaptureFixture) -> None:
    """ONNX Runtime removes one of the casts at a time: opened again, it would not round x to float32.

    CenterCropPad, a function with shape arithmetic, makes it optimise the model twice.
    """
    model = parse(
        """<ir_version: 8, opset_import: ["": 18]> g (int64[4] x, float[4] w) => (int32[4] y, float[2] z) {
            a = Cast <to = 1> (x) b = Cast <to = 7> (a) c = Cast <to = 6> (b) d = Cast <to = 3> (c)
            y = Cast <to = 6> (d) z = CenterCropPad <axes = [0]> (w, size)
        }""",
        size=np.array([2]),
    )
    feed = {"x": np.array([-21504471, 18843487, -27306817, 30702667]), "w": np.ones(4, np.float32)}
    with nimblert.load(nimblec.compile(model, target="cpu", plan_cache=None)) as loaded:
        for name, right in zip("yz", unoptimised(model, feed), strict=True):
            np.testing.assert_array_equal(loaded.run(feed)[name], right)
    assert "runs without" not in caplog.text


def loop(stop: str) -> ModelProto:
    """Add ``x`` up to four times, or until all reach a limit, and return each sum."""
    return parse(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[3] x) => (float[3] last, float[n, 3] all) {{
            last, all = Loop (n, , x) <body = body (int64 i, bool c, float[3] s) => (bool go, float[3] t, float[3] u) {{
                t = Add (s, x)
                u = Identity (t)
                most = ReduceMax <keepdims = 0> (t)
                low = Less (most, limit)
                go = Identity ({stop})
            }}>
        }}""",
        n=np.int64(4),
        limit=np.float32(1e6),
    )


def test_compile_refuses_scan_outputs_of_a_loop_that_stops_by_values() -> None:
    with pytest.raises(UnsupportedModelError, match=r"\(Loop\): the size of output 'all' depends on values"):
        nimblec.compile(loop("low"), target="cpu", plan_cache=None)


def test_compile_takes_scan_outputs_of_a_counted_loop() -> None:
    with nimblert.load(nimblec.compile(loop("c"), target="cpu", plan_cache=None)) as loaded:
        assert loaded.run({"x": np.ones(3, np.float32)})["all"].tolist() == [[2] * 3, [3] * 3, [4] * 3, [5] * 3]


ENDLESS = parse(
    """<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) {
        r = Loop (, true, k) <body = body (int64 i, bool c, float[4] v) => (bool go, float[4] w) {
            go = Identity (c)
            w = Identity (v)
        }>
        y = Add (x, r)
    }""",
    true=np.True_,
    k=np.zeros(4, np.float32),
)


def test_compile_refuses_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_process, "LOOP_LIMIT_S", 1)
    with pytest.raises(CompileError, match="a loop of the model has not ended after 1 s: give it a trip count"):
        nimblec.compile(ENDLESS, target="cpu", plan_cache=None)


def test_a_killed_compilation_leaves_no_process(tmp_path: Path) -> None:
    onnx.save(ENDLESS, tmp_path / "m.onnx")
    command = [
        sys.executable,
        "-m",
        "nimblec",
        "compile",
        "m.onnx",
        "-o",
        "m.plan",
        "--target",
        "cpu",
        "--no-plan-cache",
    ]
    roots = os.pathsep.join(str(Path(package.__file__ or "").parent.parent) for package in (nimblec, nimblert))
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": roots}) as process:
        children = wait_for(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        process.send_signal(signal.SIGKILL)
    assert wait_for(lambda: not any(Path("/proc", child).exists() for child in children))


def wait_for(found: Callable[[], T]) -> T:
    """Wait until a function returns something true."""
    deadline = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value
