"""Elementwise arithmetic, casts, conditions and constants."""

import math

import numpy as np
from onnx import GraphProto, helper

from fuzz.patterns.draft import TYPES, Draft

_NUMBERS = ("float32", "float32", "float16", "float64", "int32", "int64")


def identities(d: Draft) -> str:
    """Draw operations by 0, 1 or the same number twice, whose constants may add a dimension."""
    dtype = d.any_of(*_NUMBERS)
    x = d.take(dtype)
    for _ in range(d.any_of(1, 1, 2, 3)):
        operator, value = d.any_of(("Add", 0), ("Sub", 0), ("Mul", 1), ("Div", 1), ("Mul", 0), ("Mul", 2), ("Div", 3))
        shape = d.any_of((), (), (1,), (1, 1), (1,) * 5, d.shape_of(x))
        constant = d.constant(np.full(shape, d.choose(value, 1, 2)), dtype)
        x = (
            d.swapped(operator, x, constant)
            if operator in {"Add", "Mul"} or d.boldly()
            else d.node(operator, x, constant)
        )
    return x


def integer_division(d: Draft) -> str:
    """Draw 1 / n * y and its relatives, in integers and in floats."""
    dtype = d.any_of("int32", "int64", "int32", "int64", "float32", "float16")
    shape = d.shape(d.any_of(1, 2))
    kind = "divisor"
    n = d.input(dtype, d.choose(shape, (1,), (*shape, 1)), kind)
    y = d.take(dtype, shape=shape)
    number = d.scalar(d.choose(1, 2, 7, -1), dtype)
    form = d.rng.randrange(6)
    if form == 0:
        return d.swapped("Mul", d.node("Div", number, n), y)
    if form == 1:
        return d.node("Div", d.swapped("Mul", y, number), n)
    if form == 2:
        return d.node("Mul", d.node("Div", y, n), n)
    if form == 3:
        return d.node("Div", d.node("Div", number, n), d.scalar(d.any_of(1, 2, 3, -3), dtype))
    if form == 4:
        return d.node("Sub", y, d.node("Mul", d.node("Div", y, n), n))
    return d.node("Div", d.node("Div", y, n), d.input(dtype, shape, kind))


def modulo(d: Draft) -> str:
    """Draw remainders of both signs, and the same by Div, Mul and Sub."""
    dtype = d.any_of("int32", "int64", "int8", "float32", "float16")
    x = d.take(dtype)
    constant = d.scalar(d.any_of(1, 2, 3, -3, 7), dtype)
    fmod = 1 if dtype.startswith("float") else d.any_of(0, 0, 1)
    y = d.node("Mod", x, constant, fmod=fmod)
    return d.node("Add", y, d.node("Mul", d.node("Div", x, constant), constant)) if d.chance(0.5) else y


def powers(d: Draft) -> str:
    """Draw Pow, Sqrt, Reciprocal and Div in place of one another."""
    dtype = d.any_of("float32", "float32", "float64", "float16", "int32", "int64")
    x = d.take(dtype)
    is_float = dtype.startswith("float")
    for _ in range(d.any_of(1, 2, 2, 3)):
        form = d.rng.randrange(8 if is_float else 3)
        if form == 0:
            x = d.node("Pow", x, d.scalar(d.any_of(2, 3, 1, 0, 4), d.choose(dtype, "float32", "int64")))
        elif form == 1:
            x = d.node("Mul", x, x)
        elif form == 2:
            x = d.node("Abs", x)
        elif form == 3:
            x = d.node("Sqrt", d.node("Abs", x))
        elif form == 4:
            x = d.node("Reciprocal", x)
        elif form == 5:
            x = d.node("Div", d.scalar(d.choose(1, 2, -1), dtype), x)
        elif form == 6:
            x = d.node("Pow", d.node("Abs", x), d.scalar(d.any_of(0.5, -0.5, -1, 2, 1.5), dtype))
        else:
            x = d.node("Mul", x, d.node("Reciprocal", d.node("Sqrt", d.node("Abs", x))))
    return x


def casts(d: Draft) -> str:
    """Draw casts there and back, islands of another type, casts that change nothing."""
    dtype = d.any_of("float32", "float32", "float16", "float64", "int32", "int64", "int8", "uint8", "bool")
    x = d.take(dtype)
    floats = ("float32", "float16", "float64")
    for _ in range(d.any_of(1, 2, 3, 4)):
        current = d.type_of(x)[0]
        if d.chance(0.4):
            x = d.node("Cast", x, to=d.any_of(*(TYPES[dtype] for dtype in (current, *floats, "int32", "int64"))))
        elif current in floats:
            x = d.cast(
                d.node(d.any_of("Relu", "Sigmoid", "Neg", "Sqrt"), d.cast(x, d.any_of(*floats))),
                d.any_of(current, *floats),
            )
        else:
            x = d.cast(d.cast(x, d.any_of("int32", "int64", "float32", "bool", "uint8", "int8")), current)
    return x


