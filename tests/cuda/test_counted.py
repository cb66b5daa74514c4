"""Sizes that depend on values on a GPU: outputs of a plan have those of ONNX Runtime in each call."""

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper
from onnx_conformance import run_onnxruntime

import nimblec
import nimblert
from nimblert.errors import InputError
from nimblert.plan import Crop

pytestmark = pytest.mark.gpu

MODELS = {
    "nonzero": "(float[5,8] x) => (y) { y = NonZero (x) }",
    "unique": "(float[5,8] x) => (y, i, v, c) { y, i, v, c = Unique (x) }",
    "rows above a half": """(float[5,8] x) => (y, n) {
        c = ReduceMax <keepdims = 0> (x, ones)  above = Greater (c, half)  found = NonZero (above)
        place = Transpose (found)  index = Squeeze (place, ones)  r = Gather (x, index)
        e = Exp (r)  y = MatMul (e, weight)  n = ReduceSum <keepdims = 0> (r, zeros)
    }""",
    "suppression": """(float[5,8] x) => (y) {
        a = Reshape (x, boxes)  s = Reshape (x, scores)  b = Slice (a, zeros, ten, ones)
        t = Slice (s, zeros, ten, two)  y = NonMaxSuppression (b, t, ten, iou)
    }""",
}
CONSTANTS = {
    "zeros": np.array([0]),
    "ones": np.array([1]),
    "two": np.array([2]),
    "ten": np.array([10]),
    "boxes": np.array([1, 10, 4]),
    "scores": np.array([1, 1, 40]),
    "half": np.float32(0.5),
    "nine": np.float32(9),
    "iou": np.array([0.2], np.float32),
    "weight": np.eye(8, 3, dtype=np.float32),
}


def model_of(text: str) -> ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 19]> main {text}')
    used = {name for node in model.graph.node for name in node.input}
    tensors = (numpy_helper.from_array(np.asarray(v), name) for name, v in CONSTANTS.items() if name in used)
    model.graph.initializer.extend(tensors)
    return model


def draws() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    some = np.round(rng.standard_normal((5, 8)))
    return [each.astype(np.float32) for each in (np.zeros((5, 8)), np.ones((5, 8)), some, rng.standard_normal((5, 8)))]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_have_the_sizes_of_each_call(name: str, level: int) -> None:
    model = model_of(MODELS[name])
    plan = nimblec.compile(model, target="cuda", level=level, plan_cache=None)
    assert any(isinstance(work, Crop) for _, work in plan.programs[0].work)
    with nimblert.load(plan) as executable:
        for x in draws() * 3:
            found = executable(x)
            for mine, other in zip(
                found if isinstance(found, tuple) else (found,), run_onnxruntime(model, [x]), strict=True
            ):
                np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, strict=True)


def test_size_beyond_a_given_bound_is_refused() -> None:
    model = model_of("(float[5,8] x) => (y) { above = Greater (x, nine)  y = NonZero (above) }")
    plan = nimblec.compile(model, target="cuda", bounds={"y": (2, 20)}, plan_cache=None)
    with nimblert.load(plan) as executable:
        for _ in range(4):
            with pytest.raises(InputError, match=r"output 'y': has the shape \(2, 40\) for these inputs"):
                executable(np.full((5, 8), 10, np.float32))
            assert executable(np.zeros((5, 8), np.float32)).shape == (2, 0)
