"""The fused operators of com.microsoft against ONNX Runtime, which defines them.

Products of bytes are the exception: on x86 without VNNI instructions, ONNX Runtime adds pairs of uint8 x int8 products
in int16, which saturates where weights need all 8 bits. So it is asked with weights of 7 bits, and numpy with all 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from nimblec.onnx_import.importer import import_model

RNG = np.random.default_rng(7)
B, L, H, D = 2, 5, 4, 8
WIDTH = H * D

Arrays = tuple[Any, ...]  # of arrays; None where an input is left out


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def whole(low: int, high: int, *shape: int, dtype: type = np.int32) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(dtype)


uint8 = partial(whole, 0, 256, dtype=np.uint8)
int8 = partial(whole, -128, 128, dtype=np.int8)
int7 = partial(whole, -64, 64, dtype=np.int8)
"""Of 7 bits."""


def scale(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def zero(value: int, dtype: type = np.uint8) -> np.ndarray:
    return np.array(value, dtype)


@dataclass(frozen=True)
class Fused:
    """A node: its inputs (None where left out), attributes, how many outputs, which inputs are weights."""

    op: str
    inputs: Arrays
    attributes: dict[str, Any]
    outputs: int
    known: tuple[int, ...]
    domain: str
    step: int
    """How far apart quantized results may be: where ONNX Runtime rounds a sum of its own order."""


def fused(
    op: str,
    inputs: Sequence[Any],
    outputs: int = 1,
    known: tuple[int, ...] = (),
    domain: str = "com.microsoft",
    step: int = 0,
    **attributes: Any,
) -> Fused:
    return Fused(op, tuple(inputs), attributes, outputs, known, domain, step)


def bert_mask() -> np.ndarray:
    mask = np.ones((B, L), np.int32)
    mask[1, 3:] = 0
    return mask


QKV = (real(B, L, WIDTH), real(B, L, WIDTH), real(B, L, WIDTH))
PAST = (real(B, H, 3, D), real(B, H, 3, D))

CASES = {
    "gelu": fused("Gelu", [real(3, 4)]),
    "bias_gelu": fused("BiasGelu", [real(3, 4), real(4)]),
    "fast_gelu": fused("FastGelu", [real(3, 4), real(4)]),
    "fast_gelu_without_bias": fused("FastGelu", [real(3, 4)]),
    "quick_gelu": fused("QuickGelu", [real(3, 4)]),
    "quick_gelu_alpha": fused("QuickGelu", [real(3, 4)], alpha=2.0),
    "expand_dims": fused("ExpandDims", [real(3, 4), np.array(-1, np.int32)], known=(1,)),
    "fused_matmul": fused("FusedMatMul", [real(2, 4, 3), real(2, 5, 4)], transA=1, transB=1, alpha=0.5),
    "fused_gemm": fused(
        "FusedGemm", [real(3, 4), real(5, 4), real(5)], transB=1, activation="LeakyRelu", activation_alpha=0.3
    ),
    **{
        f"fused_gemm_{name}": fused("FusedGemm", [real(3, 4), real(4, 5)], activation=name, **parameters)
        for name, parameters in {
            "Elu": {"activation_alpha": 0.5},
            "Selu": {"activation_alpha": 1.7, "activation_gamma": 1.1},
            "Softplus": {},
            "Softsign": {},
            "ThresholdedRelu": {"activation_alpha": 0.4},
        }.items()
    },
    "fused_conv_relu": fused(
        "FusedConv", [real(1, 3, 6, 6), real(4, 3, 3, 3), real(4)], activation="Relu", pads=[1, 1, 1, 1]
    ),
    "fused_conv_sum": fused(
        "FusedConv", [real(1, 3, 6, 6), real(4, 3, 3, 3), real(4), real(1, 4, 4, 4)], activation="Relu"
    ),
    "fused_conv_clip": fused(
        "FusedConv", [real(1, 4, 6, 6), real(4, 1, 3, 3)], activation="Clip", activation_params=[0.0, 1.0], group=4
    ),
    "simplified_layer_norm": fused("SimplifiedLayerNormalization", [real(2, 3, 8), real(8)], domain="", axis=-1),
    "skip_layer_norm": fused("SkipLayerNormalization", [real(2, 3, 8), real(2, 3, 8), real(8), real(8), real(8)]),
    "skip_layer_norm_with_sum": fused("SkipLayerNormalization", [real(2, 3, 8), real(2, 3, 8), real(8)], epsilon=1e-05),
    "skip_simplified_layer_norm": fused(
        "SkipSimplifiedLayerNormalization", [real(2, 3, 8), real(2, 3, 8), real(8), real(8)]
    ),
    "embed_layer_norm": fused(
        "EmbedLayerNormalization",
        [whole(0, 9, B, L), whole(0, 2, B, L), real(9, 8), real(L + 2, 8), real(2, 8), real(8), real(8), bert_mask()],
        outputs=2,
    ),
    "attention": fused("Attention", [real(B, L, 16), real(16, 3 * WIDTH), real(3 * WIDTH)], num_heads=H),
    "attention_with_mask": fused(
        "Attention", [real(B, L, 16), real(16, 3 * WIDTH), real(3 * WIDTH), bert_mask()], num_heads=H
    ),
    "attention_with_lengths": fused(
        "Attention", [real(B, L, 16), real(16, 3 * WIDTH), real(3 * WIDTH), np.array([5, 3], np.int32)], num_heads=H
    ),
    "attention_unidirectional": fused(
        "Attention", [real(B, L, 16), real(16, 3 * WIDTH), real(3 * WIDTH)], num_heads=H, unidirectional=1, scale=0.4
    ),
    "attention_with_past": fused(
        "Attention",
        [real(B, L, 16), real(16, 3 * WIDTH), real(3 * WIDTH), None, np.stack(PAST)],
        outputs=2,
        num_heads=H,
        unidirectional=1,
    ),
    "multi_head_attention": fused("MultiHeadAttention", QKV, num_heads=H),
    "multi_head_attention_with_bias_and_mask": fused(
        "MultiHeadAttention", [*QKV, real(3 * WIDTH), bert_mask(), real(1, H, L, L)], num_heads=H
    ),
    "multi_head_attention_with_past": fused(
        "MultiHeadAttention", [*QKV, None, None, None, *PAST], outputs=3, num_heads=H
    ),
    "rotary": fused("RotaryEmbedding", [real(B, H, L, D), whole(0, 9, B, L, dtype=np.int64), real(9, 4), real(9, 4)]),
    "rotary_interleaved_from_an_offset": fused(
        "RotaryEmbedding", [real(B, L, WIDTH), np.array([2], np.int64), real(9, 4), real(9, 4)], interleaved=1
    ),
    "rotary_of_a_part": fused(
        "RotaryEmbedding",
        [real(B, L, WIDTH), whole(0, 9, B, L, dtype=np.int64), real(9, 2), real(9, 2)],
        rotary_embedding_dim=4,
        num_heads=H,
    ),
    "quantize": fused("QuantizeLinear", [real(3, 4), scale(0.03), zero(120)], known=(2,)),
    "dequantize_by_axis": fused("DequantizeLinear", [uint8(3, 4), np.abs(real(4)), uint8(4)], axis=1),
    "qlinear_add": fused(
        "QLinearAdd",
        [uint8(3, 4), scale(0.02), zero(100), uint8(3, 4), scale(0.03), zero(90), scale(0.05), zero(128)],
        step=1,
    ),
    "qlinear_mul": fused(
        "QLinearMul",
        [
            int8(3, 4),
            scale(0.02),
            zero(5, np.int8),
            int8(4),
            scale(0.03),
            zero(-7, np.int8),
            scale(0.05),
            zero(3, np.int8),
        ],
        step=1,
    ),
    "qlinear_sigmoid": fused(
        "QLinearSigmoid", [uint8(3, 4), scale(0.05), zero(128), scale(1 / 256), zero(0)], known=(1, 2, 3, 4), step=1
    ),
    "qlinear_leaky_relu": fused(
        "QLinearLeakyRelu",
        [uint8(3, 4), scale(0.05), zero(128), scale(0.06), zero(110)],
        known=(1, 2, 3, 4),
        step=1,
        alpha=0.2,
    ),
    "qlinear_softmax": fused(
        "QLinearSoftmax",
        [uint8(2, 3, 4), scale(0.05), zero(128), scale(1 / 256), zero(0)],
        known=(1, 2, 3, 4),
        step=1,
        opset=13,
        axis=1,
    ),
    "qlinear_softmax_of_a_matrix": fused(
        "QLinearSoftmax",
        [int8(2, 3, 4), scale(0.05), None, scale(1 / 256), zero(-128, np.int8)],
        known=(1, 3, 4),
        step=1,
        opset=12,
        axis=1,
    ),
    "qlinear_where": fused(
        "QLinearWhere",
        [
            whole(0, 2, 3, 4, dtype=np.bool_),
            uint8(3, 4),
            scale(0.02),
            zero(128),
            uint8(4),
            scale(0.03),
            zero(120),
            scale(0.04),
            zero(110),
        ],
        known=(2, 3, 5, 6, 7, 8),
        step=1,
    ),
    "qlinear_concat": fused(
        "QLinearConcat",
        [scale(0.05), zero(128), uint8(2, 4), scale(0.02), zero(100), uint8(3, 4), scale(0.05), zero(128)],
        known=(0, 1, 3, 4, 6, 7),
        step=1,
        axis=0,
    ),
    "qlinear_global_average_pool": fused(
        "QLinearGlobalAveragePool", [uint8(1, 3, 5, 5), scale(0.05), zero(128), scale(0.04), zero(110)], step=1
    ),
    "qlinear_average_pool": fused(
        "QLinearAveragePool",
        [uint8(1, 3, 5, 5), scale(0.05), zero(128), scale(0.04), zero(110)],
        step=1,
        kernel_shape=[2, 2],
    ),
    "qgemm": fused(
        "QGemm",
        [
            uint8(3, 8),
            scale(0.02),
            zero(100),
            int7(5, 8),
            scale(0.03),
            zero(0, np.int8),
            whole(-500, 500, 5),
            scale(0.1),
            zero(120),
        ],
        step=1,
        transB=1,
    ),
    "matmul_integer_to_float": fused(
        "MatMulIntegerToFloat", [uint8(3, 8), int7(8, 5), scale(0.02), np.abs(real(5)), zero(100), None, real(5)]
    ),
    "dynamic_quantize_matmul": fused(
        "DynamicQuantizeMatMul", [real(3, 8), int7(8, 5), scale(0.02), zero(0, np.int8), real(5)]
    ),
    "matmul_4_bits": fused(
        "MatMulNBits",
        [real(3, 40), uint8(6, 2, 16), np.abs(real(12)), None, None, real(6)],
        known=(1, 2),
        K=40,
        N=6,
        bits=4,
        block_size=32,
    ),
    "matmul_4_bits_with_zeros": fused(
        "MatMulNBits",
        [real(3, 64), uint8(6, 2, 16), np.abs(real(12)), uint8(6)],
        known=(1, 2, 3),
        K=64,
        N=6,
        bits=4,
        block_size=32,
    ),
    "matmul_8_bits": fused(
        "MatMulNBits", [real(3, 64), uint8(6, 2, 32), np.abs(real(12))], known=(1, 2), K=64, N=6, bits=8, block_size=32
    ),
    "grid_sample": fused("GridSample", [real(1, 2, 4, 4), real(1, 3, 3, 2)], padding_mode="border"),
    "attention_between_starts_and_ends": fused(
        "Attention",
        [real(B, L, 16), real(16, 3 * WIDTH), real(3 * WIDTH), np.array([5, 4, 2, 0], np.int32)],
        num_heads=H,
    ),
    "inverse": fused("Inverse", [real(2, 3, 3) + 4 * np.eye(3, dtype=np.float32)]),
    "qlinear_average_pool_of_channels_last": fused(
        "QLinearAveragePool",
        [uint8(1, 5, 6, 3), scale(0.05), zero(128), scale(0.04), zero(110)],
        step=1,
        kernel_shape=[2, 3],
        channels_last=1,
    ),
}


def model_of(case: Fused) -> ModelProto:
    names = [f"i{i}" if array is not None else "" for i, array in enumerate(case.inputs)]
    outputs = [f"o{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, domain=case.domain, **case.attributes)
    arrays = {name: array for name, array in zip(names, case.inputs, strict=True) if array is not None}
    known = {f"i{i}" for i in case.known}
    return helper.make_model(
        helper.make_graph(
            [node],
            "fused",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in arrays.items()
                if name not in known
            ],
            [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in arrays.items() if name in known],
        ),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
        ir_version=9,
    )


@pytest.mark.parametrize("name", CASES)
def test_gives_what_onnx_runtime_gives(name: str) -> None:
    case = CASES[name]
    model = model_of(case)
    for value in model.graph.output:
        value.ClearField("type")
    given = given_to(case)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    expected = session.run(None, {value.name: array for value, array in zip(model.graph.input, given, strict=True)})
    found = import_model(model).module(*(torch.from_numpy(array) for array in given))
    for left, right in zip((tensor.numpy() for tensor in found), expected, strict=True):
        assert_close(left, right, case.step)


def exact_qgemm(inputs: Arrays) -> np.ndarray:
    a, a_scale, a_zero, b, b_scale, _, c, y_scale, y_zero = inputs
    total = product(a, int(a_zero), b.T) + c
    return np.clip(np.rint(total * (a_scale * b_scale / y_scale)) + y_zero, 0, 255).astype(np.uint8)


def exact_matmul_integer_to_float(inputs: Arrays) -> np.ndarray:
    a, b, a_scale, b_scale, a_zero, _, bias = inputs
    return product(a, int(a_zero), b) * (a_scale * b_scale) + bias


def exact_dynamic_quantize_matmul(inputs: Arrays) -> np.ndarray:
    a, b, b_scale, _, bias = inputs
    low, high = min(a.min(), 0), max(a.max(), 0)
    a_scale = np.float32((high - low) / 255)
    a_zero = int(np.rint(-low / a_scale))
    quantized = np.clip(np.rint(a / a_scale) + a_zero, 0, 255)
    return product(quantized, a_zero, b) * (a_scale * b_scale) + bias


def product(a: np.ndarray, a_zero: int, b: np.ndarray) -> np.ndarray:
    """Add up the products of bytes as they are, in float32 afterwards; ``b`` has no zero point."""
    return ((a.astype(np.int32) - a_zero) @ b.astype(np.int32)).astype(np.float32)


EXACT = {
    "qgemm": exact_qgemm,
    "matmul_integer_to_float": exact_matmul_integer_to_float,
    "dynamic_quantize_matmul": exact_dynamic_quantize_matmul,
}


@pytest.mark.parametrize("name", EXACT)
def test_no_cpu_rounds_what_onnx_runtime_is_asked_for(name: str) -> None:
    """Without VNNI it adds two products with any bytes in int16, which has room for them; of twice the weights not."""
    (weights,) = (a.astype(int) for a in CASES[name].inputs if a is not None and a.dtype == np.int8 and a.ndim)
    most = 255 * np.sort(np.abs(weights), axis=None)[-2:].sum()
    assert most <= np.iinfo(np.int16).max < 2 * most


@pytest.mark.parametrize("name", EXACT)
def test_products_of_bytes_are_exact(name: str) -> None:
    case = CASES[name]
    # Weights of 8 bits: twice those of 7. Pairs of their products with bytes exceed int16.
    inputs = tuple(2 * a if a is not None and a.dtype == np.int8 and a.ndim else a for a in case.inputs)
    case = replace(case, inputs=inputs)
    (found,) = import_model(model_of(case)).module(*(torch.from_numpy(array) for array in given_to(case)))
    assert_close(found.numpy(), EXACT[name](inputs), case.step)


def given_to(case: Fused) -> list[np.ndarray]:
    """Return the inputs that are given at run, and are no weights."""
    return [array for i, array in enumerate(case.inputs) if array is not None and i not in case.known]


def assert_close(found: np.ndarray, expected: np.ndarray, step: int) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if step:
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= step
        assert (found == expected).mean() > 0.9
    else:
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def test_packed_attention_is_attention_of_its_parts() -> None:
    # ONNX Runtime packs queries, keys and values on GPUs only.
    packed = real(B, L, H, 3, D)
    parts = tuple(np.ascontiguousarray(packed[:, :, :, i].reshape(B, L, WIDTH)) for i in range(3))
    together, apart = (
        import_model(model_of(fused("MultiHeadAttention", inputs, num_heads=H))) for inputs in ((packed,), parts)
    )
    left = together.module(torch.from_numpy(packed))[0]
    right = apart.module(*(torch.from_numpy(part) for part in parts))[0]
    np.testing.assert_allclose(left.numpy(), right.numpy(), rtol=1e-5, atol=1e-6)
