"""Prove on a flat graph of ATen calls which calls of other sizes its program can serve."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from nimblec.graph.rewriter import bound
from nimblec.padding.folds import ABSORBING, if_equal, is_least, is_low, is_one, is_zero, never, of_choice, to_any
from nimblec.padding.rules import Propagation, flat_along, product
from nimblec.padding.values import Number, Proof, Shape, Value, constant, given, prove

Axes: TypeAlias = Sequence[str | None]

_MOST_READ = 1 << 21
"""Constants of more elements are not read."""


def prove_aten(
    module: fx.GraphModule,
    inputs: Sequence[tuple[Axes, bool]],
    outputs: Sequence[Axes | None],
    sizes: Mapping[str, int],
) -> dict[str, Proof]:
    """Prove, for each dimension of ``sizes``, which other sizes a graph with static shapes serves.

    ``inputs`` has the dimension of each axis of the first arguments, and whether padding of these is 0 as that of
    masks. ``outputs`` has the dimensions of each result, None for one that is no output.
    """
    return {name: _prove(module, inputs, outputs, name, size) for name, size in sizes.items()}


def _prove(
    module: fx.GraphModule, inputs: Sequence[tuple[Axes, bool]], outputs: Sequence[Axes | None], name: str, size: int
) -> Proof:
    if size < 2:
        return prove([], name, size)
    values: dict[fx.Node, Any] = {}
    left = list(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            shape = tuple(node.meta["val"].shape)
            of, is_mask = left.pop(0) if left else ((None,) * len(shape), False)
            values[node] = given(shape, of, name, 0 if is_mask else None)
        elif node.op == "get_attr":
            values[node] = _read(operator.attrgetter(node.target)(module))
        elif node.op == "output":
            results = zip(node.args[0], outputs, strict=True)
            return prove([(values[result], of) for result, of in results if of is not None], name, size)
        elif node.target is operator.getitem:
            made, index = node.args
            values[node] = values[made][index]
        else:
            values[node] = _Call(node, values, name).run()
    raise AssertionError


def _read(tensor: Tensor | fx.GraphModule) -> Value:
    if isinstance(tensor, fx.GraphModule):  # the branch of a condition
        return Value((), is_sized=False)
    is_read = tensor.numel() <= _MOST_READ and tensor.dtype not in {torch.bfloat16, torch.complex32}
    return (
        constant(tensor.detach().cpu().numpy()) if is_read and not tensor.is_quantized else Value(tuple(tensor.shape))
    )


class _Call:
    """A node with its arguments by the names of their schema, tensors as values."""

    def __init__(self, node: fx.Node, values: Mapping[fx.Node, Any], name: str) -> None:
        self.node = node
        self.kind = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else str(node.target)
        self.step = Propagation(f"{self.kind.strip('_')} {node.meta.get('source') or node.name!r}", name)
        self.arguments: dict[str, Any] = {}
        if isinstance(node.target, OpOverload):
            self.arguments = fx.map_arg(bound(node), values.__getitem__)
        self.operands: list[Value] = []
        fx.map_arg((node.args, node.kwargs), lambda read: self.operands.append(values[read]))
        made = node.meta.get("val")
        self.made = list(made) if isinstance(made, tuple | list) else [made]

    def run(self) -> Any:
        """Return the value of the result, or a list of them."""
        rule = _RULES.get(self.kind)
        if rule is None and isinstance(self.node.target, OpOverload) and torch.Tag.pointwise in self.node.target.tags:
            rule = _elementwise
        try:
            found = [self.step.unknown(self.operands, shape) for shape in self.shapes] if rule is None else rule(self)
        except _UnknownUseError:
            found = [self.step.unknown(self.operands, shape) for shape in self.shapes]
        return found if isinstance(self.node.meta.get("val"), tuple | list) else found[0]

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the results."""
        return [tuple(made.shape) if isinstance(made, Tensor) else () for made in self.made]

    @property
    def shape(self) -> Shape:
        """The shape of the first result."""
        return self.shapes[0]

    def axes(self, name: str = "dim") -> set[int]:
        """Return the argument that names axes of the operand, by default all of them."""
        rank = max(len(self.operands[0].shape), 1)
        given_axes = self.arguments.get(name)
        if given_axes is None or given_axes == []:
            return set(range(rank))
        return {axis % rank for axis in (given_axes if isinstance(given_axes, list | tuple) else [given_axes])}

    def axis(self, name: str = "dim") -> int:
        """Return the argument that names an axis of the result."""
        axis: int = self.arguments[name] % max(len(self.shape), 1)
        return axis


