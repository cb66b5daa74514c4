"""The fuzzer of rewrites draws valid models of every pattern, and finds a planted fault."""

from pathlib import Path
from random import Random

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto

from fuzz import rewrites, sessions, shrinking
from fuzz.patterns import PATTERNS, draw_model
from fuzz.rewrites import FindingError


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_is_valid(pattern: str) -> None:
    """Most draws run unoptimised: a pattern that is never valid would test nothing."""
    valid = 0
    for number in range(8):
        try:
            model = draw_model(Random(number), pattern)  # noqa: S311 - reproducible
            valid += bool(rewrites.reference(model))
        except ValueError:
            continue
    assert valid >= 4


PROVOKED = {
    "attention": {"ReshapeFusion", "MatMulAddFusion", "MatMulScaleFusion"},
    "branches": {"GeluFusionL1", "GeluFusionL2"},
    "casts": {"CastElimination", "CastFloat16Transformer", "RemoveDuplicateCastTransformer"},
    "clipped_pairs": {"ClipQuantRewrite", "QDQS8ToU8Transformer", "ReluQuantRewrite"},
    "computed_shapes": {"ConstantFolding"},
    "conditions": {"NotWhereFusion"},
    "constants": {"PreShapeNodeElimination"},
    "convolution": {"ConvActivationFusion", "ConvAddFusion", "ConvBNFusion", "ConvMulFusion", "Pad_Fusion"},
    "double_pairs": {"DoubleQDQPairsRemover"},
    "dropouts": {"EliminateDropout", "EliminateIdentity"},
    "embed_layer_norm": {"LayerNormFusionL2", "SkipLayerNormFusion"},
    "expansions": {"ExpandElimination"},
    "fast_gelu": {"FastGeluFusion"},
    "focus": {"CommonSubexpressionElimination", "ConstantSharing", "NchwcTransformer"},
    "gathers": {"GatherSliceToSplitFusion"},
    "gemm": {"FuseReluClip", "GemmActivationFusion", "GemmSumFusion", "GemmTransposeFusion"},
    "identities": {"NoopElimination"},
    "integer_products": {"DynamicQuantizeMatMulFusion", "MatMulIntegerToFloatFusion"},
    "labels": {"LabelEncoderFusion"},
    "layer_norm": {"DivMulFusion"},
    "matmul_norm": {"MatMul_BatchNormalization_Fusion"},
    "matmul_transpose": {"MatmulTransposeFusion"},
    "moved_pairs": {"QDQPropagationTransformer", "QDQSelectorActionTransformer"},
    "qdq_binary": {"EnsureUniqueDQForNodeUnit"},
    "qdq_product": {"NhwcTransformer", "WeightBiasQuantization"},
    "quick_gelu": {"QuickGeluFusion"},
    "repeated": {"FuseFp16InitializerToFp32NodeTransformer"},
    "rms_norm": {"SimplifiedLayerNormFusion"},
    "skip_layer_norm": {"LayerNormFusionL1"},
    "slices": {"EliminateSlice"},
    "transposes": {"TransposeOptimizer"},
}
"""Patterns, and rewrites that several of their first 40 models provoke on every supported ONNX Runtime."""


@pytest.mark.parametrize("pattern", PROVOKED)
def test_pattern_provokes_rewrites(pattern: str) -> None:
    """A pattern that no longer fits a rewrite would leave it untested."""
    missing = set(PROVOKED[pattern])
    for number in range(40):
        try:
            model = draw_model(Random(number), pattern)  # noqa: S311 - reproducible
            missing -= sessions.modified(model) if rewrites.reference(model) else set()
        except Exception:  # noqa: BLE001, S112 - some draws are invalid, and ONNX Runtime refuses some of its rewrites
            continue
        if not missing:
            return
    pytest.fail(f"no model of {pattern} provokes {sorted(missing)}")


def test_case_follows_from_seed_and_number() -> None:
    first, again, other = (rewrites.draw_case(seed, 3).SerializeToString() for seed in (1, 1, 2))
    assert first == again != other


