"""Translations of recurrent layers to ONNX's operators."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import onnx_ir
import torch
from onnxscript import opset18 as op

from nimblec.base.errors import UnsupportedModelError
from nimblec.onnx_export.constants import ints, size

aten = torch.ops.aten

_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""The place among PyTorch's gates of each of ONNX's."""


def _recurrence(
    kind: str, x: Any, hx: Any, params: Sequence[Any], *given: Any, lengths: Any = None, activation: str = ""
) -> Any:
    """Translate aten.lstm.input and its like; refuse a projection of the hidden state, which ONNX's LSTM lacks."""
    # A module that draws random numbers for dropout is refused before.
    has_biases, num_layers, _dropout, _train, bidirectional, batch_first = given
    states = hx if kind == "LSTM" else [hx]
    ways, count = 1 + bidirectional, 4 if has_biases else 2
    if len(params) != num_layers * ways * count:
        raise UnsupportedModelError("ONNX's LSTM has no projection (proj_size): compile for --target cuda")
    hidden = size(states[0], 2)
    attributes: dict[str, Any] = {"hidden_size": hidden}
    attributes |= {"direction": "bidirectional"} if bidirectional else {}
    attributes |= {"linear_before_reset": 1} if kind == "GRU" else {}
    attributes |= {"activations": [activation] * ways} if activation else {}
    y = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    lasts = []
    for layer in range(num_layers):
        start = layer * ways
        own = [[_gates(kind, p) for p in params[i * count : (i + 1) * count]] for i in range(start, start + ways)]
        weights = [_stacked([of[i] for of in own]) for i in range(2)]
        bias = _stacked([op.Concat(*of[2:], axis=0) for of in own]) if has_biases else None
        before = [op.Slice(state, ints([start]), ints([start + ways]), ints([0])) for state in states]
        y, *last = getattr(op, kind)(y, *weights, bias, lengths, *before, **attributes)
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), ints([0, 0, ways * hidden]))
        lasts.append(last)
    y = op.Transpose(y, perm=[1, 0, 2]) if batch_first else y
    return (y, *(of[0] if len(of) == 1 else op.Concat(*of, axis=0) for of in zip(*lasts, strict=True)))


def _gates(kind: str, weight: Any) -> Any:
    """Return a weight or bias with its gates in ONNX's order."""
    order = _GATES[kind]
    rows = size(weight, 0) // len(order)
    parts = [op.Slice(weight, ints([k * rows]), ints([(k + 1) * rows]), ints([0])) for k in order]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)


def _stacked(values: Sequence[Any]) -> Any:
    """Return values of both directions along a new first axis."""
    rows = [op.Unsqueeze(value, ints([0])) for value in values]
    return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)


_BY_NAME = {
    "lstm": partial(_recurrence, "LSTM"),
    "gru": partial(_recurrence, "GRU"),
    "rnn_tanh": partial(_recurrence, "RNN"),
    "rnn_relu": partial(_recurrence, "RNN", activation="Relu"),
}


def _recurrence_of_lengths(kind: str, x: Any, lengths: Any, states: Sequence[Any], *others: Any) -> Any:
    """Translate the recurrence of a packed sequence; ONNX Runtime refuses a length of more than there are steps."""
    hx = states if kind == "lstm" else states[0]
    return _BY_NAME[kind](x, hx, *others, False, lengths=op.Cast(lengths, to=onnx_ir.DataType.INT32))


RECURRENT: dict[Any, Any] = {
    **{getattr(aten, name).input: translation for name, translation in _BY_NAME.items()},
    torch.ops.nimblec.recurrence_of_lengths.default: _recurrence_of_lengths,
}
