"""A recurrent layer over sequences of several lengths, in terms of the framework's recurrent networks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_COLUMNS = 8
"""Inputs added for the step that is over: as many as keep rows of a matrix aligned."""
_SHUT = 1000.0
"""The weight of each; all together they saturate a gate in every dtype and overflow in none."""


def recurrence_of_lengths(
    network: Any,
    x: Tensor,
    lengths: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    is_backward: bool,
) -> tuple[Tensor, ...]:
    """Run one direction of a layer; return its outputs, zeros beyond each length, and the states after its last step.

    ``network`` is one of `RECURRENT`. ``x`` is (steps, sequences, width), each of the ``states`` is (1, sequences,
    hidden). ``params`` are the weights of the input and of the state, both biases or none, and a projection or none.
    Run it under a `Recorder`, which puts known values where they are used.
    """
    # A longer sequence than there are steps ends with the last.
    lengths = lengths.to(torch.int64).clamp(max=x.shape[0])
    step = torch.arange(x.shape[0]).unsqueeze(1)
    is_over = (step >= lengths).unsqueeze(2)
    order = torch.where(step < lengths, lengths - 1 - step, step).unsqueeze(2)
    if is_backward:
        x = x.gather(0, order.expand(x.shape))
    if network is aten.lstm.input:
        x, params = _kept_cell(x, is_over, params)
    hx: Any = list(states) if len(states) > 1 else states[0]
    y, _, *cell = network(x, hx, list(params), len(params) >= 4, 1, 0.0, False, False, False)
    last = (lengths - 1).clamp(min=0).reshape(1, -1, 1).expand(states[0].shape)
    hidden = torch.where(lengths.reshape(1, -1, 1) > 0, y.gather(0, last), states[0])
    if is_backward:
        y = y.gather(0, order.expand(y.shape))
    return torch.where(is_over, torch.zeros((), dtype=y.dtype), y), hidden, *cell


def _kept_cell(x: Tensor, is_over: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return inputs and parameters of an LSTM with which a step that is over leaves the cell as it is.

    It shuts the input gate and opens the forget gate, so that the last cell is that of each sequence's last step.
    """
    weight, *others = params
    entry, forget, new, out = (part.new_zeros(part.shape[0], _COLUMNS) for part in weight.chunk(4))
    columns = torch.cat([entry - _SHUT, forget + _SHUT, new, out])
    extra = is_over.to(x.dtype).expand(*x.shape[:2], _COLUMNS)
    return torch.cat([x, extra], 2), [torch.cat([weight, columns], 1), *others]
