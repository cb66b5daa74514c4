"""Reductions, and operators that move data: what an optimiser removes, merges or reorders."""

from typing import TYPE_CHECKING

import numpy as np

from fuzz.patterns.draft import Draft

if TYPE_CHECKING:
    from collections.abc import Callable

_DTYPES = ("float32", "float32", "float32", "int64", "int32", "float16")
_END = (1 << 63) - 1
"""The end of a slice that goes on to the last element."""


def reductions(d: Draft) -> str:
    """Draw reductions in a row, over given, negative, all or no axes."""
    dtype = d.any_of(*_DTYPES)
    x = d.take(dtype, rank=d.any_of(2, 3, 4))
    operators = ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL1", "ReduceMean"]
    if dtype.startswith("float"):
        operators += ["ReduceL2", "ReduceLogSumExp", "ReduceMean"]
    for _ in range(d.any_of(1, 2, 2, 3)):
        rank = len(d.shape_of(x))
        if rank == 0:
            break
        operator = d.rng.choice(operators)
        keepdims = d.any_of(0, 1)
        axes = d.rng.sample(range(rank), d.rng.randint(1, min(2, rank)))
        axes = [axis - rank if d.chance(0.4) else axis for axis in axes]
        takes_none = operator == "ReduceSum" or d.opset >= 18
        if d.chance(0.25):
            empty = [d.fixed(np.zeros(0))] if takes_none and d.chance(0.5) else []
            noop = d.any_of(0, 1) if takes_none else None
            x = d.node(operator, x, *empty, keepdims=keepdims, noop_with_empty_axes=noop)
        else:
            x = d.reduce(operator, x, axes, keepdims)
        if d.chance(0.3) and keepdims == 0:
            x = d.unsqueeze(x, [0])
        elif d.chance(0.2):
            x = d.node("Squeeze", x)
    return x


def arg_reductions(d: Draft) -> str:
    """Draw ArgMax, ArgMin, TopK and CumSum."""
    x = d.take(d.any_of("float32", "int32", "int64"), rank=d.any_of(2, 3))
    axis = d.any_of(-1, 0, 1)
    form = d.rng.randrange(4)
    if form == 0:
        return d.node(
            d.any_of("ArgMax", "ArgMin"), x, axis=axis, keepdims=d.any_of(0, 1), select_last_index=d.any_of(0, 1)
        )
    if form == 1:
        values, indices = d.node_of("TopK", x, d.fixed([1]), count=2, axis=axis, largest=d.any_of(0, 1))
        return values if d.chance(0.5) else indices
    return d.node("CumSum", x, d.fixed(axis), exclusive=d.any_of(0, 1), reverse=d.any_of(0, 1))


def shapes(d: Draft) -> str:
    """Draw Reshape, Flatten, Squeeze and Unsqueeze in a row."""
    x = d.take(d.any_of(*_DTYPES))
    for _ in range(d.any_of(1, 2, 3, 3)):
        shape = d.shape_of(x)
        total = int(np.prod(shape))
        form = d.rng.randrange(6)
        if form == 0:
            targets = [
                [-1],
                [total],
                [1, -1],
                [*shape, 1],
                [0] * len(shape),
                [*shape[:-1], -1],
                [0] * (len(shape) - 1) + [-1],
            ]
            x = d.node("Reshape", x, d.fixed(d.rng.choice(targets)))
        elif form == 1:
            x = d.node("Flatten", x, axis=d.rng.randint(-len(shape), len(shape)))
        elif form == 2:
            x = d.unsqueeze(x, d.any_of([0], [-1], [0, 1], [0, -1]))
        elif form == 3 and 1 in shape:
            x = d.squeeze(x, [shape.index(1)]) if d.chance(0.7) else d.node("Squeeze", x)
        elif form == 4:
            x = d.node("Reshape", x, d.node("Shape", x))
        else:
            x = d.node(d.any_of("Identity", "Neg", "Abs"), x)
    return x


def computed_shapes(d: Draft) -> str:
    """Draw a Reshape to a shape that is put together from dimensions."""
    x = d.take("float32", rank=d.any_of(3, 4))
    shape = d.shape_of(x)
    rank = len(shape)
    parts = []
    for axis in range(rank):
        form = d.rng.randrange(4)
        if form == 0:
            parts.append(d.fixed([shape[axis]]))
            continue
        index = d.fixed(d.choose([axis], axis))
        size = d.node("Gather", d.node("Shape", x), index, axis=0)
        if d.shape_of(index) == ():
            size = d.unsqueeze(size, [0])
        parts.append(size)
    if d.chance(0.5):
        (_, *parts) = (parts.pop(), d.fixed([-1]), *parts)
    return d.node("Reshape", d.node("Relu", x) if d.boldly() else x, d.node("Concat", *parts, axis=0))


