"""Evaluate operators on values of unknown length: tensors of the bound, with the rest masked where it matters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.onnx_ops.arithmetic import BINARY, UNARY
from nimblec.onnx_ops.axes import axes_of, axis_of
from nimblec.onnx_ops.counted import Counted, Range, counted, counts_of, range_of, with_range
from nimblec.onnx_ops.shape import slice_of
from nimblec.onnx_ops.table import Ints, Refused
from nimblec.onnx_ops.unsigned import index_select

TAKES_NONE = "does not take a value whose size depends on values: compile for --target cpu"

Value: TypeAlias = Tensor | Counted
Counts: TypeAlias = Mapping[int, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A node and its inputs; ``apply`` gives its outputs for plain tensors in place of these."""

    name: str
    opset: int
    inputs: Sequence[Any]
    attributes: Mapping[str, Any]
    apply: Callable[[Sequence[Any]], Sequence[Any]]

    @property
    def rank(self) -> int:
        """The number of dimensions of the first input."""
        first: Tensor = values_of(self.inputs[0])
        return first.dim()

    def one(self, *first: Any) -> Tensor:
        """Return the first output, with other first inputs where they are given."""
        given = [*first, *self.inputs[len(first) :]]
        output: Tensor = self.apply([values_of(value) for value in given])[0]
        return output

    def axis(self, default: int) -> int:
        """Return the attribute ``axis``, counted from the front."""
        return axis_of(self.attributes.get("axis", default), self.rank)

    def ints(self, index: int, name: str) -> Ints | None:
        """Return numbers known at import: input ``index``, or the attribute that older opsets have instead."""
        given = self.inputs[index] if index < len(self.inputs) else None
        if given is None:
            return self.attributes.get(name)
        if not isinstance(given, Tensor) or isinstance(given, FakeTensor):
            raise Refused(f"input {index} '{name}' is computed while the model runs; it must be known at import")
        return tuple(given.reshape(-1).tolist())

    def only(self) -> Counted:
        """Return the first input; refuse any other that is counted."""
        x, *others = self.inputs
        if not isinstance(x, Counted) or any(isinstance(other, Counted) for other in others):
            raise Refused("takes a value whose size depends on values as its first input alone")
        return x


def is_counted(name: str, inputs: Sequence[Any]) -> bool:
    """Return whether `outputs` computes an operator: a size of an input or of the output depends on values."""
    sizes = {"Slice": inputs[1:3], "Expand": inputs[1:2]}.get(name, ())
    return any(isinstance(value, Counted) for value in inputs) or any(isinstance(size, FakeTensor) for size in sizes)


def outputs(domain: str, use: Use) -> list[Any]:
    """Return the outputs of an operator. Raises `Refused` for one that does not take such values."""
    rule = None if domain else RULES.get(use.name)
    if rule is None:
        raise Refused(TAKES_NONE)
    made = rule(use)
    return made if isinstance(made, list) else [made]


def values_of(value: Any) -> Any:
    """Return the tensor of the bound of a counted value, and any other as it is."""
    return value.values if isinstance(value, Counted) else value


def _counts(value: Any) -> Counts:
    return value.counts if isinstance(value, Counted) else {}


def _broadcast(shaped: Iterable[tuple[Sequence[int], Counts]]) -> dict[int, Tensor]:
    """Return the counts of what values of these shapes and counts make by broadcasting."""
    shaped = list(shaped)
    rank = max(len(shape) for shape, _ in shaped)
    made: dict[int, Tensor] = {}
    for shape, counts in shaped:
        for axis, count in counts.items():
            if made.setdefault(axis - len(shape) + rank, count) is not count:
                raise Refused("combines two sizes that depend on values: compile for --target cpu")
    for shape, counts in shaped:
        for axis in made:
            own = axis - rank + len(shape)
            if own >= 0 and shape[own] != 1 and own not in counts:
                raise Refused("combines a size known at import with one that depends on values")
    return made


def _elementwise(use: Use) -> Value:
    given = [value for value in use.inputs if value is not None]
    return counted(use.one(), _broadcast((values_of(value).shape, _counts(value)) for value in given))


def _extreme(dtype: torch.dtype, *, lowest: bool) -> Tensor:
    if dtype == torch.bool:
        return torch.tensor(not lowest)
    if dtype.is_floating_point:
        return torch.tensor(-torch.inf if lowest else torch.inf, dtype=dtype)
    limits = torch.iinfo(dtype)
    return torch.tensor(limits.min if lowest else limits.max, dtype=dtype)