class _UnknownUseError(Exception):
    """A use of an operator that no rule knows."""


_Rule: TypeAlias = Callable[[_Call], list[Value]]
_RULES: dict[str, _Rule] = {}


def _rule(*kinds: str) -> Callable[[_Rule], _Rule]:
    def add(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(kinds, function))
        return function

    return add


_ABSORBING = {
    **{kind: ABSORBING[kind] for kind in ("add", "sub", "mul", "div", "where")},
    **dict.fromkeys(("logical_and", "bitwise_and"), ABSORBING["and"]),
    **dict.fromkeys(("logical_or", "bitwise_or"), ABSORBING["or"]),
    "rsub": lambda fills: ABSORBING["sub"](fills[::-1]),
    "masked_fill": lambda fills: of_choice((fills[1], fills[2], fills[0])),
}


@_rule("alias", "clone", "contiguous", "detach", "lift_fresh_copy", "to", "_to_copy")
def _elementwise(call: _Call) -> list[Value]:
    absorbing = _ABSORBING.get(call.kind, to_any) if call.arguments.get("alpha", 1) == 1 else to_any
    operands = [
        value if isinstance(value, Value) else constant(np.array(value))
        for name, value in call.arguments.items()
        if isinstance(value, Value) or _is_operand(name, value)
    ]
    # Some operands are in lists.
    if len(operands) < len(call.operands):
        return [call.step.elementwise(call.operands, shape) for shape in call.shapes]

    def fold(fills: Sequence[Number | None]) -> Number | None:
        return absorbing(fills) if any(fill is None for fill in fills) else _evaluated(call, fills)

    return [call.step.elementwise(operands, shape, fold) for shape in call.shapes]


def _is_operand(name: str, value: object) -> bool:
    """Return whether an argument is a number in the place of a tensor."""
    return isinstance(value, int | float) and name in {"self", "other", "value"}


def _evaluated(call: _Call, fills: Sequence[Number | None]) -> Number | None:
    """Return what a call makes of numbers in the place of its operands."""
    left = list(fills)
    target: Any = call.node.target
    arguments = bound(call.node)
    for name, value in arguments.items():
        if isinstance(call.arguments[name], Value):
            arguments[name] = torch.tensor(left.pop(0), dtype=value.meta["val"].dtype)
        elif _is_operand(name, value):
            left.pop(0)
    arguments.pop("device", None)
    try:
        with torch.no_grad():
            found = target(**arguments)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    number: Number = found.item()
    return None if number != number else number  # noqa: PLR0124 - NaN


_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("sum", "nansum", "linalg_vector_norm", "norm", "count_nonzero", "any"), is_zero),
    "all": is_one,
    "logsumexp": is_low,
    "prod": is_one,
}


@_rule(*_NEUTRAL, "amax", "amin", "max", "min", "mean", "argmax", "argmin", "var", "std", "var_mean", "std_mean")
def _reduce(call: _Call) -> list[Value]:
    if isinstance(call.arguments.get("other"), Value):
        return _elementwise(call)
    is_neutral = _NEUTRAL.get(call.kind, never)
    if call.kind.endswith(("max", "min")):
        name = str(bound(call.node)["self"].meta["val"].dtype).removeprefix("torch.")
        dtype = np.dtype("float32" if name == "bfloat16" else name)
        is_neutral = is_least(dtype, of_minimum=call.kind.endswith("min"))
    if call.arguments.get("ord", call.arguments.get("p", 2)) not in {1, 2}:
        is_neutral = never
    is_kept = call.kind in {"mean", "amax", "amin", "max", "min"}
    fold = if_equal if is_kept else (lambda fills: 0 if call.kind == "sum" and is_zero(fills[0]) else None)
    x, keeps = call.operands[0], call.arguments.get("keepdim", False)
    return [call.step.reduce(x, call.axes(), shape, is_neutral, keeps=keeps, fold=fold) for shape in call.shapes]


