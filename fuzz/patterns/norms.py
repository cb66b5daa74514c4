"""Normalisations, by nodes and by operators."""

import math
from collections.abc import Sequence

import numpy as np

from fuzz.patterns.draft import Draft, Shape


def layer_norm(d: Draft) -> str:
    """Draw a LayerNorm by nodes: any order, exponent and place of eps; a scale that may widen the result."""
    dtype = d.choose("float32", "float16", "float64")
    x = d.take(dtype, rank=d.any_of(2, 3, 3))
    x, inner = _island(d, x, dtype)
    shape = d.shape_of(x)
    axes = d.choose([-1], [len(shape) - 1], [0], [-2, -1], [-1, -2], [1])
    mean = d.reduce("ReduceMean", x, axes, d.choose(1, 0))
    centred = d.node("Sub", *d.choose((x, mean), (mean, x)))
    again = d.node("Sub", *d.choose((x, mean), (mean, x))) if d.chance(0.2) else centred
    power = d.chance(0.6)
    exponent = d.choose(2, 3, 0.5, 1)
    squared = (
        d.node("Pow", again, d.scalar(exponent, d.choose(inner, "float32")))
        if power
        else d.node("Mul", again, d.choose(again, x))
    )
    variance = d.reduce("ReduceMean", squared, d.choose(axes, [0]), d.choose(1, 0))
    normal = _divided(d, centred, variance, inner)
    return _scaled(d, normal, shape, axes, dtype, inner, bias=0.8)


def rms_norm(d: Draft) -> str:
    """Draw an RMSNorm by nodes."""
    dtype = d.choose("float32", "float16", "float64")
    x = d.take(dtype, rank=d.any_of(2, 3, 3))
    x, inner = _island(d, x, dtype)
    shape = d.shape_of(x)
    axes = d.choose([-1], [len(shape) - 1], [0], [-2, -1], [1])
    squared = (
        d.node("Pow", x, d.scalar(d.choose(2, 3, 0.5, 1), d.choose(inner, "float32")))
        if d.chance(0.6)
        else d.node("Mul", x, x)
    )
    mean = d.reduce(d.choose("ReduceMean", "ReduceSum", "ReduceMax"), squared, axes, d.choose(1, 0))
    normal = _divided(d, x, mean, inner)
    return _scaled(d, normal, shape, axes, dtype, inner, bias=0.1)


def _island(d: Draft, x: str, dtype: str) -> tuple[str, str]:
    """Cast to a type of more bits, or not."""
    if d.chance(0.75):
        return x, dtype
    inner = "float32" if dtype == "float16" else d.any_of("float64", "float16")
    return d.cast(x, inner), inner


def _divided(d: Draft, x: str, variance: str, dtype: str) -> str:
    """Divide x by the root of the variance with eps, in one of the ways to write it."""
    eps = d.choose(1e-5, 0.1, 0.0)
    inside = d.choose(True, False)
    added = d.swapped("Add", variance, d.scalar(eps, dtype)) if inside else variance
    form = d.any_of(0, 1, 2, 2, 2, 3)
    if form == 3:
        return d.swapped("Mul", x, d.node("Pow", added, d.scalar(d.choose(-0.5, 0.5), dtype)))
    root = d.node("Sqrt", added)
    if not inside and d.chance(0.7):
        root = d.swapped("Add", root, d.scalar(eps, dtype))
    if form == 0:
        return d.swapped("Mul", x, d.node("Reciprocal", root))
    if form == 1:
        return d.swapped("Mul", x, d.node("Div", d.scalar(d.choose(1, 2), dtype), root))
    return d.node("Div", *d.choose((x, root), (root, x)))