def _number(dtype: torch.dtype, number: int) -> Tensor:
    return torch.tensor(number, dtype=dtype)


_zero = partial(_number, number=0)
_lowest, _highest = partial(_extreme, lowest=True), partial(_extreme, lowest=False)

_NEUTRAL: dict[str, Callable[[torch.dtype], Tensor]] = {
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2"), _zero),
    **dict.fromkeys(("ReduceSumSquare", "ReduceLogSum", "CumSum"), _zero),
    **dict.fromkeys(("ReduceMax", "ReduceLogSumExp", "ArgMax", "Softmax", "LogSoftmax"), _lowest),
    **dict.fromkeys(("ReduceMin", "ArgMin"), _highest),
    **dict.fromkeys(("ReduceProd", "CumProd"), partial(_number, number=1)),
}
"""What does not change the result of a reduction."""


def _masked(x: Counted, axes: Iterable[int], neutral: Callable[[torch.dtype], Tensor]) -> Tensor:
    values = x.values
    for axis in axes:
        values = Counted(values, x.counts).masked(axis, neutral(values.dtype))
    return values


def _reduction(use: Use) -> Value:
    x = use.only()
    if use.name.startswith("Arg"):
        axes: Ints = (use.axis(0),)
    else:
        given = use.ints(1, "axes")
        if not given and use.attributes.get("noop_with_empty_axes"):
            return _elementwise(use)
        axes = axes_of(given or range(use.rank), use.rank)
    over = [axis for axis in axes if axis in x.counts]
    if over and use.attributes.get("select_last_index"):
        raise Refused("attribute 'select_last_index' is 1; expected 0 where the size depends on values")
    made = use.one(_masked(x, over, _NEUTRAL[use.name]))
    if use.name == "ReduceMean" and over:
        if not made.is_floating_point():
            raise Refused(f"has inputs of {made.dtype}; expected floats where the size depends on values")
        for axis in over:
            made = (made * (x.values.shape[axis] / x.counts[axis].to(torch.float32))).to(made.dtype)
    kept = use.attributes.get("keepdims", 1)
    left = {axis: count for axis, count in x.counts.items() if axis not in axes}
    return counted(made, left if kept else {axis - sum(a < axis for a in axes): c for axis, c in left.items()})


def _softmax(use: Use) -> Value:
    x, axis = use.only(), use.axis(-1 if use.opset >= 13 else 1)
    if use.opset < 13 and axis != use.rank - 1:
        raise Refused("flattens its input, whose size depends on values")
    return Counted(use.one(_masked(x, x.counts.keys() & {axis}, _NEUTRAL[use.name])), x.counts)


def _cumulative(use: Use) -> Value:
    x, (axis,) = use.only(), axes_of(use.ints(1, "axis") or (), use.rank)
    if axis in x.counts and use.attributes.get("reverse"):
        return Counted(use.one(_masked(x, (axis,), _NEUTRAL[use.name])), x.counts)
    return Counted(use.one(), x.counts)


def _normalization(use: Use) -> Value:
    x = use.only()
    if any(axis >= use.axis(-1) for axis in x.counts):
        raise Refused("normalizes over a size that depends on values")
    return Counted(use.one(), x.counts)


def _gather(use: Use) -> Value:
    data, indices = use.inputs
    axis, index = use.axis(0), values_of(indices)
    made = {a if a < axis else a + index.dim() - 1: count for a, count in _counts(data).items() if a != axis}
    if axis in _counts(data):
        index = _from_end(index, data.counts[axis])
    return counted(use.one(data, index), {**made, **{axis + a: count for a, count in _counts(indices).items()}})


def _from_end(index: Tensor, length: Tensor) -> Tensor:
    """Return indices of which negative ones are counted from the end of a run's length."""
    if not isinstance(index, FakeTensor) and bool((index >= 0).all()):
        return index
    return torch.where(index < 0, index + length.to(index.dtype), index)


def _gather_elements(use: Use) -> Value:
    """GatherElements and GatherND: the result has the indices' leading axes."""
    data, indices = use.inputs
    if isinstance(data, Counted) or not isinstance(indices, Counted) or use.attributes.get("batch_dims"):
        raise Refused("gathers from a value whose size depends on values")
    if use.name == "GatherND" and indices.values.dim() - 1 in indices.counts:
        raise Refused("takes points whose number of coordinates depends on values")
    return Counted(use.one(), indices.counts)