@_rule("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax")
def _softmax(call: _Call) -> list[Value]:
    return [call.step.softmax(call.operands[0], call.axes(), -np.inf if "log" in call.kind else 0)]


@_rule("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm", "native_group_norm", "group_norm")
def _norm(call: _Call) -> list[Value]:
    x, *parameters = call.operands
    rank = len(x.shape)
    if call.kind.endswith("group_norm"):
        shapes = [(*value.shape, *(1,) * (rank - 2)) for value in parameters]
        parameters = [call.step.reshape(*pair) for pair in zip(parameters, shapes, strict=True)]
        over = range(1, rank)
    else:
        over = range(rank - len(call.arguments["normalized_shape"]), rank)
    normed = call.step.elementwise([call.step.whole(x, over, x.shape), *parameters], call.shape)
    return [normed, *(replace(call.step.whole(x, over, x.shape), shape=shape) for shape in call.shapes[1:])]


@_rule("_native_batch_norm_legit_no_training", "native_batch_norm", "batch_norm", "cudnn_batch_norm")
def _batch_norm(call: _Call) -> list[Value]:
    if call.arguments.get("training", call.kind == "cudnn_batch_norm"):
        raise _UnknownUseError
    x, *parameters = call.operands
    columns = [call.step.reshape(v, (*v.shape, *(1,) * (len(x.shape) - 2))) for v in parameters]
    return [call.step.elementwise([x, *columns], call.shape), *map(Value, call.shapes[1:])]


@_rule("convolution", "_convolution")
def _convolution(call: _Call) -> list[Value]:
    x, weight, *others = call.operands
    spatial = range(2, len(x.shape))
    transposed = call.arguments["transposed"]
    over = (1, *spatial) if transposed else (1,)
    result = call.step.whole(x, over, call.shape)
    if not transposed and 1 not in x.axes:
        reach = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], call.arguments["dilation"], strict=True)]
        windows = zip(reach, call.arguments["stride"], call.arguments["padding"], strict=True)
        result = call.step.window(x, dict(zip(spatial, windows, strict=True)), call.shape, 0)
    return [call.step.after([weight, *others], result)]


_SPATIAL = ("max_pool", "avg_pool", "adaptive", "_adaptive", "upsample", "reflection_pad", "replication_pad")


def _spatial(call: _Call) -> list[Value]:
    """Return what an operator makes of the last axes, as many as its name says."""
    x = call.operands[0]
    count = int(next(digit for digit in call.kind if digit in "123"))
    over = range(len(x.shape) - count, len(x.shape))
    return [call.step.whole(x, over, shape) for shape in call.shapes]


_RULES.update(
    (name, _spatial) for name in dir(torch.ops.aten) if name.startswith(_SPATIAL) and any(d in name for d in "123")
)


@_rule("mm", "bmm", "matmul", "mv", "dot", "linear", "addmm", "baddbmm", "addmv")
def _product(call: _Call) -> list[Value]:
    operands = list(call.operands)
    added = [operands.pop(0)] if call.kind.startswith(("add", "badd")) else []
    if call.kind == "linear":
        left, right, *added = operands
        right = call.step.permute(right, range(len(right.shape))[::-1])
    else:
        left, right = operands
    found = product(call.step, left, right, call.shape)
    return [call.step.elementwise([found, *added], call.shape) if added else found]