def conditions(d: Draft) -> str:
    """Draw Where, Not and comparisons, nested and broadcast."""
    shape = d.shape(d.any_of(1, 2, 3))
    dtype = d.any_of("float32", "float32", "int64", "int32", "float16")
    x = d.take(dtype, shape=shape)
    y = d.any_of(lambda: d.input(dtype, shape), lambda: d.scalar(d.any_of(0, 1, -3), dtype))
    form = d.rng.randrange(5)
    if form == 0:
        condition = d.input("bool", d.choose(shape, shape[-1:], (1,) * len(shape)))
    elif form == 1:
        condition = d.constant(d.integers(0, 2, d.choose((), shape, (1,))), "bool")
    elif form == 2:
        condition = d.node(d.any_of("Equal", "Greater", "Less"), x, d.scalar(d.any_of(0, 1), dtype))
    elif form == 3:
        condition = d.node("Equal", x, x)
    else:
        condition = d.cast(d.input(d.any_of("int64", "float32", "uint8"), shape), "bool")
    inverted = d.node("Not", condition) if d.chance(0.7) else condition
    if d.chance(0.3):
        inverted = d.node("Not", inverted)
    result = d.node("Where", inverted, x, y) if d.chance(0.5) else d.node("Where", inverted, y, x)
    for _ in range(d.choose(1, 0, 2) - 1):
        result = d.node("Add", result, d.node("Where", inverted, y, x))
    if d.boldly():
        result = d.node("Where", condition, result, d.node("Where", d.node("Not", inverted), y, x))
    return result


def clips(d: Draft) -> str:
    """Draw Relu, Clip, Min and Max over one another."""
    dtype = d.any_of("float32", "float32", "float32", "float16", "float64", "int32", "int8")
    x = d.take(dtype)
    for _ in range(d.any_of(1, 2, 2, 3)):
        form = d.rng.randrange(6)
        if form <= 1 and (dtype.startswith("float") or d.opset >= 14):
            x = d.node("Relu", x)
        elif form == 2:
            x = d.node(d.any_of("Max", "Min"), x, d.scalar(d.any_of(0, 1, -1, 6), dtype))
        else:
            low = d.any_of("", lambda: d.fixed(d.any_of(0, -1, 1, -6), dtype))
            high = d.any_of("", lambda: d.fixed(d.any_of(6, 1, 0, 127), dtype))
            x = d.node("Clip", x, *((low, high) if high else (low,) if low else ()))
    return x


def hard_activations(d: Draft) -> str:
    """Draw HardSigmoid and HardSwish, as operators and by nodes; Mish and Softplus."""
    dtype = d.any_of("float32", "float32", "float32", "float16")
    x = d.take(dtype)
    form = d.rng.randrange(6)
    if form == 0:
        added = d.swapped("Add", x, d.scalar(d.choose(3, 2), dtype))
        clipped = d.node("Clip", added, d.fixed(0, dtype), d.fixed(d.choose(6, 5), dtype))
        if d.chance(0.5):
            return d.node("Div", d.swapped("Mul", x, clipped), d.scalar(6, dtype))
        return d.swapped("Mul", x, d.node("Div", clipped, d.scalar(d.choose(6, 3), dtype)))
    if form == 1:
        y = d.node("HardSigmoid", x, alpha=d.choose(1 / 6, 0.2), beta=d.choose(0.5, 0.3))
        return d.swapped("Mul", x, y) if d.chance(0.7) else y
    if form == 2 and d.opset >= 14:
        return d.node("HardSwish", x)
    if form == 3:
        return d.node("Mul", x, d.node("Tanh", d.node("Softplus", x)))
    if form == 4:
        return d.node("LeakyRelu", d.node("LeakyRelu", x, alpha=d.choose(0.1, -0.5)), alpha=0.3)
    return d.swapped("Mul", d.node("Sigmoid", x), x)


