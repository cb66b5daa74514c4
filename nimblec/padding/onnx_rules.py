"""The rules of ONNX operators: of which kind each is, and which axes it concerns, at every opset."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
from onnx import TensorProto

from nimblec.padding.folds import (
    ABSORBING,
    Fold,
    IsNeutral,
    if_equal,
    is_least,
    is_low,
    is_one,
    is_zero,
    never,
    of_choice,
    to_any,
)
from nimblec.padding.onnx_call import Call, UnknownUseError, rule, shape_of, tensor_type
from nimblec.padding.rules import flat_along, product
from nimblec.padding.values import Number, Shape, Value, constant, without_fill

_ELEMENTWISE = (
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot",
    "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf",
    "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN",
    "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu",
    "Pow", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign",
    "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor", "com.microsoft.BiasGelu",
    "com.microsoft.FastGelu", "com.microsoft.Gelu", "com.microsoft.QuickGelu",
)  # fmt: skip


@rule(*_ELEMENTWISE)
def _elementwise(call: Call) -> list[Value]:
    absorbing = ABSORBING.get(call.kind.lower(), to_any)

    def fold(fills: Sequence[Number | None]) -> Number | None:
        return absorbing(fills) if any(fill is None for fill in fills) else call.evaluate(fills)

    return [call.step.elementwise(call.operands, call.shape, fold)]


@rule("Dropout")
def _dropout(call: Call) -> list[Value]:
    """Return the operand: dropout that draws numbers is refused before."""
    return [replace(call.operands[0], array=None), Value(call.shape)]


@rule("Constant", "ConstantOfShape", "EyeLike", "Range", "Shape", "Size")
def _constant(call: Call) -> list[Value]:
    return [call.step.unknown([] if call.kind in {"EyeLike", "Shape", "Size"} else call.operands, call.shape)]


_SUMS = ("ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare")
_NEUTRAL: Mapping[str, IsNeutral] = {
    **dict.fromkeys(_SUMS, is_zero),
    "ReduceLogSum": is_zero,
    "ReduceLogSumExp": is_low,
    "ReduceProd": is_one,
}


@rule(*_NEUTRAL, "ReduceMax", "ReduceMin", "ReduceMean", "ArgMax", "ArgMin")
def _reduce(call: Call) -> list[Value]:
    over = {call.axis(0)} if call.kind.startswith("Arg") else call.axes()
    is_neutral = _NEUTRAL.get(call.kind, never)
    if call.kind.endswith(("Max", "Min")):
        is_neutral = is_least(call.dtype(call.node.input[0]), of_minimum=call.kind.endswith("Min"))
    keeps = bool(call.attribute("keepdims", 1))
    return [call.step.reduce(call.operands[0], over, call.shape, is_neutral, keeps=keeps, fold=_kept(call.kind))]


def _kept(kind: str) -> Fold:
    """Return what a reduction over other axes makes of equal numbers."""
    if kind in _SUMS:
        return lambda fills: 0 if is_zero(fills[0]) else None
    return if_equal if kind in {"ReduceMean", "ReduceMax", "ReduceMin"} else to_any


@rule("Softmax", "LogSoftmax", "Hardmax")
def _softmax(call: Call) -> list[Value]:
    axis = call.axis(-1 if call.opset >= 13 else 1)
    over = {axis} if call.opset >= 13 else set(range(axis, call.rank))
    if call.kind == "Hardmax":
        return [call.step.whole(call.operands[0], over, call.shape)]
    return [call.step.softmax(call.operands[0], over, 0 if call.kind == "Softmax" else -np.inf)]


@rule("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "LpNormalization")
@rule("com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization")
def _norm(call: Call) -> list[Value]:
    x, *others = call.operands
    skipped = others[:1] if call.node.domain else []
    added = call.step.elementwise([x, *skipped], call.shape)
    over = {call.axis(-1)} if call.kind == "LpNormalization" else set(range(call.axis(-1), call.rank))
    normed = call.step.elementwise([call.step.whole(added, over, call.shape), *others], call.shape)
    if call.node.domain:
        return [normed] * len(call.types)
    return [normed, *(call.step.reduce(x, over, shape) for shape in call.shapes[1:])]


@rule("InstanceNormalization", "GroupNormalization", "LRN", "MeanVarianceNormalization")
def _norm_of_images(call: Call) -> list[Value]:
    over = {"InstanceNormalization": range(2, call.rank), "GroupNormalization": range(1, call.rank), "LRN": (1,)}
    x, *parameters = call.operands
    normed = call.step.whole(
        x, over.get(call.kind) or {axis % call.rank for axis in call.attribute("axes", (0, 2, 3))}, call.shape
    )
    return [_with_channels(call, normed, parameters)]


@rule("BatchNormalization")
def _batch_norm(call: Call) -> list[Value]:
    is_trained = call.attribute("training_mode", 0) or len(call.types) > 1
    if is_trained or not call.attribute("spatial", 1):
        raise UnknownUseError
    return [_with_channels(call, call.operands[0], call.operands[1:])]


def _with_channels(call: Call, x: Value, parameters: Sequence[Value]) -> Value:
    """Return the operand after arithmetic with a number for each channel, which is axis 1."""
    ones = (1,) * (call.rank - 2)
    columns = [call.step.reshape(value, (*value.shape, *ones)) for value in parameters]
    return call.step.elementwise([x, *columns], call.shape)


@rule("Conv", "ConvInteger", "QLinearConv", "ConvTranspose")
def _convolution(call: Call) -> list[Value]:
    x, *others = call.operands
    weight = others[2 if call.kind == "QLinearConv" else 0]
    spatial = range(2, call.rank)
    over = (1, *spatial) if call.kind == "ConvTranspose" else (1,)
    result = call.step.whole(x, over, call.shape)
    if not any(axis in x.axes for axis in over):
        windows = _windows(call, weight.shape[2:]) if call.kind != "ConvTranspose" else []
        fill = 0 if call.kind == "Conv" else None
        result = call.step.window(x, dict(zip(spatial, windows, strict=False)), call.shape, fill)
    return [call.step.after(others, result)]


@rule("MaxPool", "AveragePool", "LpPool")
def _pool(call: Call) -> list[Value]:
    x = call.operands[0]
    windows = dict(zip(range(2, call.rank), _windows(call, call.attributes["kernel_shape"]), strict=True))
    places = call.step.scan(call.step.whole(x, range(1, call.rank), call.shape), 0)  # counted from the first image on
    return [call.step.window(x, windows, call.shape, None), places]


def _windows(call: Call, kernel: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the elements, stride and padding before of windows along each spatial axis."""
    ones = [1] * len(kernel)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, call.attribute("dilations", ones), strict=True)]
    before = call.attribute("pads", [0] * 2 * len(kernel))[: len(kernel)]
    mode = call.attribute("auto_pad", b"").decode()
    if mode.startswith("SAME"):
        before = [(size - 1) // 2 if mode == "SAME_UPPER" else size // 2 for size in reach]
    return list(zip(reach, call.attribute("strides", ones), before, strict=True))


@rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(call: Call) -> list[Value]:
    return [call.step.reduce(call.operands[0], range(2, call.rank), call.shape)]


@rule("MatMul", "MatMulInteger", "QLinearMatMul")
def _matmul(call: Call) -> list[Value]:
    if call.kind == "MatMul":
        left, right = call.operands
        return [product(call.step, left, right, call.shape)]
    places = (0, 3) if call.kind == "QLinearMatMul" else (0, 1)
    rest = [value for i, value in enumerate(call.operands) if i not in places]
    left, right = (_of_any(call.operands[i]) for i in places)  # padding of 0 is another number less its zero point
    return [call.step.after(rest, product(call.step, left, right, call.shape))]


@rule("com.microsoft.FusedMatMul")
def _fused_matmul(call: Call) -> list[Value]:
    if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
        raise UnknownUseError
    left, right = (
        call.step.permute(value, [*range(len(value.shape) - 2), len(value.shape) - 1, len(value.shape) - 2])
        if call.attribute(name, 0)
        else value
        for value, name in zip(call.operands, ("transA", "transB"), strict=True)
    )
    batches = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return [product(call.step, left, right, _shaped(call, (*batches, left.shape[-2], right.shape[-1])))]


def _shaped(call: Call, shape: Shape) -> Shape:
    """Give the result of a call a shape that ONNX does not infer."""
    call.types = [tensor_type(call.scope.types[call.node.input[0]].tensor_type.elem_type, shape)]
    return shape


def _of_any(value: Value) -> Value:
    """Return the operand with any padding."""
    return replace(value, array=None, axes={axis: without_fill(carrier) for axis, carrier in value.axes.items()})


@rule("Gemm")
def _gemm(call: Call) -> list[Value]:
    one, other = "zm" if call.attribute("transA", 0) else "mz", "nz" if call.attribute("transB", 0) else "zn"
    found = call.step.contract(call.operands[:2], [one, other], "mn", call.shape)
    return [call.step.elementwise([found, *call.operands[2:]], call.shape)]


@rule("Det")
def _determinant(call: Call) -> list[Value]:
    return [call.step.reduce(call.operands[0], {call.rank - 2, call.rank - 1}, call.shape, keeps=False)]


@rule("Einsum")
def _einsum(call: Call) -> list[Value]:
    equation = call.attributes["equation"].decode().replace(" ", "")
    terms, arrow, result = equation.partition("->")
    if "." in equation:
        raise UnknownUseError
    if not arrow:
        result = "".join(sorted(label for label in set(terms) - {","} if terms.count(label) == 1))
    return [call.step.contract(call.operands, terms.split(","), result, call.shape)]


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(call: Call) -> list[Value]:
    return [call.step.reshape(call.operands[0], call.shape)]


@rule("Transpose")
def _transpose(call: Call) -> list[Value]:
    return [call.step.permute(call.operands[0], call.attribute("perm", range(call.rank)[::-1]))]


@rule("Expand", "Tile")
def _expand(call: Call) -> list[Value]:
    if call.kind == "Tile" and call.opset < 6:
        raise UnknownUseError
    return [call.step.expand(call.operands[0], call.shape)]


@rule("Concat")
def _concat(call: Call) -> list[Value]:
    axis = call.axis(1)
    found = call.step.concat(call.operands, axis, call.shape, if_equal)
    are_columns = axis == call.rank - 1 and all(value.shape[axis] == 1 for value in call.operands)
    return [replace(found, parts=tuple(call.operands)) if are_columns else found]


@rule("Split")
def _split(call: Call) -> list[Value]:
    axis = call.axis(0)
    starts = np.cumsum([0, *(shape[axis] for shape in call.shapes)]).tolist()
    parts = zip(starts, call.shapes, strict=False)
    return [call.step.crop(call.operands[0], {axis: start}, shape) for start, shape in parts]


@rule("Slice")
def _slice(call: Call) -> list[Value]:
    x, starts = call.operands[0], call.ints("starts", 1) or []
    axes = [axis % call.rank for axis in call.ints("axes", 3) or range(len(starts))]
    steps = dict(zip(axes, call.ints("steps", 4) or [1] * len(starts), strict=True))
    begins = {}
    for axis, start in zip(axes, starts, strict=True):
        size = x.shape[axis]
        begins[axis] = min(max(start + size if start < 0 else start, 0), size)
    return [call.step.crop(x, begins, call.shape, steps)]


@rule("Pad")
def _pad(call: Call) -> list[Value]:
    axes = [axis % call.rank for axis in call.ints("axes", 3) or range(call.rank)]
    widths = call.ints("pads", 1) or call.ints("paddings", 1) or []
    before = dict(zip(axes, widths, strict=False))
    value = call.inputs[2] if len(call.inputs) > 2 else None
    fill: Number | None = call.attribute("value", 0.0)
    if value is not None:
        fill = None if value.array is None else value.array.reshape(-1)[0].item()
    repeats = call.attribute("mode", b"constant") != b"constant"
    return [
        call.step.pad(call.operands[0], [before.get(a, 0) for a in range(call.rank)], call.shape, fill, repeats=repeats)
    ]


@rule("Gather")
def _gather(call: Call) -> list[Value]:
    return [call.step.gather(call.operands[0], call.operands[1], call.axis(0), call.shape)]


@rule("GatherElements", "ScatterElements", "Scatter")
def _along(call: Call) -> list[Value]:
    axis, (x, indices, *updates) = call.axis(0), call.operands
    if call.kind == "GatherElements":
        if axis in x.axes:
            raise UnknownUseError
        return [call.step.elementwise([indices, flat_along(x, axis)], call.shape)]
    if axis in updates[0].axes and indices.counts(axis, updates[0].axes[axis]) and not x.axes:
        # The updates of each position are added up.
        carrier = updates[0].axes[axis]
        rows = Value(call.shape, {axis: replace(carrier, inner=1, fill=None)})
        others = [flat_along(value, axis) for value in (x, indices, updates[0])]
        return [call.step.elementwise([rows, *others], call.shape)]
    if any(axis in value.axes for value in call.operands):
        raise UnknownUseError
    return [call.step.elementwise([x, *(flat_along(value, axis) for value in (indices, *updates))], call.shape)]


@rule("GatherND")
def _gather_nd(call: Call) -> list[Value]:
    data, indices = call.operands
    batch, lead, depth = call.attribute("batch_dims", 0), len(indices.shape) - 1, indices.shape[-1]
    if indices.parts and lead == 1 and not batch:
        columns = [call.step.reshape(part, part.shape[:1]) for part in indices.parts]
        return [call.step.pick(data, columns, call.shape)]
    if indices.array is not None and not batch and data.axes:
        return [call.step.pick_in_order(data, [*np.moveaxis(indices.array, -1, 0)], call.shape)]
    is_batched = all((axis in data.axes) == (axis in indices.axes) for axis in range(batch))
    if not is_batched or lead in indices.axes or any(batch <= axis < batch + depth for axis in data.axes):
        raise UnknownUseError
    axes = {axis: without_fill(carrier) for axis, carrier in indices.axes.items()}
    axes |= {axis - batch - depth + lead: c for axis, c in data.axes.items() if axis >= batch + depth}
    return [call.step.after([replace(value, axes={}) for value in call.operands], Value(call.shape, axes))]


@rule("ScatterND")
def _scatter_nd(call: Call) -> list[Value]:
    data, indices, updates = call.operands
    lead, depth = len(indices.shape) - 1, indices.shape[-1]
    if indices.axes or any(axis < depth for axis in data.axes) or any(axis < lead for axis in updates.axes):
        raise UnknownUseError
    for axis in range(lead):
        updates = flat_along(updates, axis)
    rows = call.step.reshape(updates, updates.shape[lead:])
    return [call.step.after([indices], call.step.elementwise([data, rows], call.shape, if_equal))]


@rule("OneHot")
def _one_hot(call: Call) -> list[Value]:
    indices, *rest = call.operands
    axis = call.attribute("axis", -1) % (len(indices.shape) + 1)
    column = call.step.reshape(indices, (*indices.shape[:axis], 1, *indices.shape[axis:]))
    return [call.step.after(rest, call.step.elementwise([column], call.shape))]


@rule("TopK")
def _top(call: Call) -> list[Value]:
    over = {call.axis(-1)}
    return [call.step.after(call.operands[1:], call.step.whole(call.operands[0], over, shape)) for shape in call.shapes]


@rule("CumSum", "CumProd")
def _cumulative(call: Call) -> list[Value]:
    (axis,) = call.ints("", 1) or [0]
    x = call.operands[0] if call.kind == "CumSum" else _of_any(call.operands[0])
    return [call.step.scan(x, axis % call.rank, backward=bool(call.attribute("reverse", 0)))]


@rule("Trilu")
def _triangle(call: Call) -> list[Value]:
    (diagonal,) = call.ints("", 1) or [0]
    rows, columns = call.shape[-2:]
    upper = call.attribute("upper", 1)
    lower = np.tri(rows, columns, diagonal - 1 if upper else diagonal, dtype=np.bool_)
    kept = constant(~lower if upper else lower)
    return [call.step.elementwise([kept, call.operands[0], constant(np.zeros(()))], call.shape, of_choice)]


@rule("QuantizeLinear", "DequantizeLinear", "com.microsoft.QuantizeLinear", "com.microsoft.DequantizeLinear")
def _quantize(call: Call) -> list[Value]:
    x, *scales = call.operands
    if call.attribute("block_size", 0):
        raise UnknownUseError
    ones = (1,) * (call.rank - call.axis(1) - 1)
    columns = [s if prod(s.shape) == 1 else call.step.reshape(s, (*s.shape, *ones)) for s in scales]
    return [call.step.elementwise([x, *columns], call.shape)]


@rule("Resize", "Upsample")
def _resize(call: Call) -> list[Value]:
    x = call.operands[0]
    if call.attribute("coordinate_transformation_mode", b"") == b"tf_crop_and_resize":
        raise UnknownUseError
    factors = [value.array for value in call.operands[1:]] + [np.array(call.attribute("scales", [1.0] * call.rank))]
    if any(array is None for array in factors) or call.attribute("axes", None):
        raise UnknownUseError
    over = {axis for axis in x.axes if call.shape[axis] != x.shape[axis]}
    for scales in factors:
        if scales is not None and scales.dtype.kind == "f" and scales.size == call.rank:
            over |= set(np.flatnonzero(scales != 1).tolist())
    return [call.step.whole(x, over, call.shape)]


_BATCHED: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (0,),
    "Col2Im": (0,),
    "STFT": (0,),
    "Attention": (0, 1, 2, 4, 5),
    "DeformConv": (0, 2, 4),
    "DepthToSpace": (0,),
    "GridSample": (0, 1),
    "SpaceToDepth": (0,),
}
"""Operators whose results for one entry of the first axis depend on that of these operands alone, and on others."""