def _slice(use: Use) -> Value:
    data: Value = use.inputs[0]
    ends = use.inputs[1:3] or [torch.tensor(use.attributes[name]) for name in ("starts", "ends")]
    if any(not isinstance(end, Tensor) for end in ends):
        raise Refused("its bounds have a size that depends on values")
    count = ends[0].numel()
    axes = axes_of(use.ints(3, "axes") or range(count), use.rank)
    steps = use.ints(4, "steps") or (1,) * count
    for i, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        start, end = (each.reshape(-1).select(0, i) for each in ends)
        data = _sliced(data, axis, _known(start), _known(end), step)
    return data


def _known(number: Tensor) -> int | Tensor:
    return number if isinstance(number, FakeTensor) else int(number)


def _sliced(x: Value, axis: int, start: int | Tensor, end: int | Tensor, step: int) -> Value:
    """Return the elements from ``start`` to ``end`` along one axis."""
    values, others = values_of(x), {a: count for a, count in _counts(x).items() if a != axis}
    bound = values.shape[axis]
    length = _counts(x).get(axis, bound)
    if step != 1 and (axis in _counts(x) or isinstance(start, Tensor) or isinstance(end, Tensor)):
        raise Refused(f"takes every element in steps of {step} of a size that depends on values; expected steps of 1")
    if isinstance(length, int) and isinstance(start, int) and isinstance(end, int):
        return counted(slice_of(values, (start,), (end,), (axis,), (step,)), others)
    if isinstance(start, int) and start >= 0:
        start = min(start, bound)
        most = min(end, bound) if isinstance(end, int) and end >= 0 else bound
        values = values.narrow(axis, start, max(0, most - start))
        first = torch.tensor(start)
    else:
        first = _place(start, length)
        values = index_select(values, axis, (first + torch.arange(bound)).clamp(max=max(0, bound - 1)))
    return Counted(values, {**others, axis: (_place(end, length) - first).clamp(min=0)})


def _place(number: int | Tensor, length: int | Tensor) -> Tensor:
    """Return a bound of a slice as a place within the length."""
    place, most = (n.to(torch.int64) if isinstance(n, Tensor) else torch.tensor(n) for n in (number, length))
    return torch.minimum(torch.where(place < 0, place + most, place).clamp(min=0), most)


def _concat(use: Use) -> Value:
    axis = use.axis(0)
    shapes = [(values_of(x).shape, {a: c for a, c in _counts(x).items() if a != axis}) for x in use.inputs]
    others = _broadcast(([1 if a == axis else n for a, n in enumerate(shape)], counts) for shape, counts in shapes)
    joined = use.one()
    if all(axis not in _counts(x) for x in use.inputs):
        return counted(joined, others)
    index = place = torch.arange(joined.shape[axis])
    begin, bound = torch.tensor(0), 0
    for x in use.inputs:
        end = begin + _counts(x).get(axis, values_of(x).shape[axis])
        index = torch.where((place >= begin) & (place < end), place - begin + bound, index)
        begin, bound = end, bound + values_of(x).shape[axis]
    return Counted(index_select(joined, axis, index), {**others, axis: begin})


def _split(use: Use) -> list[Any]:
    x = use.only()
    if use.axis(0) in x.counts:
        raise Refused("splits a size that depends on values")
    return [Counted(part, x.counts) for part in use.apply([x.values, *use.inputs[1:]])]


def _transpose(use: Use) -> Value:
    x = use.only()
    perm = list(use.attributes.get("perm", reversed(range(use.rank))))
    return Counted(use.one(), {perm.index(axis): count for axis, count in x.counts.items()})


def _unsqueeze(use: Use) -> Value:
    x, made = use.only(), use.one()
    new = axes_of(use.ints(1, "axes") or (), made.dim())
    old = [axis for axis in range(made.dim()) if axis not in new]
    return Counted(made, {old[axis]: count for axis, count in x.counts.items()})


def _squeeze(use: Use) -> Value:
    x, given = use.only(), use.ints(1, "axes")
    if given is None or x.counts.keys() & (gone := set(axes_of(given, use.rank))):
        raise Refused("drops an axis whose size depends on values")
    return Counted(use.one(), {axis - sum(a < axis for a in gone): count for axis, count in x.counts.items()})


