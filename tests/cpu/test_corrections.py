"""What ONNX Runtime's kernels compute otherwise than ONNX defines is corrected, or refused by name."""

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper
from onnx_cases import cases
from onnx_conformance import run_case

from nimblec.base.errors import UnsupportedModelError
from nimblec.cpu import corrections

BY_NAME = {case.name: case for case in cases()}
SCORES = "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal"
CORRECTED = [SCORES, SCORES.replace("4d_mask", "3d_mask"), "test_attention_causal_boolmask_nan_robustness"]
ROUNDED = ["test_dft", "test_dft_axis", "test_dft_inverse", "test_dft_irfft", "test_stft_with_window"]
REFUSED = {
    "test_resize_downsample_scales_linear_align_corners": "scale 0.6 makes 2.4 elements of 4; with align_corners, ONNX",
    "test_resize_downsample_scales_cubic_align_corners": "scale 0.8 makes 3.2 elements of 4",
    "test_maxunpool_export_with_output_shape": r"output_shape is (1, 1, 5, 5), expected (1, 1, 4, 4), in which ONNX",
}


@pytest.mark.parametrize("name", [name for name in CORRECTED + ROUNDED if name in BY_NAME])
def test_plan_computes_what_onnx_expects(name: str) -> None:
    """ONNX Runtime's scores have the lowest number for -infinity; transforms differ by rounding."""
    result = run_case(BY_NAME[name], "cpu")
    assert result.status == "pass", result.message


@pytest.mark.parametrize(("name", "sentence"), REFUSED.items())
def test_operator_of_two_meanings_is_refused(name: str, sentence: str) -> None:
    result = run_case(BY_NAME[name], "cpu")
    assert result.status == "refused"
    assert sentence in result.message


def test_resize_of_pytorch_is_not_refused() -> None:
    """PyTorch's meaning of a scale is ONNX Runtime's, and its exporter keeps the scale."""
    model = resize("align_corners", "{1, 1, 0.6, 0.6}")
    model.producer_name = "pytorch"
    corrections.correct(model)
    model.producer_name = ""
    with pytest.raises(UnsupportedModelError, match="give sizes instead of scales"):
        corrections.correct(model)


@pytest.mark.parametrize(
    ("mode", "scales"),
    [("align_corners", "{1, 1, 0.5, 2}"), ("half_pixel", "{1, 1, 0.6, 0.6}"), ("align_corners", "{1, 1, 0.3, 1}")],
)
def test_resize_without_doubt_is_left_as_it_is(mode: str, scales: str) -> None:
    """Whole lengths, modes without a length, and one element, which is a corner for all."""
    model = resize(mode, scales)
    before = model.SerializeToString()
    corrections.correct(model)
    assert model.SerializeToString() == before


