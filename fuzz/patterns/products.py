"""Matrix products, attention and convolutions, with what optimisers fuse into them."""

from typing import Any

import numpy as np

from fuzz.patterns.draft import Draft, Shape
from fuzz.patterns.norms import batch_normalization, embed_layer_norm, normalized

_FLOATS = ("float32", "float16", "float64")


def activation(d: Draft, x: str, dtype: str = "float32") -> str:
    """Return an activation that may be fused into what is before it, or none."""
    form = d.rng.randrange(9)
    if form == 0:
        return d.node("Clip", x, d.fixed(d.choose(0, -1), dtype), d.fixed(d.any_of(6, 1), dtype))
    if form == 1:
        return d.node("LeakyRelu", x, alpha=d.choose(0.1, -0.2))
    if form == 2:
        return d.node("HardSigmoid", x, alpha=0.3, beta=d.choose(0.5, 0.1))
    if form == 3:
        return d.node("Clip", d.node("Relu", x), "", d.fixed(d.any_of(6, -1), dtype))
    if form == 4:
        return d.swapped("Mul", x, d.node("Sigmoid", x))
    if form in {5, 6}:
        return d.node("Relu", x)
    return d.node(d.any_of("Sigmoid", "Tanh", "Softplus", "Elu"), x) if form == 7 else x


def matmul_add(d: Draft) -> str:
    """Draw a MatMul with a bias, before and after other shapes."""
    dtype = d.choose(*_FLOATS)
    x = d.take(dtype, rank=d.any_of(2, 2, 3))
    shape = d.shape_of(x)
    columns = d.any_of(1, 3, 8)
    weight = d.weights(d.choose((shape[-1], columns), (1, shape[-1], columns)), dtype)
    product = d.node("MatMul", x, weight)
    if d.boldly():
        product = d.node("Reshape", product, d.fixed([-1, columns]))
    biases = ((columns,), (1, columns), (shape[-2], columns), (1,), (), (shape[-2], 1), (2, 1, 1, columns))
    added = d.swapped("Add", product, d.weights(d.choose(*biases), dtype))
    if d.chance(0.3):
        added = d.node("MatMul", added, d.weights((columns, 4), dtype))
    return activation(d, added, dtype)


def gemm(d: Draft) -> str:
    """Draw a Gemm with its factors, transposes around it, sums and activations after it."""
    dtype = d.choose("float32", "float64", "float16")
    rows, inner, columns = d.any_of(1, 2, 4), d.any_of(1, 3, 8), d.any_of(1, 2, 5)
    a, b = d.chance(0.3), d.chance(0.3)
    x = d.take(dtype, shape=(inner, rows) if a else (rows, inner))
    weight = d.weights((columns, inner) if b else (inner, columns), dtype)
    if d.chance(0.3):
        x, a = d.node("Transpose", x, perm=d.choose([1, 0], None)), not a
    if d.chance(0.3):
        weight, b = d.node("Transpose", weight, perm=[1, 0]), not b
    alpha, beta = d.choose(1.0, 0.5), d.choose(1.0, 2.0, 0.0)
    biases = ((columns,), (1, columns), (rows, 1), (rows, columns), (1,), ())
    bias = [d.weights(d.choose(*biases), dtype)] if d.chance(0.6) else []
    y = d.node("Gemm", x, weight, *bias, alpha=alpha, beta=beta, transA=int(a), transB=int(b))
    if d.chance(0.4):
        added = d.weights(d.choose((columns,), (rows, columns), (rows, 1), (1,)), dtype)
        y = d.node("Sum", y, added) if d.chance(0.6) else d.swapped("Add", y, added)
    if d.chance(0.3):
        y = d.node("Transpose", y, perm=[1, 0])
    return activation(d, y, dtype)