@_rule("scaled_dot_product_attention")
def _attention(call: _Call) -> list[Value]:
    query, key, value, mask = (call.arguments[name] for name in ("query", "key", "value", "attn_mask"))
    if call.arguments["enable_gqa"]:
        raise _UnknownUseError
    rank = len(query.shape)
    turned = call.step.permute(key, [*range(rank - 2), rank - 1, rank - 2])
    scores = product(call.step, query, turned, (*query.shape[:-1], key.shape[-2]))
    if call.arguments["is_causal"]:
        mask, is_choice = constant(np.tri(*scores.shape[-2:], dtype=np.bool_)), True
    else:
        is_choice = mask is not None and bound(call.node)["attn_mask"].meta["val"].dtype == torch.bool
    if mask is not None and is_choice:
        scores = call.step.elementwise([mask, scores, constant(np.array(-np.inf))], scores.shape, of_choice)
    elif mask is not None:
        scores = call.step.elementwise([scores, mask], scores.shape, ABSORBING["add"])
    return [product(call.step, call.step.softmax(scores, {rank - 1}), value, call.shape)]


@_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshape(call: _Call) -> list[Value]:
    return [call.step.reshape(call.operands[0], call.shape)]


@_rule("permute", "transpose", "t")
def _permute(call: _Call) -> list[Value]:
    rank = len(call.shape)
    order = list(range(rank))
    if call.kind == "permute":
        order = [axis % rank for axis in call.arguments["dims"]]
    elif call.kind == "t":
        order.reverse()
    else:
        one, other = (call.arguments[name] % rank for name in ("dim0", "dim1"))
        order[one], order[other] = order[other], order[one]
    return [call.step.permute(call.operands[0], order)]


@_rule("expand", "repeat")
def _expand(call: _Call) -> list[Value]:
    return [call.step.expand(call.operands[0], call.shape)]


@_rule("cat", "stack")
def _concat(call: _Call) -> list[Value]:
    axis, operands = call.axis(), call.operands
    if call.kind == "stack":
        operands = [call.step.reshape(v, (*v.shape[:axis], 1, *v.shape[axis:])) for v in operands]
    return [call.step.concat(operands, axis, call.shape, if_equal)]


@_rule("split", "split_with_sizes", "chunk", "unbind", "slice", "narrow", "select")
def _crop(call: _Call) -> list[Value]:
    x = call.operands[0]
    axis = call.arguments["dim"] % len(x.shape)
    size, single = x.shape[axis], call.kind in {"unbind", "select"}
    start = call.arguments.get("start", call.arguments.get("index", 0)) or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    parts = []
    for shape in call.shapes:
        kept = (*shape[:axis], 1, *shape[axis:]) if single else shape
        part = call.step.crop(x, {axis: start}, kept, {axis: call.arguments.get("step", 1)})
        parts.append(call.step.reshape(part, shape) if single else part)
        start += kept[axis]
    return parts


@_rule("constant_pad_nd")
def _pad(call: _Call) -> list[Value]:
    x, widths = call.operands[0], call.arguments["pad"][::2][::-1]
    before = [*[0] * (len(x.shape) - len(widths)), *widths]
    return [call.step.pad(x, before, call.shape, call.arguments["value"])]


@_rule("index_select", "embedding")
def _gather(call: _Call) -> list[Value]:
    data, indices = call.operands
    return [call.step.gather(data, indices, call.axis() if call.kind == "index_select" else 0, call.shape)]


@_rule("index")
def _index(call: _Call) -> list[Value]:
    places = [(axis, of) for axis, of in enumerate(call.arguments["indices"]) if of is not None]
    if any(of is not None and of.meta["val"].dtype == torch.bool for of in bound(call.node)["indices"]):
        raise _UnknownUseError
    if len(places) > 1 and [axis for axis, _ in places] == list(range(len(places))):
        arrays = [of.array for _, of in places if of.array is not None]
        if len(arrays) == len(places):
            return [call.step.pick_in_order(call.operands[0], np.broadcast_arrays(*arrays), call.shape)]
        return [call.step.pick(call.operands[0], [of for _, of in places], call.shape)]
    if len(places) != 1:
        raise _UnknownUseError
    ((axis, indices),) = places
    return [call.step.gather(call.operands[0], indices, axis, call.shape)]