def _scaled(d: Draft, x: str, shape: Shape, axes: Sequence[int], dtype: str, inner: str, *, bias: float) -> str:
    """Multiply x by a scale and add a bias, whose shapes may make it larger."""
    if inner != dtype and d.chance(0.6):
        x, inner = d.cast(x, dtype), dtype
    width = shape[min(a % len(shape) for a in axes) :]
    widths = (
        width,
        shape[-1:],
        (1,),
        (1, *shape[-1:]),
        shape,
        (*shape[:-1], 1),
        (3, *shape[-1:]),
        (2, *shape),
        (shape[-1] * 2,),
    )
    if d.chance(0.9):
        x = d.swapped("Mul", x, d.constant(d.normal(d.choose(*widths)) + 1, inner))
    if d.chance(bias):
        x = d.swapped("Add", x, d.weights(d.choose(*widths), inner))
    return d.cast(x, dtype) if inner != dtype and d.chance(0.7) else x


def skip_layer_norm(d: Draft) -> str:
    """Draw a LayerNormalization of one or two sums, of which one may be a bias."""
    dtype = d.choose("float32", "float16", "float64")
    shape = d.any_of((2, 3, 8), (1, 4, 8), (2, 4, 16), (3, 8))
    x = d.take(dtype, shape=shape)
    other = d.input(dtype, d.choose(shape, shape[1:], (1, *shape[1:]), shape[-1:]))
    if d.chance(0.5):
        x = d.swapped("Add", x, d.weights(d.choose(shape[-1:], (1,), shape), dtype))
    total = d.swapped("Add", x, other)
    if d.boldly():
        total = d.swapped("Add", total, d.choose(x, total))
    return normalized(d, total, shape, dtype)


def normalized(d: Draft, x: str, shape: Shape, dtype: str) -> str:
    """Apply LayerNormalization as an operator, or by nodes where the opset lacks it."""
    scale, bias = d.constant(d.normal(shape[-1:]) + 1, dtype), d.weights(shape[-1:], dtype)
    eps = d.choose(1e-5, 1e-3, 0.1)
    if d.chance(0.7):  # ONNX Runtime has it in opsets before 17, too
        axis = d.choose(-1, len(shape) - 1)
        count = d.choose(1, 3)
        inputs = (x, scale, bias) if d.choose(True, False) else (x, scale)
        y = d.node_of("LayerNormalization", *inputs, count=count, axis=axis, epsilon=eps)[0]
        return d.typed(y, dtype, shape)
    centred = d.node("Sub", x, d.reduce("ReduceMean", x, [-1]))
    variance = d.reduce("ReduceMean", d.node("Pow", centred, d.fixed(2, dtype)), [-1])
    normal = d.node("Div", centred, d.node("Sqrt", d.node("Add", variance, d.fixed(eps, dtype))))
    return d.swapped("Add", d.swapped("Mul", normal, scale), bias)


def embed_layer_norm(d: Draft) -> str:
    """Draw embeddings of words, places and segments, their sum and its LayerNorm."""
    batch, length, width = d.any_of(1, 2), 4, 8
    dtype = d.choose("float32", "float16")
    kind = d.any_of("int64", "int32")
    words = d.node("Gather", d.weights((10, width), dtype), d.input(kind, (batch, length), "below10"))
    if d.chance(0.3):
        row = d.normal((1, length, width))
        places = d.constant(d.choose(np.repeat(row, batch, 0), row, row[0], d.normal((batch, length, width))), dtype)
    elif d.chance(0.5):
        places = d.node("Gather", d.weights((length, width), dtype), d.fixed(np.arange(length)[None], kind))
    else:
        places = d.node(
            "Gather", d.weights((length + 2, width), dtype), d.input(kind, (d.choose(batch, 1), length), "below4")
        )
    total = d.swapped("Add", words, places)
    if d.chance(0.7):
        segments = d.node("Gather", d.weights((2, width), dtype), d.input(kind, (batch, length), "below2"))
        total = d.swapped("Add", total, segments)
    return normalized(d, total, (batch, length, width), dtype)