@rule(*_BATCHED)
def _batched(call: Call) -> list[Value]:
    places = [i for i in _BATCHED[call.kind] if i < len(call.inputs)]
    if call.kind == "Attention" and len(call.inputs) > 3 and call.inputs[3] is not None and call.inputs[3].axes:
        places.append(3)
    operands = [value for i in places if (value := call.inputs[i]) is not None]
    rest = [value for i, value in enumerate(call.inputs) if i not in places and value is not None]
    if any(value.axes.keys() - {0} for value in operands):
        raise UnknownUseError
    rows = [_first_axis(value) for value in operands]
    row = call.step.after(rest, call.step.elementwise(rows, np.broadcast_shapes(*(of.shape for of in rows))))
    return [replace(row, shape=shape, stretched=frozenset()) for shape in call.shapes]


def _first_axis(value: Value) -> Value:
    """Return the operand as if it had its first axis alone."""
    for axis in range(1, len(value.shape)):
        value = flat_along(value, axis)
    return replace(value, shape=value.shape[:1], stretched=value.stretched & {0})


@rule("com.microsoft.MatMulNBits")
def _matmul_of_bits(call: Call) -> list[Value]:
    shape = _shaped(call, (*call.operands[0].shape[:-1], call.attributes["N"]))
    return [call.step.after(call.operands[1:], call.step.whole(call.operands[0], {call.rank - 1}, shape))]