@_rule("gather", "scatter", "scatter_add")
def _along(call: _Call) -> list[Value]:
    x, indices, *updates = call.operands
    axis = call.axis()
    if call.kind == "gather" and axis not in x.axes:
        return [call.step.elementwise([indices, flat_along(x, axis)], call.shape)]
    if any(axis in value.axes for value in call.operands):
        raise _UnknownUseError
    return [call.step.elementwise([x, *(flat_along(value, axis) for value in (indices, *updates))], call.shape)]


@_rule("slice_scatter", "select_scatter")
def _scatter(call: _Call) -> list[Value]:
    x, part = call.operands
    axis = call.axis()
    if call.kind == "select_scatter":
        part = call.step.reshape(part, (*part.shape[:axis], 1, *part.shape[axis:]))
    if axis in x.axes or axis in part.axes:
        raise _UnknownUseError
    return [call.step.elementwise([x, flat_along(part, axis)], call.shape, if_equal)]


@_rule("topk", "sort", "cumprod", "flip", "roll")
def _whole(call: _Call) -> list[Value]:
    over = call.axes("dims" if "dims" in call.arguments else "dim")
    return [call.step.whole(call.operands[0], over, shape) for shape in call.shapes]


@_rule("cumsum")
def _cumulative(call: _Call) -> list[Value]:
    return [call.step.scan(call.operands[0], call.axis())]


@_rule("tril", "triu")
def _triangle(call: _Call) -> list[Value]:
    rows, columns = call.shape[-2:]
    lower = np.tri(rows, columns, call.arguments["diagonal"] - (call.kind == "triu"), dtype=np.bool_)
    kept = constant(lower if call.kind == "tril" else ~lower)
    return [call.step.elementwise([kept, call.operands[0], constant(np.zeros(()))], call.shape, of_choice)]


_FILLED = {"zeros": 0, "ones": 1, "new_zeros": 0, "new_ones": 1, "zeros_like": 0, "ones_like": 1}


@_rule(*_FILLED, "full", "new_full", "full_like", "arange", "scalar_tensor", "empty", "new_empty", "empty_like")
def _constant(call: _Call) -> list[Value]:
    fill = _FILLED.get(call.kind, call.arguments.get("fill_value"))
    if isinstance(fill, int | float):
        return [constant(np.broadcast_to(np.array(fill), call.shape))]
    if call.kind == "arange" and prod(call.shape) <= _MOST_READ:
        start, step = call.arguments.get("start", 0), call.arguments.get("step", 1)
        return [constant(start + step * np.arange(call.shape[0]))]
    return [Value(call.shape)]


@_rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(call: _Call) -> list[Value]:
    if "batch_first" not in call.arguments:
        raise _UnknownUseError
    x, states, weights = (call.arguments[name] for name in ("input", "hx", "params"))
    time = 1 if call.arguments["batch_first"] else 0
    states = [states] if isinstance(states, Value) else states
    if any(state.axes.keys() - {1} for state in states):
        raise _UnknownUseError
    lines = [flat_along(flat_along(state, 0), 2) for state in states]
    steps, batch = x.shape[time], x.shape[1 - time]
    gates = call.step.after(weights, call.step.reduce(x, {2}, (*x.shape[:2], 1)))
    over_time = call.step.whole(gates, {time}, gates.shape)
    if not call.arguments["bidirectional"]:
        over_time = call.step.scan(gates, time)
    order = (1, 0, 2) if time else (0, 1, 2)
    every = call.step.elementwise([call.step.permute(over_time, order), *lines], (steps, batch, 1))
    first = call.step.reduce(call.step.permute(gates, order), {0}, (1, batch, 1))
    last = call.step.elementwise([first, *lines], (1, batch, 1))
    results = [call.step.permute(every, order), *[last] * (len(call.shapes) - 1)]
    return [replace(value, shape=shape) for value, shape in zip(results, call.shapes, strict=True)]