def _reshape(use: Use) -> Value:
    """Reshape and Flatten: what lies before the counted axis stays as it is, and it goes into an axis of open size."""
    x, made = use.only(), use.one()
    if use.name == "Flatten":
        axis = use.attributes.get("axis", 1)
        axis += use.rank if axis < 0 else 0
        wanted: Ints = (-1, made.shape[1]) if all(a < axis for a in x.counts) else (made.shape[0], -1)
    else:
        wanted = use.ints(1, "shape") or ()
    (axis, count), *more = x.counts.items()
    before, inner = prod(x.values.shape[:axis]), prod(x.values.shape[axis + 1 :])
    for place, size in enumerate(wanted):
        is_open = size == -1 or (size == 0 and place == axis and not use.attributes.get("allowzero"))
        if is_open and prod(made.shape[:place]) == before and inner % prod(made.shape[place + 1 :]) == 0 and not more:
            return Counted(made, {place: count * (inner // prod(made.shape[place + 1 :]))})
    raise Refused(f"makes the shape {tuple(wanted)} of one whose size along axis {axis} depends on values")


def _expand(use: Use) -> Value:
    x, shape = use.inputs
    known = range_of(shape) if isinstance(shape, Tensor) else None
    if known is None:
        raise Refused("input 1 'shape' is computed while the model runs, and nothing bounds it")
    sizes: tuple[Sequence[int], Counts] = known.most.tolist(), counts_of(shape, known)
    return counted(use.one(x, known.most), _broadcast([(values_of(x).shape, _counts(x)), sizes]))


def _shape(use: Use) -> Tensor:
    x = use.only()
    most = use.one()
    taken = range(use.rank)[use.attributes.get("start", 0) : use.attributes.get("end")]
    counts = [x.counts.get(axis) for axis in taken]
    least = torch.where(torch.tensor([count is None for count in counts], dtype=torch.bool), most, 0)
    return with_range(x.sizes().narrow(0, taken.start, len(taken)), least, most, counts)


def _size(use: Use) -> Tensor:
    x = use.only()
    return with_range(x.sizes().prod(), torch.tensor(0), torch.tensor(x.values.numel()))


def _matmul(use: Use) -> Value:
    a, b = use.inputs[:2]
    is_gemm = use.name == "Gemm"
    turned = [bool(use.attributes.get(name, 0)) and is_gemm for name in ("transA", "transB")]
    if values_of(a).dim() < 2 or values_of(b).dim() < 2:
        raise Refused("takes matrices where a size depends on values")
    inner = values_of(a).dim() - (2 if turned[0] else 1), values_of(b).dim() - (1 if turned[1] else 2)
    counts = [_counts(x).get(axis) for x, axis in zip((a, b), inner, strict=True)]
    if counts[0] is not counts[1]:
        raise Refused("contracts two sizes of which one depends on values")
    given = [x if counts[0] is None else _masked(x, (axis,), _zero) for x, axis in zip((a, b), inner, strict=True)]
    parts: list[tuple[Sequence[int], Counts]] = []
    for x, axis, place in zip((a, b), inner, (-1, -2), strict=True):
        shape, left = [*values_of(x).shape], {n: count for n, count in _counts(x).items() if n != axis}
        other = 2 * len(shape) - 3 - axis
        stays = len(shape) - (2 if place == -1 else 1)
        size, shape[-2:] = shape[other], [1, 1]
        shape[stays] = size
        parts.append((shape, {stays if n == other else n: count for n, count in left.items()}))
    if is_gemm and len(use.inputs) > 2 and use.inputs[2] is not None:
        parts.append((values_of(use.inputs[2]).shape, _counts(use.inputs[2])))
    return counted(use.one(*given), _broadcast(parts))


def _top_k(use: Use) -> list[Any]:
    x, axis = use.only(), use.axis(-1)
    fill = _lowest if use.attributes.get("largest", 1) else _highest
    others = {a: count for a, count in x.counts.items() if a != axis}
    found = use.apply([_masked(x, x.counts.keys() & {axis}, fill), *use.inputs[1:]])
    return [counted(values_of(each), {**others, **_counts(each)}) for each in found]


def _non_zero(use: Use) -> Value:
    x = use.only()
    return use.one(_masked(x, x.counts, _zero))


def _compress(use: Use) -> Value:
    x, condition = use.inputs
    if "axis" not in use.attributes and use.rank > 1:
        raise Refused("flattens a value whose size depends on values")
    axis, mask = use.axis(0), values_of(condition).reshape(-1)
    for count in (_counts(x).get(axis), _counts(condition).get(0)):
        mask = mask if count is None else mask & (torch.arange(len(mask)) < count)
    made = use.apply([values_of(x), mask])[0]
    return counted(values_of(made), {**{a: c for a, c in _counts(x).items() if a != axis}, **_counts(made)})


def _suppression(use: Use) -> Value:
    boxes, scores = use.inputs[:2]
    if not (isinstance(scores, Counted) and scores.counts.keys() == {2} and _counts(boxes).get(1) is scores.counts[2]):
        raise Refused("takes boxes and scores of one number that depends on values")
    return use.one(boxes, _masked(scores, (2,), _lowest))


ELEMENTWISE = (
    *UNARY, *BINARY, "Abs", "BitShift", "BitwiseNot", "Cast", "Celu", "Clip", "Div", "Elu", "Gelu", "HardSigmoid",
    "Identity", "IsInf", "LeakyRelu", "Max", "Mean", "Min", "Mod", "PRelu", "Pow", "Selu", "Sign", "Softsign", "Sum",
    "Swish", "ThresholdedRelu", "Where",
)  # fmt: skip

Rule: TypeAlias = Callable[[Use], Any]

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys([name for name in _NEUTRAL if "Softmax" not in name], _reduction),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    **dict.fromkeys(("CumSum", "CumProd"), _cumulative),
    **dict.fromkeys(("GatherElements", "GatherND"), _gather_elements),
    **dict.fromkeys(("MatMul", "Gemm"), _matmul),
    **dict.fromkeys(("Reshape", "Flatten"), _reshape),
    "Compress": _compress,
    "Concat": _concat,
    "Expand": _expand,
    "Gather": _gather,
    "LayerNormalization": _normalization,
    "NonMaxSuppression": _suppression,
    "NonZero": _non_zero,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""What makes the outputs of each operator that takes values of unknown length."""

_MOVING = frozenset({"Cast", "Flatten", "Gather", "Reshape", "Slice", "Squeeze", "Unsqueeze"})
"""Operators that move what their first input holds."""

_RISING = frozenset({"Add", "Concat", "Max", "Min", "Mul"})
"""Operators whose results do not fall where numbers of at least 0 rise."""


def follow_range(domain: str, use: Use, made: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of an operator on sizes, the first with a range where those of the inputs tell it."""
    moves = use.name in {*_MOVING, "Concat"}
    given = use.inputs[:1] if use.name in _MOVING else use.inputs
    rest = use.inputs[len(given) :]
    if domain or not (moves or use.name in {*_RISING, "Sub"}) or any(isinstance(value, FakeTensor) for value in rest):
        return made
    if not isinstance(made[0], FakeTensor) or made[0].is_floating_point() or made[0].dtype == torch.bool:
        return made
    if not any(isinstance(value, FakeTensor) and range_of(value) is not None for value in given):
        return made
    ranges = [_range(value, use.name) if isinstance(value, Tensor) else None for value in given]
    known = [ends for ends in ranges if ends is not None]
    if len(known) < len(given) or (use.name == "Mul" and any(bool((ends.least < 0).any()) for ends in known)):
        return made

    def result(values: Iterable[Tensor]) -> Tensor:
        output: Tensor = use.apply([*values, *rest])[0]
        return output

    least, most = [ends.least for ends in known], [ends.most for ends in known]
    counts: list[Tensor | None] = []
    if moves:
        held = [count for ends in known for count in ends.counts]
        numbers = torch.arange(len(held)).split([value.numel() for value in most])
        moved = result(n.reshape(value.shape) for n, value in zip(numbers, most, strict=True))
        counts = [held[number] for number in moved.reshape(-1).tolist()]
    if use.name == "Sub":
        least, most = [least[0], most[1]], [most[0], least[1]]
    return [with_range(made[0], result(least), result(most), counts), *made[1:]]


def _range(value: Tensor, name: str) -> Range | None:
    """Return the range of an input: of the smaller of two numbers one may have any value."""
    found = range_of(value)
    if found is None and name == "Min" and not value.is_floating_point():
        ends = _lowest(value.dtype).expand(value.shape), _highest(value.dtype).expand(value.shape)
        return Range(*ends, [None] * value.numel())
    return found