def gelu(d: Draft) -> str:
    """Return the exact GELU by nodes, in both of its orders, at times after a bias."""
    dtype = d.choose("float32", "float16", "float64")
    x = _biased(d, dtype)
    root = d.choose(math.sqrt(2), 1.5, 1.41421)
    inner = d.node("Div", x, d.scalar(root, dtype)) if d.chance(0.6) else d.swapped("Mul", x, d.scalar(1 / root, dtype))
    added = d.swapped("Add", d.node("Erf", inner), d.scalar(d.choose(1, 2), dtype))
    half = d.choose(0.5, 0.6)
    if d.chance(0.5):
        return d.swapped("Mul", d.swapped("Mul", x, added), d.scalar(half, dtype))
    if d.chance(0.5):
        return d.swapped("Mul", d.swapped("Mul", x, d.scalar(half, dtype)), added)
    return d.swapped("Mul", d.choose(x, lambda: d.node("Neg", x)), d.swapped("Mul", added, d.scalar(half, dtype)))


def fast_gelu(d: Draft) -> str:
    """Draw GELU by tanh, in the forms of several exporters."""
    dtype = d.choose("float32", "float16")
    x = _biased(d, dtype)
    factor, root = (d.scalar(d.choose(*values), dtype) for values in ((0.044715, 0.05), (math.sqrt(2 / math.pi), 0.8)))
    form = d.rng.randrange(4)
    if form == 0:
        curve = d.swapped("Add", d.swapped("Mul", x, d.swapped("Mul", x, factor)), d.scalar(d.choose(1, 2), dtype))
        inner = d.swapped("Mul", curve, d.swapped("Mul", x, root))
    else:
        cube = d.node("Mul", x, d.node("Mul", x, x)) if form == 1 else d.node("Pow", x, d.scalar(d.choose(3, 2), dtype))
        inner = d.swapped("Mul", d.swapped("Add", x, d.swapped("Mul", cube, factor)), root)
    added = d.swapped("Add", d.node("Tanh", inner), d.scalar(d.choose(1, 0.9), dtype))
    if d.chance(0.8):
        return d.swapped("Mul", d.swapped("Mul", x, d.scalar(d.choose(0.5, 0.4), dtype)), added)
    return d.swapped("Mul", x, d.swapped("Mul", added, d.scalar(d.choose(0.5, 0.4), dtype)))


def quick_gelu(d: Draft) -> str:
    """Draw the sigmoid of GELU and SwiGLU, x * sigmoid(alpha * x); and the operators Gelu and Swish."""
    dtype = d.choose("float32", "float16", "float64")
    if d.chance(0.3):
        x = d.take(dtype, shape=(2, 3, 8))
        gate, up = d.split(x, [4, 4], d.choose(-1, 2))
        (gate, up) = (up, gate) if d.boldly() else (gate, up)
        return d.swapped("Mul", d.swapped("Mul", gate, d.node("Sigmoid", gate)), up)
    x = _biased(d, dtype)
    if d.opset >= 20 and d.chance(0.3):
        return d.node("Gelu", x, approximate=d.any_of("none", "tanh", None))
    inner = d.swapped("Mul", x, d.scalar(d.choose(1.702, 1, 0), dtype)) if d.chance(0.7) else x
    return d.swapped("Mul", d.choose(x, inner), d.node("Sigmoid", inner))


def _biased(d: Draft, dtype: str) -> str:
    """Add a bias of the last dimension, or do not."""
    if d.chance(0.5):
        return d.take(dtype)
    x = d.take(dtype, rank=d.any_of(2, 3))
    shape = d.shape_of(x)
    biases = (shape[-1:], shape, (1,), (*shape[:-1], 1), (2, *shape))
    return d.swapped("Add", x, d.weights(d.choose(*biases), dtype))


def bias_softmax(d: Draft) -> str:
    """Draw a softmax of a masked sum, over any axis."""
    dtype = d.choose("float32", "float16", "float64")
    rank = d.any_of(2, 3, 4, 4)
    x = d.take(dtype, rank=rank)
    shape = d.shape_of(x)
    axis = d.choose(-1, *range(-rank, rank))
    masks = (shape, (shape[0], *(1 for _ in shape[1:-1]), shape[-1]), shape[-1:], (1,), (*shape[:-1], 1))
    mask = d.input(dtype, d.rng.choice(masks)) if d.chance(0.7) else d.weights(d.rng.choice(masks), dtype, 3)
    added = d.swapped("Add", x, mask)
    return d.node(d.choose("Softmax", "LogSoftmax", "Hardmax"), added, axis=axis)


