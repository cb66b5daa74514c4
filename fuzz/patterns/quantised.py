"""Quantised models: pairs of QuantizeLinear and DequantizeLinear, quantised weights, integer products."""

from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper

from fuzz.patterns.draft import TYPES, Draft, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

_LIMITS = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}


class Scheme:
    """How a tensor is quantised: dtype, scale and zero point, as names of constants."""

    def __init__(self, d: Draft, dtype: str, scale: float | None = None, *, zero: int | None = None) -> None:
        """Draw what is not given."""
        low, high = _LIMITS[dtype]
        if zero is None:
            zero = d.choose(0 if low else (high + 1) // 2, *range(low, high, max(1, (high - low) // 7)))
        self.dtype = dtype
        self.scale = d.any_of(0.02, 0.05, 0.1, 0.013) if scale is None else scale
        self.scale *= 1 / 200 if high > 255 else 1
        self.names = [d.fixed(self.scale, "float32")]
        if zero != 0 or dtype != "uint8" or d.chance(0.8):
            self.names.append(d.fixed(zero, dtype))

    def quantize(self, d: Draft, x: str) -> str:
        """Add QuantizeLinear."""
        declared = d.choose(None, TYPES[self.dtype]) if d.opset >= 21 else None
        return d.node("QuantizeLinear", x, *self.names, output_dtype=declared)

    def dequantize(self, d: Draft, x: str) -> str:
        """Add DequantizeLinear."""
        return d.node("DequantizeLinear", x, *self.names)

    def both(self, d: Draft, x: str) -> str:
        """Add the pair."""
        return self.dequantize(d, self.quantize(d, x))


def _dtype(d: Draft) -> str:
    wide = ("int16", "uint16") if d.opset >= 21 else ()
    return str(d.any_of("uint8", "uint8", "int8", *wide))


def _operand(d: Draft, dtype: str, **wanted: Any) -> tuple[str, Scheme]:
    """Return a dequantised operand and its scheme: from a quantised input, or from one that is quantised here."""
    scheme = Scheme(d, dtype)
    if d.chance(0.15):
        shape = wanted.get("shape") or d.shape(wanted["rank"])
        return scheme.dequantize(d, d.input(dtype, shape)), scheme
    return scheme.both(d, d.take("float32", **wanted)), scheme


def _shared(scheme: Scheme, d: Draft, dtype: str) -> Scheme:
    """Return the same scheme, or boldly another."""
    return scheme if not d.boldly() else Scheme(d, dtype)


def qdq_unary(d: Draft) -> str:
    """Return an operator of one operand between pairs."""
    dtype = _dtype(d)
    x, scheme = _operand(d, dtype, shape=(1, 4, 4, 6))
    makers: list[Callable[[], str]] = [
        lambda: d.node("Relu", x),
        lambda: d.node("Clip", x, d.fixed(d.any_of(0, -1), "float32"), d.fixed(d.any_of(6, 1), "float32")),
        lambda: d.node("Sigmoid", x),
        lambda: d.node("LeakyRelu", x, alpha=d.any_of(0.1, -0.5)),
        lambda: d.node("Softmax", x, axis=d.any_of(-1, 1)),
        lambda: d.node("Transpose", x, perm=[0, 2, 3, 1]),
        lambda: d.node("Reshape", x, d.fixed(d.any_of([1, -1], [4, 24], [0, 0, -1]))),
        lambda: d.unsqueeze(x, [0]),
        lambda: d.squeeze(x, [0]),
        lambda: d.node("Slice", x, d.fixed([0]), d.fixed([2]), d.fixed([2])),
        lambda: d.node("Gather", x, d.fixed(d.any_of(1, [0, 2], -1)), axis=2),
        lambda: d.node(
            "AveragePool", x, kernel_shape=[2, 2], pads=d.choose(None, [1, 1, 1, 1]), count_include_pad=d.choose(0, 1)
        ),
        lambda: d.node("MaxPool", x, kernel_shape=[2, 2]),
        lambda: d.node("GlobalAveragePool", x),
        lambda: d.reduce("ReduceMean", x, d.any_of([2, 3], [1], [-1]), d.any_of(0, 1)),
        lambda: d.node("ArgMax", x, axis=d.any_of(1, -1), keepdims=d.any_of(0, 1)),
        lambda: d.node("Resize", x, "", d.fixed([1, 1, 2, 2], "float32"), mode=d.any_of("nearest", "linear")),
        lambda: d.node(
            "Pad",
            x,
            d.fixed([0, 0, 1, 1, 0, 0, 0, 0]),
            *([d.fixed(d.any_of(0, 0.3), "float32")] if d.chance(0.5) else []),
        ),
        lambda: d.node("Flatten", x),
        lambda: d.node("DepthToSpace", x, blocksize=2),
        lambda: d.node("Identity", x),
        lambda: d.node("Abs", x),
    ]
    y = d.rng.choice(makers)()
    if d.nodes[-1].op_type == "ArgMax":
        return y
    if d.boldly():
        y = d.node("Relu", y)
    same = d.chance(0.5)
    return (
        (_shared(scheme, d, dtype) if same else Scheme(d, d.choose(dtype, _dtype(d)))).both(d, y)
        if d.chance(0.9)
        else y
    )


def qdq_binary(d: Draft) -> str:
    """Return an operator of several operands between pairs."""
    dtype = _dtype(d)
    shape = d.shape(d.any_of(2, 3))
    x, scheme = _operand(d, dtype, shape=shape)
    form = d.rng.randrange(7)
    if form == 0:
        other = Scheme(d, d.choose(dtype, _dtype(d)))
        low, high = _LIMITS[other.dtype]
        b = other.dequantize(d, d.constant(d.integers(low, high + 1, d.choose(shape, shape[-1:], ())), other.dtype))
    elif form == 1:
        b = x
    else:
        b = (_shared(scheme, d, dtype) if d.chance(0.5) else Scheme(d, d.choose(dtype, _dtype(d)))).both(
            d, d.input("float32", d.choose(shape, shape[-1:], (1,)))
        )
    if form == 2 and d.find_type(b) == d.find_type(x):
        y = d.node("Concat", x, b, axis=d.any_of(0, -1))
    elif form == 3:
        condition = d.input("bool", d.choose(shape, shape[-1:]))
        y = d.node("Where", condition, *d.any_of((x, b), (b, x), lambda: (x, d.scalar(0.5)), lambda: (d.scalar(-1), x)))
    elif form == 4:
        return d.node(d.any_of("Equal", "Greater"), x, b)
    else:
        y = d.swapped(d.any_of("Add", "Mul", "Add", "Mul", "Sub", "Div", "Max"), x, b)
    if d.boldly():
        y = d.node("Relu", y)
    return (Scheme(d, d.choose(dtype, _dtype(d))).both(d, y)) if d.chance(0.85) else y


def _weight(d: Draft, shape: Shape, dtype: str, axis: int) -> tuple[str, float | np.ndarray]:
    """Return a dequantised constant weight, and its scales."""
    per_channel = d.chance(0.5)
    scales: Any = np.float32(d.any_of(0.01, 0.02))
    if per_channel:
        scales = (np.abs(d.normal((shape[axis],))) * 0.01 + 0.005).astype(np.float32)
    low, high = _LIMITS[dtype]
    zero = np.full(scales.shape, d.choose(0 if low else 128, 3, 100))
    if per_channel and d.boldly():
        zero = d.integers(low, high, scales.shape)
    values = d.fixed(d.integers(low, high + 1, shape), dtype)
    names = [d.fixed(scales, "float32")]
    if d.chance(0.8) or dtype == "uint8":
        names.append(d.fixed(zero, dtype))
    return d.node("DequantizeLinear", values, *names, axis=axis if per_channel else None), scales


def _bias(d: Draft, size: int, x_scale: float, scales: Any) -> str:
    """Return a bias in int32, whose scale is the product of the two or not, or a bias in float32."""
    if d.chance(0.2):
        return d.weights((size,))
    factor = d.choose(1.0, 8.0, 0.5)
    product = np.asarray(x_scale * scales * factor, np.float32)
    if d.boldly() and product.shape == ():
        product = np.full((size,), product)
    names = [d.fixed(product, "float32")]
    if d.choose(False, True):
        names.append(d.fixed(np.zeros(product.shape), "int32"))
    values = d.fixed(d.integers(-3000, 3000, (size,)), "int32")
    return d.node("DequantizeLinear", values, *names, axis=0 if product.shape else None)


def qdq_product(d: Draft) -> str:
    """Draw Gemm, MatMul, Conv and ConvTranspose between pairs, with a quantised weight and bias."""
    dtype, weight_dtype = d.choose("uint8", "int8"), d.choose("int8", "uint8")
    form = d.any_of("Gemm", "Gemm", "MatMul", "Conv", "Conv")
    if form == "Conv":
        inside, outside = d.any_of(2, 4), d.any_of(2, 8)
        x, scheme = _operand(d, dtype, shape=(1, inside, 5, 5))
        weight, scales = _weight(d, (outside, inside, 3, 3), weight_dtype, 0)
        bias = [_bias(d, outside, scheme.scale, scales)] if d.chance(0.7) else []
        y = d.node("Conv", x, weight, *bias, pads=d.choose(None, [1, 1, 1, 1]))
    else:
        rows, inner, columns = d.any_of(1, 3), d.any_of(4, 8), d.any_of(2, 6)
        x, scheme = _operand(d, dtype, shape=(rows, inner))
        transposed = form == "Gemm" and d.chance(0.4)
        axis = d.choose(0 if transposed else 1, 1 if transposed else 0)
        weight, scales = _weight(d, (columns, inner) if transposed else (inner, columns), weight_dtype, axis)
        if form == "Gemm":
            proper = np.ndim(scales) == 0 or np.shape(scales)[0] == columns
            bias = [_bias(d, columns, scheme.scale, scales if proper else 0.02)] if d.chance(0.7) else []
            alpha, beta = d.choose(1.0, 0.5), d.choose(1.0, 2.0)
            y = d.node("Gemm", x, weight, *bias, transB=int(transposed), alpha=alpha, beta=beta)
        else:
            y = d.node("MatMul", x, weight)
            y = d.swapped("Add", y, d.weights((columns,))) if d.chance(0.3) else y
    if d.chance(0.3):
        y = d.node("Relu", y) if d.chance(0.6) else d.node("Clip", y, d.fixed(0, "float32"), d.fixed(6, "float32"))
    return Scheme(d, d.choose(dtype, _dtype(d)), d.any_of(0.05, 0.2, 1.0)).both(d, y) if d.chance(0.6) else y


def weight_only(d: Draft) -> str:
    """Draw MatMul, Gemm or Gather of a weight that alone is quantised: per tensor, per axis or in blocks."""
    four_bits = d.opset >= 21 and d.chance(0.5)
    inner, columns = d.any_of((16, 3), (32, 4), (64, 8), (128, 16))
    form = d.any_of("MatMul", "MatMul", "MatMul", "Gemm", "Gather", "Transpose")
    shape = (columns, inner) if form == "Transpose" else (inner, columns)
    dtype = d.any_of("int4", "uint4") if four_bits else d.any_of("int8", "uint8")
    block = d.any_of(16, 32, None) if d.opset >= 21 and inner >= 32 else None
    axis = (shape.index(inner) if d.choose(True, False) else shape.index(columns)) if block else d.any_of(0, 1)
    if block and shape[axis] % block:
        block = None
    scale_shape: Shape = () if d.chance(0.3) and not block else (shape[axis],)
    if block:
        scale_shape = tuple(size // block if i == axis else size for i, size in enumerate(shape))
    scale_dtype = d.choose("float32", "float16") if d.opset >= 19 else "float32"
    names = [d.fixed(np.abs(d.normal(scale_shape)) * 0.02 + 0.005, scale_dtype)]
    low, high = {"int4": (-8, 7), "uint4": (0, 15)}.get(dtype) or _LIMITS[dtype]
    values = _packed(d, dtype, d.integers(low, high + 1, shape))
    if d.chance(0.5) or dtype.startswith("u"):
        fixed = np.full(scale_shape, 0 if low else (high + 1) // 2)
        names.append(_packed(d, dtype, d.choose(fixed, d.integers(low, high, scale_shape))))
    weight = d.node("DequantizeLinear", values, *names, axis=axis if scale_shape else None, block_size=block)
    if scale_dtype == "float16":
        weight = d.cast(weight, "float32")
    if form == "Gather":
        return d.node("Gather", weight, d.input("int64", (2, 3), f"below{inner}"))
    if form == "Transpose":
        weight = d.node("Transpose", weight, perm=[1, 0])
    x = d.take("float32", shape=d.any_of((2, inner), (1, inner), *([(2, 3, inner)] if form == "MatMul" else [])))
    y = d.node("Gemm" if form == "Gemm" else "MatMul", x, weight)
    return d.swapped("Add", y, d.weights((columns,))) if d.chance(0.3) else y


def _packed(d: Draft, dtype: str, values: np.ndarray) -> str:
    """Return a constant of any integer type, also of 4 bits."""
    if dtype not in {"int4", "uint4"}:
        return d.fixed(values, dtype)
    kind = TensorProto.INT4 if dtype == "int4" else TensorProto.UINT4
    return d.tensor(helper.make_tensor("w", kind, values.shape, values.reshape(-1).tolist()))


def double_pairs(d: Draft) -> str:
    """Draw pair after pair, with equal or different schemes, and with movements of data between."""
    dtype = _dtype(d)
    scheme = Scheme(d, dtype)
    x = d.take("float32", rank=d.any_of(2, 3))
    y = scheme.quantize(d, x)
    for _ in range(d.any_of(1, 2, 3)):
        form = d.rng.randrange(5)
        if form == 0:
            rank = len(d.shape_of(x))
            y = d.node("Transpose", y, perm=list(reversed(range(rank))))
        elif form == 1:
            y = d.node("Reshape", y, d.fixed([-1]))
            if d.chance(0.5):
                y = d.unsqueeze(y, [0])
        else:
            following = _shared(scheme, d, dtype) if form == 2 else Scheme(d, d.choose(dtype, _dtype(d)))
            y = following.quantize(d, scheme.dequantize(d, y))
            scheme = following
        if form in {0, 1}:
            x = y
    return scheme.dequantize(d, y)


def moved_pairs(d: Draft) -> str:
    """Draw Transpose, Reshape and the like next to a pair, also of an int32 constant."""
    if d.chance(0.25):
        values = d.fixed(d.integers(-999, 999, (4, 6)), "int32")
        y = d.node("DequantizeLinear", values, d.fixed(0.01, "float32"))
        y = d.node("Transpose", y, perm=[1, 0]) if d.chance(0.7) else d.node("Reshape", y, d.fixed([6, 4]))
        return d.node("MatMul", y, d.take("float32", shape=(4, 3)))
    x = d.take("float32", rank=3)
    moves: list[Callable[[str], str]] = [
        lambda v: d.node("Transpose", v, perm=[2, 0, 1]),
        lambda v: d.node("Reshape", v, d.fixed([-1])),
        lambda v: d.unsqueeze(v, [0]),
        lambda v: d.node("Slice", v, d.fixed([0]), d.fixed([1]), d.fixed([0])),
        lambda v: d.node("MaxPool", d.unsqueeze(v, [0]), kernel_shape=[1, 1]),
        lambda v: d.node("Relu", v),
        lambda v: d.node("Clip", v, d.fixed(0, "float32"), d.fixed(d.any_of(1, 6, 25.5), "float32")),
    ]
    dtype = _dtype(d)
    y = d.rng.choice(moves)(x)
    scheme = Scheme(d, dtype)
    y = scheme.both(d, y)
    y = d.rng.choice(moves)(y)
    return _shared(scheme, d, dtype).both(d, y) if d.chance(0.6) else y


def clipped_pairs(d: Draft) -> str:
    """Draw Relu or Clip before a pair whose range clips alike, or a little less or more."""
    dtype = str(d.any_of("uint8", "int8"))
    low, high = _LIMITS[dtype]
    zero = d.any_of(low, low, 0, (low + high) // 2)
    scheme = Scheme(d, dtype, d.any_of(0.5, 0.25, 0.02), zero=zero)
    x = d.take("float32")
    if d.chance(0.3):
        return scheme.both(d, d.node("Relu", x))
    least, most = ((limit - zero) * scheme.scale * d.choose(1.0, 0.9, 1.1) for limit in (low, high))
    bounds = [d.any_of("", lambda: d.fixed(least, "float32")), d.fixed(most, "float32")]
    return scheme.both(d, d.node("Clip", x, *bounds[: d.any_of(1, 2)]))


def integer_products(d: Draft) -> str:
    """Draw DynamicQuantizeLinear, MatMulInteger and ConvInteger, with Cast and Mul behind them."""
    inner, columns = d.any_of(4, 8), d.any_of(2, 5)
    x = d.take("float32", shape=d.any_of((3, inner), (2, 3, inner)))
    dtype = d.choose("int8", "uint8")
    low, high = _LIMITS[dtype]
    weight = d.fixed(d.integers(low, high + 1, (inner, columns)), dtype)
    per_column = d.chance(0.4)
    zero = [d.fixed(np.full((columns,) if per_column else (), d.choose(0, 3)), dtype)] if d.chance(0.7) else []
    scales = d.constant(np.abs(d.normal((columns,) if per_column else ())) * 0.01 + 0.001)
    if d.chance(0.7):
        q, scale, x_zero = d.node_of("DynamicQuantizeLinear", x, count=3)
    else:
        scheme = Scheme(d, d.choose("uint8", "int8"))
        q, scale = scheme.quantize(d, x), scheme.names[0]
        x_zero = scheme.names[1] if len(scheme.names) > 1 else d.fixed(0, "uint8")
    product = d.node("MatMulInteger", q, weight, x_zero, *zero)
    factor = d.swapped("Mul", scale, scales)
    y = d.swapped("Mul", d.cast(product, "float32"), d.choose(factor, scale))
    return d.swapped("Add", y, d.weights(d.choose((columns,), (1,), (3, columns)))) if d.chance(0.5) else y


PATTERNS = (
    qdq_unary,
    qdq_unary,
    qdq_binary,
    qdq_product,
    qdq_product,
    weight_only,
    double_pairs,
    moved_pairs,
    clipped_pairs,
    integer_products,
)