def test_correction_infers_shapes_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX copies them several times: 10 s for 500 MB."""
    model = resize("half_pixel", "{1, 1, 2, 2}")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(10_000, np.float32), "w"))
    infer_shapes, sizes = onnx.shape_inference.infer_shapes, []

    def inferred(given: ModelProto, **options: bool) -> ModelProto:
        sizes.append(given.ByteSize())
        return infer_shapes(given, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", inferred)
    corrections.correct(model)
    assert max(sizes) < 1000


def test_unpooling_to_the_shape_of_the_kernel_is_left_as_it_is() -> None:
    model = parsed(
        "(float[1, 2, 8, 8] x) => (float[1, 2, 8, 8] y) <int64[4] s = {1, 2, 8, 8}>"
        "{ p, i = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)"
        "  y = MaxUnpool<kernel_shape = [2, 2], strides = [2, 2]>(p, i, s) }"
    )
    corrections.correct(model)
    assert [node.op_type for node in model.graph.node] == ["MaxPool", "MaxUnpool"]


@pytest.mark.parametrize(
    ("sizes", "attributes"),
    [
        ("4, 6", "kernel_shape = [2, 2], strides = [2, 2], pads = [0, 0, 1, 1]"),
        ("5, 6", "kernel_shape = [3, 3], strides = [3, 3], pads = [0, 0, 1, 1]"),
        ("6, 6", "kernel_shape = [1, 1], strides = [2, 2]"),
        ("7, 7", "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]"),
    ],
    ids=["both", "one_axis", "stride", "none"],
)
def test_pools_infer_the_windows_that_they_compute(sizes: str, attributes: str) -> None:
    """Inference counts a window that begins in the padding; the shape of the second pool follows from the first."""
    model = parsed(
        f"(float[1, 1, {sizes}] x) => (float[n, c, h, w] y) {{ p = AveragePool<ceil_mode = 1, {attributes}>(x)"
        f"  y = MaxPool<ceil_mode = 1, {attributes}>(p) }}"
    )
    h, w = map(int, sizes.split(","))
    feed = {"x": np.random.default_rng(0).standard_normal((1, 1, h, w), np.float32)}
    (right,) = onnxruntime_session(model).run(None, feed)
    corrections.correct(model)
    session = onnxruntime_session(model)
    np.testing.assert_array_equal(session.run(None, feed)[0], right)
    assert tuple(session.get_outputs()[0].shape) == right.shape


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 23, reason="this onnx has no Attention")
@pytest.mark.parametrize("place", ["body", "function"])
def test_operator_inside_a_body_is_corrected(place: str) -> None:
    attention = "Attention<is_causal = 1, qk_matmul_output_mode = 2>"
    texts = {
        "body": f"""<ir_version: 10, opset_import: ["" : 23]>
            g (float[1, 2, 3, 4] x, bool c) => (float[1, 2, 3, 3] s)
            {{ s = If (c) <then_branch = a () => (float[1, 2, 3, 3] u) {{ y, k, v, u = {attention} (x, x, x) }},
                          else_branch = b () => (float[1, 2, 3, 3] w) {{ e, f, g, w = {attention} (x, x, x) }}> }}""",
        "function": f"""<ir_version: 10, opset_import: ["" : 23, "d" : 1]>
            g (float[1, 2, 3, 4] x) => (float[1, 2, 3, 3] s) {{ s = d.f (x) }}
            <domain: "d", opset_import: ["" : 23]> f (x) => (s) {{ y, k, v, s = {attention} (x, x, x) }}""",
    }
    model = onnx.parser.parse_model(texts[place])
    corrections.correct(model)
    assert b"Attention" not in model.graph.SerializeToString().replace(b"Attention_", b"")
    assert any(function.domain == "nimblec.corrected" for function in model.functions)
    session = onnxruntime_session(model)
    fed = {"x": np.ones((1, 2, 3, 4), np.float32), "c": np.array(True)}
    (scores,) = session.run(None, {value.name: fed[value.name] for value in session.get_inputs()})
    assert np.array_equal(np.isneginf(scores[0, 0]), np.triu(np.ones((3, 3)), 1) > 0)


def onnxruntime_session(model: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def resize(mode: str, scales: str) -> ModelProto:
    return parsed(
        f"(float[1, 1, 4, 4] x) => (float[N, C, H, W] y) <float[4] s = {scales}>"
        f'{{ y = Resize<mode = "linear", coordinate_transformation_mode = "{mode}">(x, "", s) }}'
    )


def parsed(text: str) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {text}')


def test_correct_refuses_pool_without_input() -> None:
    pool = "MaxPool<kernel_shape=[2], ceil_mode=1>()"
    text = f'<ir_version: 9, opset_import: ["" : 18]> g (float[1,1,5] x) => (y) {{ y = {pool} }}'
    with pytest.raises(UnsupportedModelError, match=r"its shapes cannot be inferred: .*MaxPool.*Input 0"):
        corrections.correct(onnx.parser.parse_model(text))