def dropouts(d: Draft) -> str:
    """Draw Dropout and Identity that do nothing, with masks, biases and residuals."""
    dtype = d.choose("float32", "float16")
    x = d.take(dtype, rank=d.any_of(2, 3))
    shape = d.shape_of(x)
    if d.chance(0.4):
        x = d.swapped("Add", x, d.weights(d.choose(shape[-1:], shape), dtype))
    ratio = d.fixed(d.any_of(0.0, 0.5, 0.1), d.choose(dtype, "float32"))
    mode = [d.fixed(False, "bool")] if d.chance(0.5) else []
    count = d.choose(1, 2)
    given = [ratio, *mode] if d.opset >= 12 and d.chance(0.7) else []
    outputs = d.node_of("Dropout", x, *given, count=count)
    y = d.node("Where", outputs[1], outputs[0], d.scalar(7, dtype)) if count == 2 else outputs[0]
    if d.chance(0.4):
        y = d.swapped("Add", y, d.choose(lambda: d.input(dtype, shape), x))
    return d.node("Identity", y) if d.chance(0.5) else y


def constants(d: Draft) -> str:
    """Draw subgraphs of constants and of shapes."""
    dtype = d.any_of("float32", "int64", "int32", "float16", "bool")
    x = d.take("float32" if dtype == "bool" else dtype)
    shape = d.shape_of(x)
    form = d.rng.randrange(9)
    if form == 7:
        return d.node("Add", x, d.unsqueeze(d.weights(shape[-1:], d.type_of(x)[0]), d.any_of([0], [-1], [0, 1])))
    if form == 8:
        return d.node("Reshape", x, d.node("Shape", d.cast(x, d.any_of("float32", "int32"))))
    if form == 0:
        length = d.node("Gather", d.node("Shape", x), d.fixed(d.rng.randrange(len(shape))))
        return d.node("Mul", x, d.node("Cast", length, to=TYPES[d.type_of(x)[0]]))
    if form == 1:
        filled = d.node("ConstantOfShape", d.node("Shape", x))
        return d.node("Add", x, d.cast(filled, d.type_of(x)[0]))
    if form == 2:
        made = d.node("Range", d.fixed(0), d.fixed(shape[-1]), d.fixed(1))
        return d.node("Add", x, d.cast(made, d.type_of(x)[0]))
    if form == 3:
        folded = d.node("Mul", d.weights(shape[-1:]), d.node("Sqrt", d.fixed([4.0], "float32")))
        return d.node("Add", x, d.cast(folded, d.type_of(x)[0]))
    if form == 4:
        size = d.node("Size", x)
        return d.node("Add", x, d.cast(size, d.type_of(x)[0]))
    if form == 5:
        return d.node("Expand", x, d.node("Concat", d.fixed([2]), d.node("Shape", x), axis=0))
    sliced = d.node("Slice", d.node("Shape", x), d.fixed([0]), d.fixed([d.any_of(1, -1, 1 << 62)]))
    target = d.node("Concat", sliced, d.fixed([-1]), axis=0)
    return d.node("Reshape", x, target)


def branches(d: Draft) -> str:
    """Return an If whose condition varies or not, with a pattern in a branch."""
    x = d.take("float32", rank=2)
    condition = d.constant(d.any_of(True, False), "bool") if d.chance(0.6) else d.input("bool", ())
    number = len(d.nodes)

    def branch(name: str) -> GraphProto:
        body = Draft(d.rng, d.opset, 0.2, prefix=f"{name}{number}_")
        made = body.node("Div", x, body.fixed(math.sqrt(2), "float32"))
        made = body.node("Add", body.node("Erf", made), body.fixed(1.0, "float32"))
        made = body.node("Mul", body.node("Mul", x, made), body.fixed(d.any_of(0.5, 1.0), "float32"))
        graph = body.model([made]).graph
        graph.name = name
        graph.output[0].CopyFrom(helper.make_tensor_value_info(made, TYPES["float32"], d.shape_of(x)))
        return graph

    return d.node("If", condition, then_branch=branch("yes"), else_branch=branch("no"))


def labels(d: Draft) -> str:
    """Draw label encoders one after the other."""
    x = d.take("int64", rank=d.any_of(1, 2))
    for _ in range(d.any_of(1, 2, 2)):
        keys = list(range(d.any_of(-2, 0), 5))
        values = [d.rng.randrange(-3, 6) for _ in keys]
        x = d.node(
            "LabelEncoder",
            x,
            domain="ai.onnx.ml",
            keys_int64s=keys,
            values_int64s=values,
            default_int64=d.any_of(-1, 3),
        )
    return x


PATTERNS = (
    identities,
    integer_division,
    modulo,
    powers,
    casts,
    conditions,
    clips,
    hard_activations,
    gelu,
    fast_gelu,
    quick_gelu,
    bias_softmax,
    dropouts,
    constants,
    branches,
    labels,
)
