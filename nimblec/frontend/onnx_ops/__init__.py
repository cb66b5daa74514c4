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
    normalization,
    pooling,
    recurrent,
    reduction,
    resize,
    quantization,
    vision,
    signal,
    loss,
    sequence,
    text,
    shape,
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
    "normalization",
    "pooling",
    "recurrent",
    "reduction",
    "resize",
    "quantization",
    "vision",
    "signal",
    "loss",
    "sequence",
    "text",
    "shape",
]