def _moved(d: Draft, x: str, dtype: str) -> str:
    """Add an operator that a Transpose can be pushed through."""
    shape = d.shape_of(x)
    rank = len(shape)
    axis = d.rng.randrange(-rank, rank) if rank else 0
    makers: list[Callable[[], str]] = [
        lambda: d.node("Abs", x),
        lambda: d.swapped("Add", x, d.constant(d.normal(d.any_of(shape, shape[-1:], (), (1,))) * 3, dtype)),
        lambda: d.node("Concat", x, x, axis=axis),
        lambda: d.split(x, [shape[axis]], axis)[0],
        lambda: d.node("Slice", x, d.fixed([0]), d.fixed([-1 if shape[axis] > 1 else 1]), d.fixed([axis])),
        lambda: d.reduce(d.any_of("ReduceSum", "ReduceMax"), x, [axis], d.any_of(0, 1)),
        lambda: d.unsqueeze(x, [d.any_of(0, -1, 1)]),
        lambda: d.node("Gather", x, d.fixed(d.any_of([0], 0)), axis=axis),
        lambda: d.node("Pad", x, d.fixed([d.any_of(0, 1) for _ in range(2 * rank)])),
        lambda: d.node("Tile", x, d.fixed([d.any_of(1, 2) for _ in range(rank)])),
        lambda: d.node("ArgMax", x, axis=axis, keepdims=1),
        lambda: d.node("Transpose", x, perm=d.rng.sample(range(rank), rank)),
        lambda: d.node("Where", d.input("bool", shape), x, x),
    ]
    if dtype.startswith("float"):
        makers += [
            lambda: d.node("Softmax", x, axis=axis),
            lambda: d.node("Relu", x),
            lambda: d.node("Clip", x, d.fixed(0, dtype)),
            lambda: d.node("Mul", x, d.node("Sigmoid", x)),
        ]
    return d.rng.choice(makers)()


def transposes(d: Draft) -> str:
    """Draw transposes pushed through operators, which cancel out or do not."""
    dtype = d.choose("float32", "int64", "float16")
    rank = d.any_of(2, 3, 4, 4)
    x = d.take(dtype, rank=rank)
    perm = d.rng.sample(range(rank), rank)
    y = d.node("Transpose", x, perm=perm)
    for _ in range(d.any_of(0, 1, 2, 3)):
        y = _moved(d, y, dtype)
        if d.nodes[-1].op_type == "ArgMax":
            return y
    rank = len(d.shape_of(y))
    inverse = [perm.index(i) for i in range(len(perm))]
    if rank == len(perm) and d.chance(0.7):
        y = d.node("Transpose", y, perm=d.choose(inverse, perm))
    return y


def images(d: Draft) -> str:
    """Draw transposes of images around pooling, Resize, DepthToSpace and the like."""
    x = d.take("float32", shape=(1, 4, 6, 4))
    y = d.node("Transpose", x, perm=d.choose([0, 3, 1, 2], [0, 2, 3, 1]))
    makers: list[Callable[[str], str]] = [
        lambda v: d.node("MaxPool", v, kernel_shape=[2, 2], strides=[2, 2]),
        lambda v: d.node("AveragePool", v, kernel_shape=[2, 2]),
        lambda v: d.node("GlobalAveragePool", v),
        lambda v: d.node(
            "Resize", v, "", d.fixed([1, 1, 2, 2], "float32"), mode=d.any_of("nearest", "linear", "cubic")
        ),
        lambda v: d.node("DepthToSpace", v, blocksize=2, mode=d.any_of("DCR", "CRD")),
        lambda v: d.node("SpaceToDepth", v, blocksize=2),
        lambda v: d.node("Conv", v, d.weights((4, 4, 3, 3)), pads=[1, 1, 1, 1]),
        lambda v: d.node("PRelu", v, d.weights((4, 1, 1))),
        lambda v: d.node("InstanceNormalization", v, d.weights((4,)), d.weights((4,))),
    ]
    y = d.rng.choice(makers)(y)
    if d.chance(0.5):
        y = d.node("Relu", y)
    return d.node("Transpose", y, perm=d.choose([0, 2, 3, 1], [0, 3, 1, 2]))


def slices(d: Draft) -> str:
    """Draw slices that take all, nothing, less, or from the end; one after the other."""
    x = d.take(d.any_of(*_DTYPES), rank=d.any_of(2, 3))
    for _ in range(d.any_of(1, 2, 2)):
        shape = d.shape_of(x)
        axis = d.rng.randrange(-len(shape), len(shape))
        start, end, step = d.any_of(
            (0, _END, 1),
            (0, shape[axis], 1),
            (0, 1 << 31, 1),
            (-1, -_END, -1),
            (0, 2, 1),
            (-2, _END, 1),
            (0, _END, 2),
            (-100, 100, 1),
        )
        names = [d.fixed([start]), d.fixed([end]), d.fixed([axis])]
        if step != 1 or d.chance(0.5):
            names.append(d.fixed([step]))
        x = d.node("Slice", x, *names)
    return x