@rule("LSTM", "GRU", "RNN")
def _recurrent(call: Call) -> list[Value]:
    x, lengths = call.operands[0], call.inputs[4] if len(call.inputs) > 4 else None
    initial = [value for value in call.inputs[5:7] if value is not None]
    if call.attribute("layout", 0) or any(value.axes.keys() - {1} for value in initial):
        raise UnknownUseError
    steps, batch = x.shape[:2]
    weights = [value for i, value in enumerate(call.inputs) if value is not None and i not in {0, 4, 5, 6}]
    rows = [flat_along(flat_along(value, 0), 2) for value in initial]
    rows += [call.step.reshape(lengths, (1, batch, 1))] if lengths is not None else []
    gates = call.step.after(weights, call.step.reduce(x, {2}, (steps, batch, 1)))
    is_ended = _ends_within(call, gates, lengths)
    is_causal = is_ended or call.attribute("direction", b"forward") == b"forward"
    states = call.step.scan(gates, 0) if is_causal else call.step.whole(gates, {0}, gates.shape)
    every = call.step.elementwise([states, *rows], (steps, batch, 1))
    if is_ended:
        # ONNX defines the outputs beyond the lengths as zeros.
        every = replace(every, axes={**every.axes, 0: replace(every.axes[0], fill=0)})
    every = call.step.reshape(every, (steps, 1, batch, 1))
    final = call.step.reduce(gates, {0}, (1, batch, 1), lambda _: is_ended)
    last = call.step.elementwise([final, *rows], (1, batch, 1))
    return [replace(value, shape=shape) for value, shape in zip((every, last, last), call.shapes, strict=False)]