def test_unoptimised_sum_of_negatives_is_right() -> None:
    """A rewrite that keeps the values passes; the second input set has values of both signs."""
    model = parsed("(float[4] x_0) => (float[4] y) { a = Neg(x_0) b = Identity(a) y = Mul(b, b) }")
    assert rewrites.judge_session(model.SerializeToString()) == "right"


def test_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that computes y / n for 1 / n * y is wrong."""
    right = parsed("(int32[4] divisor_0, int32[4] x_1) => (int32[4] y) { d = Div(one, divisor_0) y = Mul(d, x_1) }")
    wrong = parsed("(int32[4] divisor_0, int32[4] x_1) => (int32[4] y) { y = Div(x_1, divisor_0) }")
    opened = sessions.open_session

    def planted(model: ModelProto, *, optimised: bool, **_: object) -> onnxruntime.InferenceSession:
        return opened(wrong if optimised else model, optimised=False)

    monkeypatch.setattr(sessions, "open_session", planted)
    with pytest.raises(FindingError, match="wrong"):
        rewrites.judge_session(right.SerializeToString())


def test_plan_is_judged(tmp_path: Path) -> None:
    """The plan of a plain model is right, and a kept finding has its model and inputs."""
    model = parsed("(float[3] x_0) => (float[3] y) { a = Sigmoid(x_0) y = Mul(a, x_0) }")
    file = model.SerializeToString()
    assert rewrites.judge_plan(file) == "right"
    rewrites.keep(file, tmp_path / "found")
    assert (tmp_path / "found" / "model.onnx").read_bytes() == file
    kept = np.load(tmp_path / "found" / "0-x_0.npy")
    assert np.array_equal(kept, sessions.draw_inputs(model)[0]["x_0"])


def test_difference_within_a_perturbation_is_rounding() -> None:
    """What 2^-20 changes as much is no fault: x - (x - 1e-6 x) magnifies rounding by a million."""
    model = parsed("(float[4] x_0) => (float[4] y) { a = Mul(x_0, k) y = Sub(x_0, a) }", k=0.999999)
    inputs = sessions.draw_inputs(model)[0]
    right = [inputs["x_0"] * np.float32(1e-6)]
    assert sessions.is_rounding(model, inputs, right, [right[0] * np.float32(1.01)])
    plain = parsed("(float[4] x_0) => (float[4] y) { y = Mul(x_0, k) }", k=1e-6)
    assert not sessions.is_rounding(plain, inputs, right, [right[0] * np.float32(1.01)])


def test_tie_that_no_input_moves_is_rounding() -> None:
    """The mean of 1 * s and 2 * s is between 1 * s and 2 * s, whatever s is."""
    model = parsed(
        "(uint8[1, 2] x_0) => (float[1, 1] y) { a = DequantizeLinear(x_0, k) b = ReduceMean<axes = [1]>(a)"
        " q = QuantizeLinear(b, k) y = DequantizeLinear(q, k) }",
        k=0.05,
    )
    inputs = {"x_0": np.array([[1, 2]], np.uint8)}
    (right,) = sessions.run(sessions.open_session(model, optimised=False), inputs) or ()
    other = np.float32(0.15) - right
    assert sessions.is_rounding(model, inputs, [right], [other])


def test_shrink_keeps_the_node_at_fault() -> None:
    model = parsed("(float[2] x_0) => (float[2] y, float[2] z) { a = Neg(x_0) b = Erf(a) y = Abs(b) z = Relu(a) }")
    small = shrinking.shrink(model, lambda file: b"Erf" in file)
    assert [node.op_type for node in small.graph.node] == ["Erf"]


def parsed(text: str, k: float = 1.0) -> ModelProto:
    """Return the model of a graph's text, with the constants one and k."""
    head, _, body = text.partition("{")
    constants = f"<int32[1] one = {{1}}, float k = {{{k}}}>"
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {head} {constants} {{{body}')
