"""Which products between DequantizeLinear and QuantizeLinear become operators of integers."""

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from parsed_models import parse
from rewriting import run

from nimblec.graph.quantized import quantized_convolution
from nimblec.onnx_import.importer import import_model

RNG = np.random.default_rng(0)
CONSTANTS = {
    "s": np.float32(0.03),
    "z": np.uint8(120),
    "low": np.uint8(0),
    "out": np.float32(0.9),
    "w": RNG.integers(-127, 128, (8, 6), np.int8),
    "ws": RNG.uniform(0.01, 0.03, 8).astype(np.float32),
    "wz": np.zeros(8, np.int8),
    "one": np.ones(8, np.int8),
    "b": RNG.integers(-999, 999, 8, np.int32),
    "bz": np.zeros(8, np.int32),
}
CONSTANTS |= {"bs": CONSTANTS["s"] * CONSTANTS["ws"], "v": np.ascontiguousarray(CONSTANTS["w"].T)}
WEIGHT = "f = DequantizeLinear <axis = 0> (w, ws, wz)"
BIAS = "c = DequantizeLinear <axis = 0> (b, bs, bz)"
ROUND = "y = QuantizeLinear (m, out, z)"

LOW = "r = Gemm <transB = 1> (d, f) m = Relu (r)"
PRODUCT = "m = Gemm <transB = 1> (d, f)"
READ = "k = ArgMax <axis = 1> (m) o = Cast <to = 2> (k)"

CASES = {
    "gemm": (f"{WEIGHT} {BIAS} m = Gemm <transB = 1> (d, f, c) {ROUND}", True),
    "gemm without a bias": (f"{WEIGHT} {PRODUCT} {ROUND}", True),
    "columns": (f"f = DequantizeLinear <axis = 1> (v, ws, wz) m = MatMul (d, f) {ROUND}", True),
    "relu that rounding implies": (f"{WEIGHT} {LOW} y = QuantizeLinear (m, out, low)", True),
    "relu above the lowest number": (f"{WEIGHT} {LOW} {ROUND}", False),
    "factor": (f"{WEIGHT} m = Gemm <transB = 1, alpha = 2.0> (d, f) {ROUND}", False),
    "bias of another scale": (
        f"{WEIGHT} {BIAS.replace('bs', 'ws')} m = Gemm <transB = 1> (d, f, c) {ROUND}",
        False,
    ),
    "weights with zero points": (f"{WEIGHT.replace('wz', 'one')} {PRODUCT} {ROUND}", False),
    "a second reader": (f"{WEIGHT} {PRODUCT} n = QuantizeLinear (m, out, z) {READ} y = Max (n, o)", False),
}


@pytest.mark.parametrize("name", CASES)
def test_products_of_integers(name: str) -> None:
    body, is_converted = CASES[name]
    text = f"(float[5,6] x) => (uint8[5,8] y) {{ q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) {body} }}"
    model = parse(text)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in CONSTANTS.items())
    module = import_model(model).module
    assert any(node.target is quantized_convolution for node in module.graph.nodes) == is_converted
    x = RNG.standard_normal((5, 6), np.float32)
    (found,) = run(module, torch.from_numpy(x))
    plain = onnxruntime.SessionOptions()
    # Its optimiser takes the integers of any bias for sums.
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString(), plain).run(None, {"x": x})
    assert np.abs(found.int().numpy() - wanted).max() <= 1