def matmul_transpose(d: Draft) -> str:
    """Draw a MatMul of transposed operands, with casts and scales around it."""
    dtype = d.any_of("float32", "float32", *_FLOATS)
    batch: Shape = d.any_of((), (2,), (2, 3))
    rows, inner, columns = d.any_of(1, 2, 4), d.any_of(2, 3), d.any_of(1, 2, 5)
    rank = len(batch) + 2
    swap = [*range(rank - 2), rank - 1, rank - 2]
    perms: list[list[int]] = [swap, *([[1, 0, 2]] if rank == 3 else [])]

    def operand(shape: Shape, *, is_left: bool) -> str:
        perm = d.rng.choice(perms) if d.chance(0.6) else None
        source = tuple(shape[perm.index(i)] for i in range(rank)) if perm else shape
        before = d.any_of(dtype, dtype, *_FLOATS)
        is_constant = not is_left and d.chance(0.3)
        x = d.weights(source, before) if is_constant else d.take(before, shape=source)
        if perm:
            x = d.node("Transpose", x, perm=perm)
        x = d.cast(x, dtype) if before != dtype else x
        return _by_scale(d, x, dtype)

    left = operand((*batch, rows, inner), is_left=True)
    if batch and d.chance(0.25):
        right = d.weights((inner, columns), dtype)
    else:
        right = operand((*batch, inner, columns), is_left=False)
    y = _by_scale(d, d.node("MatMul", left, right), dtype)
    return d.node("Transpose", y, perm=swap) if d.chance(0.2) else activation(d, y, dtype)


def _by_scale(d: Draft, x: str, dtype: str) -> str:
    """Multiply or divide x by a number, or do not."""
    if d.chance(0.6):
        return x
    number = d.choose(lambda: d.scalar(0.125, dtype), lambda: d.weights((1, 1, 1), dtype), lambda: d.input(dtype, ()))
    if d.chance(0.6):
        return d.swapped("Mul", x, number)
    return d.node("Div", *d.choose((x, number), (number, x)))


def matmul_norm(d: Draft) -> str:
    """Draw MatMul, Reshape and Transpose, and BatchNormalization."""
    rows, inner, columns = 4, d.any_of(2, 3), d.any_of(2, 5)
    x = d.take("float32", shape=(rows, inner))
    y = d.node("MatMul", x, d.weights((inner, columns)))
    form = d.rng.randrange(3)
    if form == 1:
        y = d.node("Transpose", d.node("Reshape", y, d.fixed([1, 2, 2, columns])), perm=[0, 3, 1, 2])
    elif form == 2:
        y = d.node("Reshape", y, d.fixed([rows, columns, 1, 1]))
    return batch_normalization(d, y, columns)


def attention(d: Draft) -> str:
    """Draw attention of some heads, after a LayerNorm or not."""
    shape = (d.any_of(1, 2), d.any_of(2, 4), d.any_of(4, 8))
    dtype = d.choose("float32", "float16")
    x = d.take(dtype, shape=shape)
    return attend(d, normalized(d, x, shape, dtype) if d.chance(0.6) else x, shape, dtype)


def embedded_attention(d: Draft) -> str:
    """Draw attention of embeddings and their LayerNorm."""
    x = embed_layer_norm(d)
    dtype, shape = d.type_of(x)
    return attend(d, x, shape, dtype)


def attend(d: Draft, x: str, shape: Shape, dtype: str) -> str:
    """Attend: projections, scores, a mask, softmax, values, the projection back, and the residual."""
    batch, length, width = shape
    is_bert = d.chance(0.6)
    joined = d.node if is_bert and not d.boldly() else d.swapped
    heads = 2
    depth = width // heads
    residual = x
    split = [0, 0, heads, depth]

    def projected(perm: list[int]) -> str:
        y = d.node("MatMul", x, d.weights((width, width), dtype, 0.5))
        if d.choose(True, False):
            y = joined("Add", y, d.weights((width,), dtype))
        y = d.node("Reshape", y, d.fixed(d.choose(split, [batch, length, heads, depth])))
        return d.node("Transpose", y, perm=perm)

    q, v = projected([0, 2, 1, 3]), projected([0, 2, 1, 3])
    if is_bert or d.chance(0.5):
        k = projected([0, 2, 3, 1])
    else:
        k = d.node("Transpose", projected([0, 2, 1, 3]), perm=[0, 1, 3, 2])
    root = d.scalar(d.choose(depth**0.5, 2.0), dtype)
    inverse = d.scalar(d.choose(depth**-0.5, 0.3), dtype)
    form = d.choose(2, 0) if is_bert else d.any_of(0, 1, 2, 3)
    if form == 0:
        q = d.node("Div", q, root)
    elif form == 1:
        q = joined("Mul", q, inverse)
    scores = d.node("MatMul", q, k)
    if form == 2:
        scores = d.node("Div", scores, root)
    elif form == 3:
        scores = joined("Mul", scores, inverse)
    scores = _masked(d, scores, (batch, heads, length), dtype, d.choose(0, 1) if is_bert else d.any_of(0, 1, 2, 3))
    y = d.node("MatMul", d.node("Softmax", scores, axis=d.choose(3, -1, 2)), v)
    y = d.node(
        "Reshape", d.node("Transpose", y, perm=[0, 2, 1, 3]), d.fixed(d.choose([0, 0, width], [batch, length, -1]))
    )
    y = d.node("MatMul", y, d.weights((width, width), dtype, 0.5))
    y = joined("Add", y, d.weights((width,), dtype))
    return joined("Add", y, residual) if is_bert or d.chance(0.6) else y


