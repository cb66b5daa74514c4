"""A small network quantised by ONNX Runtime, in QDQ form."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import ModelProto
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from parsed_models import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = """
    a = Conv <kernel_shape = [7, 7], strides = [2, 2], pads = [3, 3, 3, 3]> (x, stem, stem_bias)
    b = Relu (a)
    c = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (b)
    d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c, square, square_bias)
    e = Relu (d)
    f = Conv <kernel_shape = [1, 1]> (e, pixel)
    g = Add (f, e)
    h = Relu (g)
    i = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [0, 0, 1, 1]> (h, square, last_bias)
    j = GlobalAveragePool (i)
    k = Flatten (j)
    y = Gemm <transB = 1> (k, matrix, vector)
"""
SHAPES = {
    "stem": (16, 3, 7, 7),
    "square": (16, 16, 3, 3),
    "pixel": (16, 16, 1, 1),
    "matrix": (10, 16),
    "stem_bias": (16,),
    "square_bias": (16,),
    "last_bias": (16,),
    "vector": (10,),
}
IMAGE = (2, 3, 32, 32)
PRODUCTS = 5
"""Convolutions and products of the network."""

SETTINGS: dict[str, dict[str, Any]] = {
    "unsigned": {"activation_type": QuantType.QUInt8},
    "unsigned, by channel": {"activation_type": QuantType.QUInt8, "per_channel": True},
    "signed, by channel": {"activation_type": QuantType.QInt8, "per_channel": True},
    "symmetric": {"activation_type": QuantType.QInt8, "extra_options": {"ActivationSymmetric": True}},
}


class _Images(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self._left: Iterator[np.ndarray] = iter([image(seed) for seed in range(3)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next input of the calibration."""
        return next(({"x": each} for each in self._left), None)


def image(seed: int) -> np.ndarray:
    """Draw an input of the network."""
    return np.random.default_rng(seed).standard_normal(IMAGE, dtype=np.float32)


def quantized_network(settings: dict[str, Any], folder: Path) -> ModelProto:
    """Return the network with 8 bit weights, and activations as the settings say."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        name: (rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    sizes = ",".join(map(str, IMAGE))
    model = parse(f"(float[{sizes}] x) => (float[{IMAGE[0]},10] y) {{ {BODY} }}", **weights)
    path = folder / "quantized.onnx"
    logging.disable(logging.WARNING)
    quantize_static(
        model, path, _Images(), quant_format=QuantFormat.QDQ, weight_type=QuantType.QInt8, **settings
    )
    logging.disable(logging.NOTSET)
    return onnx.load(path)
