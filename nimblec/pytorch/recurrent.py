"""Recurrent layers in an export: of any number of steps, and of packed sequences."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor, fx
from torch._decomp import global_decomposition_table
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.recurrence import recurrence_of_lengths

aten = torch.ops.aten

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def any_steps() -> Iterator[None]:
    """Let torch.export trace a recurrence as one call, whose number of steps may be dynamic.

    To find the shapes of its results, torch unrolls the steps, which fixes their number.
    """
    calls = [getattr(aten, kind).input for kind in _KINDS]
    table, key = global_decomposition_table["post_autograd"], torch._C.DispatchKey.CompositeImplicitAutograd
    before = [(call, table[call], call.py_kernels[key]) for call in calls]
    for call in calls:
        table[call] = call.py_kernels[key] = _shapes
    try:
        yield
    finally:
        for call, decomposition, kernel in before:
            table[call], call.py_kernels[key] = decomposition, kernel


def _shapes(x: Tensor, hx: Any, *given: Any) -> tuple[Tensor, ...]:
    """Return tensors of the shapes of the results: the outputs of each step, and the last states."""
    *_, bidirectional, batch_first = given
    states = [hx] if isinstance(hx, Tensor) else hx
    steps = x.transpose(0, 1) if batch_first else x
    y = steps.new_empty((*steps.shape[:-1], states[0].shape[-1] * (1 + bidirectional)))
    return (y.transpose(0, 1) if batch_first else y, *(state.new_empty(state.shape) for state in states))


@contextmanager
def padded_sequences() -> Iterator[None]:
    """Let torch.export trace packed sequences, whose size depends on values, as padded steps and their lengths."""
    ours: dict[str, Any] = {"_pack_padded_sequence": _pack, "_pad_packed_sequence": _pad}
    ours |= {kind: partial(_recur, kind) for kind in _KINDS}
    for name, function in ours.items():
        setattr(torch._VF, name, function)
    try:
        yield
    finally:
        for name in ours:
            delattr(torch._VF, name)


class _Packed:
    """A part of a packed sequence in an export: ``steps`` (steps x sequences x ...) and their ``lengths``."""

    def __init__(self, steps: Tensor, lengths: Tensor) -> None:
        self.steps, self.lengths = steps, lengths
        self.dtype, self.device = steps.dtype, steps.device

    def __getattr__(self, name: str) -> Never:
        raise _refusal(name)

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Never:
        raise _refusal(function.__name__)


class PackedData(_Packed):
    """What layers ask of the data, which hold anything beyond the lengths."""

    def dim(self) -> int:
        """Return the rank that packed data have."""
        return self.steps.dim() - 1

    def size(self, axis: int) -> Any:
        """Return the number of features."""
        if axis != -1:
            raise _refusal("size")
        return self.steps.shape[axis]


class BatchSizes(_Packed):
    """What layers ask of the batch sizes."""

    def __getitem__(self, step: int) -> Any:
        """Return the number of sequences that have a first step: all."""
        if step != 0:
            raise _refusal("batch_sizes")
        return self.steps.shape[1]

    def size(self, _: int) -> int:
        """Return a stand-in for the length of the longest sequence, which depends on values."""
        return _LONGEST


_LONGEST = -1


def _refuse_output(*_: Any) -> Never:
    raise _refusal("an output")


for _part in (PackedData, BatchSizes):
    pytree.register_pytree_node(_part, _refuse_output, _refuse_output)


def _refusal(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "a plan passes a packed sequence to nn.LSTM, nn.GRU, nn.RNN and pad_packed_sequence alone, and "
        f"{what} takes what is in it: pad it first"
    )


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[PackedData, BatchSizes]:
    steps = x.transpose(0, 1) if batch_first else x
    return PackedData(steps, lengths), BatchSizes(steps, lengths)


def _pad(
    data: PackedData, _: BatchSizes, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    if total_length == _LONGEST:
        raise UnsupportedModelError(
            "pad_packed_sequence makes as many steps as the longest sequence has, and a plan is static: give it a "
            "total_length, such as that of the padded input"
        )
    steps, missing = data.steps, total_length - data.steps.shape[0]
    beyond = torch.arange(steps.shape[0], device=steps.device)[:, None] >= data.lengths
    steps = steps.masked_fill(beyond.reshape(*beyond.shape, *[1] * (steps.dim() - 2)), padding_value)
    if missing != 0:
        steps = torch.nn.functional.pad(steps, [0] * (2 * steps.dim() - 1) + [missing], value=padding_value)
    return steps.transpose(0, 1) if batch_first else steps, data.lengths


def _recur(kind: str, x: Any, *given: Any) -> Any:
    if not isinstance(x, PackedData):
        return getattr(torch._C._VariableFunctions, kind)(x, *given)
    _, hx, *others = given
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    y, *last = _recurrence_of_lengths(kind, x.steps, x.lengths, states, *others)
    return (PackedData(y, x.lengths), *last)


@torch.library.custom_op("nimblec::recurrence_of_lengths", mutates_args=())
def _recurrence_of_lengths(
    kind: str,
    x: Tensor,
    lengths: Tensor,
    states: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> list[Tensor]:
    """Return the outputs of each step, zeros beyond the lengths, and the states after the last of each sequence."""
    data, sizes, *_ = rnn.pack_padded_sequence(x, lengths.cpu())
    hx: Any = states if kind == "lstm" else states[0]
    y, *last = getattr(torch._VF, kind)(
        data, sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional
    )
    y, _ = rnn.pad_packed_sequence(rnn.PackedSequence(y, sizes), total_length=x.shape[0])
    return [y, *last]


OF_LENGTHS = torch.ops.nimblec.recurrence_of_lengths.default
"""The call that an exported graph has for a recurrent network of packed sequences."""


def has_lengths(module: Any) -> bool:
    """Return whether an exported graph has a recurrent network of packed sequences."""
    return isinstance(module, fx.GraphModule) and any(node.target is OF_LENGTHS for node in module.graph.nodes)


def run_of_lengths(
    kind: str,
    x: Tensor,
    lengths: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    _has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> list[Tensor]:
    """Return what `OF_LENGTHS` does, by calls of the framework's networks under a `Recorder`."""
    if train and dropout:
        raise UnsupportedModelError(f"{kind} of packed sequences draws random numbers: call .eval() first")
    directions = 2 if bidirectional else 1
    count = num_layers * directions
    each = len(params) // count
    last = []
    for layer in range(num_layers):
        outputs = []
        for place in range(layer * directions, (layer + 1) * directions):
            own = [state.narrow(0, place, 1) for state in states]
            weights = params[place * each : (place + 1) * each]
            network = getattr(aten, kind).input
            y, *ends = recurrence_of_lengths(network, x, lengths, own, weights, is_backward=place % directions == 1)
            outputs.append(y)
            last.append(ends)
        x = torch.cat(outputs, 2)
    return [x, *map(torch.cat, zip(*last, strict=True))]


@_recurrence_of_lengths.register_fake
def _(_: str, x: Tensor, _lengths: Tensor, states: list[Tensor], *others: Any) -> list[Tensor]:
    return list(_shapes(x, states, *others, False))
