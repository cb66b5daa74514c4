"""What each ONNX operator does, by family: one function on tensors for each range of opsets.

Importing this package fills the table of `nimblec.frontend.onnx_ops.table`.
"""

from nimblec.frontend.onnx_ops import (
    activation,
    arithmetic,
    comparison,
    convolution,
    creation,
    indexing,
    legacy,
    linear,
    loss,
    normalization,
    pooling,
    quantization,
    recurrent,
    reduction,
    resize,
    sequence,
    shape,
    signal,
    text,
    vision,
)

__all__ = [
    "activation",
    "arithmetic",
    "comparison",
    "convolution",
    "creation",
    "indexing",
    "legacy",
    "linear",
    "loss",
    "normalization",
    "pooling",
    "quantization",
    "recurrent",
    "reduction",
    "resize",
    "sequence",
    "shape",
    "signal",
    "text",
    "vision",
]