def group_norm(d: Draft) -> str:
    """Draw group and instance norms: Reshape, InstanceNormalization, Reshape, scale, bias; or by nodes."""
    batch, channels, side = d.any_of(1, 2), d.any_of(4, 8), d.any_of(2, 4)
    x = d.take("float32", shape=(batch, channels, side, side))
    groups = d.choose(2, 1, channels)
    if d.chance(0.5):
        split = d.node(
            "Reshape", x, d.fixed(d.choose([0, groups, -1], [batch, groups, channels // groups * side * side]))
        )
        scale, bias = d.choose(np.ones(groups), np.arange(groups)), d.choose(np.zeros(groups), np.arange(groups))
        normal = d.node(
            "InstanceNormalization", split, d.constant(scale), d.constant(bias), epsilon=d.choose(1e-5, 0.1)
        )
    else:
        split = d.node("Reshape", x, d.fixed([batch, groups, channels // groups, side, side]))
        axes = d.choose([2, 3, 4], [3, 4], [1, 2])
        centred = d.node("Sub", split, d.reduce("ReduceMean", split, axes))
        variance = d.reduce("ReduceMean", d.node("Mul", centred, centred), axes)
        normal = _divided(d, centred, variance, "float32")
    joined = d.node(
        "Reshape", normal, d.any_of(lambda: d.fixed([batch, channels, side, side]), lambda: d.node("Shape", x))
    )
    scaled = d.swapped("Mul", joined, d.weights(d.choose((channels, 1, 1), (1, channels, 1, 1), (side,), (1,))))
    return d.swapped("Add", scaled, d.weights(d.choose((channels, 1, 1), (1, channels, 1, 1), (side,))))


def batch_norm(d: Draft) -> str:
    """Draw BatchNormalization alone, after Reshape or Transpose, or by nodes."""
    channels = d.any_of(1, 3, 4)
    shape = d.choose((2, channels, 4, 4), (2, channels), (2, channels, 5))
    dtype = d.choose("float32", "float64")
    x = d.take(dtype, shape=shape)
    if d.chance(0.4):
        columns = (channels, *(1 for _ in shape[2:]))
        mean, variance = d.weights(columns, dtype), d.constant(np.abs(d.normal(columns)) + 0.5, dtype)
        centred = d.node("Sub", *d.choose((x, mean), (mean, x)))
        normal = _divided(d, centred, variance, dtype)
        return d.swapped("Add", d.swapped("Mul", normal, d.weights(columns, dtype)), d.weights(columns, dtype))
    if d.chance(0.3):
        x = d.node(d.any_of("Relu", "Neg"), x)
    return batch_normalization(d, x, channels, dtype)


def batch_normalization(d: Draft, x: str, channels: int, dtype: str = "float32") -> str:
    """Apply BatchNormalization to ``x``."""
    scale, bias, mean = (d.weights((channels,), dtype) for _ in range(3))
    variance = d.constant(np.abs(d.normal((channels,))) + 0.1, dtype)
    return d.node("BatchNormalization", x, scale, bias, mean, variance, epsilon=d.choose(1e-5, 0.1))


def operator_norms(d: Draft) -> str:
    """Draw norms that are operators, with scales and biases around them."""
    dtype = d.choose("float32", "float16")
    form = d.rng.randrange(4)
    if form == 0 and d.opset >= 17:
        x = d.take(dtype, rank=3)
        shape = d.shape_of(x)
        axis = d.any_of(-1, 1, 0, -2)
        return d.node(
            "LayerNormalization", x, d.weights(shape[axis % 3 :], dtype), axis=axis, stash_type=d.choose(1, None)
        )
    if form == 1:
        x = d.take("float32", rank=4)
        return d.node("LRN", x, size=d.any_of(1, 3))
    if form == 2:
        x = d.take("float32")
        axis = d.rng.randrange(len(d.shape_of(x)))
        return d.node("LpNormalization", x, axis=axis, p=d.any_of(1, 2))
    x = d.take("float32", rank=4)
    shape = d.shape_of(x)
    normal = d.node("MeanVarianceNormalization", x, axes=d.choose([0, 2, 3], [2, 3], [1]))
    return d.swapped("Mul", normal, d.weights((shape[1], 1, 1), scale=math.pi))


PATTERNS = (
    layer_norm,
    rms_norm,
    skip_layer_norm,
    embed_layer_norm,
    group_norm,
    batch_norm,
    operator_norms,
)