def _ends_within(call: Call, steps: Value, lengths: Value | None) -> bool:
    """Return whether a recurrence reads no padding along its steps, since its lengths are of the call's own steps.

    A length is at most the number of steps, so lengths that depend on no padding end before it. Those that are a
    constant may be the size of the program.
    """
    if lengths is None or lengths.array is not None or lengths.axes or 0 not in steps.axes or not steps.is_plain(0):
        return False
    return steps.axes[0].shift == steps.axes[0].extent - call.scope.size


@rule("ai.onnx.ml.Binarizer", "ai.onnx.ml.CategoryMapper", "ai.onnx.ml.LabelEncoder", "ai.onnx.ml.OneHotEncoder")
def _encoded(call: Call) -> list[Value]:
    column = call.step.reshape(call.operands[0], (*call.operands[0].shape, *[1] * (len(call.shape) - call.rank)))
    return [call.step.elementwise([column], call.shape)]


@rule("ai.onnx.ml.ArrayFeatureExtractor")
def _feature(call: Call) -> list[Value]:
    x, indices = call.operands
    return [call.step.after([indices], call.step.whole(x, {call.rank - 1}, call.shape))]


_CLASSIFIERS = ("ai.onnx.ml.LinearClassifier", "ai.onnx.ml.SVMClassifier", "ai.onnx.ml.TreeEnsembleClassifier")
_REGRESSORS = {
    "ai.onnx.ml.LinearRegressor": "targets",
    "ai.onnx.ml.SVMRegressor": "",
    "ai.onnx.ml.TreeEnsemble": "n_targets",
    "ai.onnx.ml.TreeEnsembleRegressor": "n_targets",
}
"""The attribute that is the number of columns of the result, by default 1."""


@rule("ai.onnx.ml.Imputer", "ai.onnx.ml.Normalizer", "ai.onnx.ml.Scaler", *_CLASSIFIERS, *_REGRESSORS)
def _rows_of_features(call: Call) -> list[Value]:
    (x,) = call.operands
    if call.rank != 2:
        raise UnknownUseError
    columns, labels = call.attribute(_REGRESSORS.get(call.kind, ""), 1), []
    if call.kind in _CLASSIFIERS:
        labels = [tensor_type(TensorProto.INT64, x.shape[:1])]
        columns = max(len(values) for name, values in call.attributes.items() if name.startswith("classlabels"))
    if shape_of(call.types[0]) is None:
        call.types = [*labels, tensor_type(TensorProto.FLOAT, (x.shape[0], columns))]
    return [call.step.whole(x, {1}, shape) for shape in call.shapes]