def _masked(d: Draft, scores: str, sizes: tuple[int, int, int], dtype: str, form: int) -> str:
    """Mask scores by (1 - mask) * -10000, a sum, a causal Where, or not at all."""
    batch, heads, length = sizes
    if form == 0:
        mask = d.input(d.any_of("int64", "int32"), (batch, length), "bit")
        mask = d.unsqueeze(d.unsqueeze(mask, [1]), [2])
        inverted = d.node("Sub", d.scalar(d.choose(1, 2), dtype), d.cast(mask, dtype))
        return d.swapped("Add", scores, d.swapped("Mul", inverted, d.scalar(d.choose(-10000, -1), dtype)))
    if form == 1:
        shape = d.choose((batch, 1, length, length), (1, 1, length, length), (batch, heads, length, length), (length,))
        return d.swapped("Add", scores, d.input(dtype, shape))
    if form == 2:
        causal = d.constant(np.tril(np.ones((1, 1, length, length))), "bool")
        return d.node("Where", causal, scores, d.scalar(d.choose(-10000, -1), dtype))
    return scores


def convolution(d: Draft) -> str:
    """Return a convolution with Pad before it, and Add, Mul, norm, activation, residual and pooling after it."""
    dims = d.any_of(2, 2, 2, 1, 3)
    groups = d.choose(1, 2)
    inside, outside = d.any_of(2, 4, 8, 16), d.any_of(2, 4, 8, 16)
    side = d.any_of(4, 5, 6)
    x = d.take("float32", shape=(d.any_of(1, 2), inside, *[side] * dims))
    if d.chance(0.25):
        x = d.node(d.any_of("Relu", "Neg"), x)
    x, padded = _padded(d, x, dims)
    kernel = d.choose(3, 1, 2)
    separately = d.chance(0.2) and inside == outside
    if separately:
        groups = inside
    options: dict[str, Any] = {
        "group": groups,
        "kernel_shape": [kernel] * dims,
        "strides": d.choose(None, [2] * dims),
        "dilations": d.choose(None, [2] * dims) if kernel == 2 else None,
    }
    if padded or d.chance(0.4):
        options["auto_pad"] = d.choose(None, "SAME_UPPER", "SAME_LOWER", "VALID")
    else:
        options["pads"] = d.choose([kernel // 2] * 2 * dims, [0, 1] * dims)
    weight = d.weights((outside, inside // groups, *[kernel] * dims), scale=0.4)
    bias = [d.weights((outside,))] if d.chance(0.5) else []
    y = d.node("Conv", x, weight, *bias, **options)
    return _after_convolution(d, y, outside, dims)


def _padded(d: Draft, x: str, dims: int) -> tuple[str, bool]:
    """Add a Pad that a convolution can take over, or cannot."""
    if d.chance(0.75):
        return x, False
    pads = d.choose(
        [0, 0, *[1] * dims, 0, 0, *[1] * dims],
        [0, 1, *[0] * dims, 0, -1, *[0] * dims],
        [0, 0, *[-1] * dims, 0, 0, *[1] * dims],
    )
    fill = [d.fixed(d.choose(0, 1), "float32")] if d.chance(0.6) else []
    mode = d.choose("constant", "reflect", "edge")
    return d.node("Pad", x, d.fixed(pads), *(fill if mode == "constant" else []), mode=mode), True


def _with_residual(d: Draft, y: str) -> str:
    """Add an input, or y itself."""
    shape = d.shape_of(y)
    return d.swapped(
        d.choose("Add", "Sum"), y, d.choose(lambda: d.input("float32", shape), y, lambda: d.node("Relu", y))
    )


def _after_convolution(d: Draft, y: str, channels: int, dims: int) -> str:
    """Return one to three operations that optimisers fuse into a convolution, or that look like them."""
    ones = [1] * dims
    for _ in range(d.any_of(1, 2, 2, 3)):
        form = d.rng.randrange(8)
        if form == 0:
            shapes = ((channels, *ones), (1, channels, *ones), (1,), (), (1, *ones), d.shape_of(y), d.shape_of(y)[-1:])
            y = d.swapped("Add", y, d.weights(d.choose(*shapes)))
        elif form == 1:
            factors = ((channels, *ones), (1, channels, *ones), (1,), (), (1, 1, *ones), d.shape_of(y)[-1:])
            y = d.node(d.choose("Mul", "Div", "Sub"), y, d.weights(d.choose(*factors)))
        elif form == 2:
            y = batch_normalization(d, y, channels)
        elif form == 3:
            y = _with_residual(d, y)
        elif form == 4 and dims == 2 and min(d.shape_of(y)[2:]) >= 2:
            y = _pooled(d, y)
        elif form == 5 and dims == 2:
            perm = d.any_of([0, 2, 3, 1], [0, 3, 1, 2])
            return d.node("Transpose", d.node("Relu", d.node("Transpose", y, perm=perm)), perm=[0, 3, 1, 2])
        else:
            y = activation(d, y)
    return y


def _pooled(d: Draft, x: str) -> str:
    """Add a pooling."""
    form = d.rng.randrange(4)
    if form == 0:
        return d.node(d.any_of("GlobalAveragePool", "GlobalMaxPool"), x)
    options: dict[str, Any] = {
        "kernel_shape": [2, 2],
        "strides": d.choose([2, 2], [1, 1], None),
        "ceil_mode": d.choose(0, 1) if d.opset >= 19 else None,
        "pads": d.choose(None, [0, 0, 1, 1], [1, 1, 1, 1]),
    }
    if form == 1:
        return d.node("AveragePool", x, count_include_pad=d.choose(0, 1), **options)
    return d.node("MaxPool", x, **options)


def pad_pool(d: Draft) -> str:
    """Draw a Pad and a pooling that could take it over."""
    x = d.take("float32", shape=(1, d.any_of(2, 8), 4, 6))
    x, _ = _padded(d, x, 2)
    if d.boldly():
        x = d.node("Relu", x)
    return _pooled(d, x)


def conv_transpose(d: Draft) -> str:
    """Draw a ConvTranspose with norm, Add and activation after it."""
    inside, outside = d.any_of(2, 4), d.any_of(2, 4)
    x = d.take("float32", shape=(1, inside, 4, 4))
    y = d.node(
        "ConvTranspose",
        x,
        d.weights((inside, outside, 3, 3)),
        *([d.weights((outside,))] if d.chance(0.5) else []),
        strides=d.choose([2, 2], [1, 1]),
        pads=d.choose([1, 1, 1, 1], [0, 0, 1, 1]),
        output_padding=d.choose(None, [1, 1]),
    )
    return _after_convolution(d, y, outside, 2)


def focus(d: Draft) -> str:
    """Draw slices of every second row and column, their concatenation, and a convolution."""
    channels = d.any_of(1, 3)
    x = d.take("float32", shape=(1, channels, 4, 6))
    starts = [(0, 0), (1, 0), (0, 1), (1, 1)]
    starts = d.choose(starts, [(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 0), (0, 0), (0, 1), (1, 1)])
    parts = []
    for row, column in starts:
        part = d.node("Slice", x, d.fixed([row]), d.fixed([1 << 62]), d.fixed([2]), d.fixed([2]))
        parts.append(
            d.node("Slice", part, d.fixed([column]), d.fixed([1 << 62]), d.fixed([3]), d.fixed([d.choose(2, 2)]))
        )
    y = d.node("Concat", *parts, axis=1)
    return d.node("Conv", y, d.weights((4, channels * 4, 1, 1)))


def einsum(d: Draft) -> str:
    """Draw an Einsum and the operators that it stands for."""
    x = d.take("float32", shape=(2, 3, 4))
    equation = d.any_of("bij,bjk->bik", "bij,jk->bik", "bij,bik->bjk", "bij->bji", "bij->bi")
    shapes = {"bij,bjk->bik": (2, 4, 5), "bij,jk->bik": (4, 5), "bij,bik->bjk": (2, 3, 5)}
    if equation not in shapes:
        return d.node("Einsum", x, equation=equation)
    other = shapes[equation]
    return d.node("Einsum", x, d.any_of(lambda: d.weights(other), lambda: d.input("float32", other)), equation=equation)


PATTERNS = (
    matmul_add,
    gemm,
    matmul_transpose,
    matmul_norm,
    attention,
    embedded_attention,
    convolution,
    convolution,
    pad_pool,
    conv_transpose,
    focus,
    einsum,
)