def gathers(d: Draft) -> str:
    """Draw gathers of constant indices: in a row, side by side, as slices."""
    x = d.take(d.any_of(*_DTYPES), shape=d.any_of((3, 4), (2, 3, 4), (4, 3)))
    shape = d.shape_of(x)
    axis = d.rng.randrange(-len(shape), len(shape))
    size = shape[axis]
    form = d.rng.randrange(4)
    if form == 0:
        indices = d.any_of(range(size), range(1, size), range(size - 1, -1, -1), range(0, size, 2), [0, 0, 1], [-1])
        return d.node("Gather", x, d.fixed(list(indices), d.any_of("int64", "int32")), axis=axis)
    if form == 1:
        made = d.node("Range", d.fixed(d.choose(0, 1)), d.fixed(size), d.fixed(d.choose(1, 2)))
        return d.node("Gather", x, made, axis=axis)
    order = d.choose(list(range(size)), list(reversed(range(size))), [0] * size, list(range(size - 1)))
    rank_0 = d.choose(True, False)
    if form == 2:
        parts = [d.node("Gather", x, d.fixed(i if rank_0 else [i]), axis=d.choose(axis, 0)) for i in order]
    else:
        parts = [d.node("Slice", x, d.fixed([i]), d.fixed([i + 1]), d.fixed([axis])) for i in order]
    total = parts[0]
    for part in parts[1:]:
        total = d.node("Sub", total, part)
    return total


def splits(d: Draft) -> str:
    """Draw Split and Concat, in order or not."""
    x = d.take(d.any_of(*_DTYPES), shape=d.any_of((4, 6), (2, 4, 6)))
    axis = d.any_of(-1, 0, 1)
    size = d.shape_of(x)[axis]
    sizes = d.any_of([size], [size // 2, size // 2], [1, size - 1])
    parts = d.split(x, sizes, axis)
    if d.chance(0.4):
        parts = [d.node(d.any_of("Neg", "Identity", "Abs"), part) for part in parts]
    order = d.choose(parts, list(reversed(parts)), parts * 2)
    return d.node("Concat", *order, axis=d.choose(axis, axis))


def expansions(d: Draft) -> str:
    """Draw Expand, Tile, Pad and Concat that change nothing, or little."""
    dtype = d.any_of(*_DTYPES)
    x = d.take(dtype, rank=d.any_of(1, 2, 3))
    for _ in range(d.any_of(1, 2)):
        shape = d.shape_of(x)
        form = d.rng.randrange(6)
        if form == 0:
            x = d.node("Expand", x, d.fixed(d.choose([1] * len(shape), [2, *shape], list(shape), [1])))
        elif form == 1:
            x = d.node("Tile", x, d.fixed(d.choose([1] * len(shape), [2] * len(shape))))
        elif form == 2:
            x = d.node("Pad", x, d.fixed(d.choose([0] * 2 * len(shape), [1] * 2 * len(shape))))
        elif form == 3:
            x = d.node("Concat", x, axis=d.any_of(0, -1))
        elif form == 4:
            x = d.node(d.any_of("Sum", "Max", "Min"), x) if dtype.startswith("float") else x
            x = d.node("Identity", x)
        else:
            x = d.node("Expand", x, d.node("Shape", x))
    return x


def repeated(d: Draft) -> str:
    """Draw equal nodes of equal and of nearly equal constants and attributes."""
    dtype = d.any_of("float32", "float16", "int64")
    x = d.take(dtype, rank=2)
    shape = d.shape_of(x)
    values = d.normal(shape[-1:]) * 2
    a = d.node("Add", x, d.constant(values, dtype))
    b = d.node("Add", x, d.constant(values + d.choose(0, 1), dtype))
    form = d.rng.randrange(3)
    if form == 0:
        a, b = d.node("Transpose", a), d.node("Transpose", b, perm=d.choose([1, 0], [0, 1]))
        return d.node("Concat", a, b, axis=0) if d.shape_of(a) == d.shape_of(b) else d.node("Neg", a)
    if form == 1:
        a = d.reduce("ReduceSum", a, [d.choose(1, 0)], 1)
        return d.node("Mul", a, d.reduce("ReduceSum", b, [1], 1)) if d.chance(0.5) else d.node("Sub", b, a)
    return d.node(d.any_of("Sub", "Mul"), a, b)


PATTERNS = (
    reductions,
    arg_reductions,
    shapes,
    computed_shapes,
    transposes,
    transposes,
    images,
    slices,
    gathers,
    splits,
    expansions,
    repeated,
)
