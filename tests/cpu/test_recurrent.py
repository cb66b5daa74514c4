"""Recurrent layers of PyTorch: of any number of steps from one export, and of packed sequences."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves
from translations import agree

import nimblec
import nimblert
from nimblec.base.errors import CompileError
from nimblec.pytorch.aten_graph import trace


class _Packed(nn.Module):
    """A recurrent layer of sequences with lengths: all outputs, the lengths and the last states."""

    def __init__(self, layer: nn.RNNBase, padding: float = 0.0, *, is_sorted: bool = False) -> None:
        super().__init__()
        self.layer, self.padding, self.is_sorted = layer, padding, is_sorted

    def forward(self, x: Tensor, lengths: Tensor, state: Any = None) -> Any:
        """Compute them."""
        first = self.layer.batch_first
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.is_sorted)
        y, last = self.layer(packed, state)
        padded = pad_packed_sequence(y, first, self.padding, total_length=x.shape[1 if first else 0])
        return *padded, *(last if isinstance(last, tuple) else (last,))


def steps_of(module: nn.Module, shapes: Any, *examples: Tensor, **dims: Any) -> nimblec.Plan:
    """Return the plan of a module for several sizes."""
    return nimblec.compile(
        module.eval(), examples, target="cpu", streams=1, plan_cache=None, dynamic_shapes=shapes, dims=dims
    )


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(3, 4, 2, batch_first=True),
        nn.GRU(3, 4, bias=False),
        nn.RNN(3, 4, nonlinearity="relu", bidirectional=True),
        nn.RNN(3, 4),
    ],
)
def test_recurrent_layer_takes_any_number_of_steps(layer: nn.RNNBase) -> None:
    """Sizes between are padded where no direction and no last state depends on the steps that follow."""
    shapes = {"input": {0: Dim("T", min=1, max=64), 1: Dim("B", min=1, max=64)}}
    plan = steps_of(layer, shapes, torch.randn(4, 4, 3), T=(2, 8), B=(2, 8))
    with nimblert.load(plan) as executable, torch.no_grad():
        for size in (2, 8):
            x = torch.randn(size, 8, 3)
            for found, expected in zip(tree_leaves(executable(x.numpy())), tree_leaves(layer(x)), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_outputs_of_recurrent_layer_are_served_between_sizes() -> None:
    layer = nn.LSTM(3, 4)
    module = nn.Sequential(layer, _First())
    plan = steps_of(module, ({0: Dim("T", min=1, max=64)},), torch.randn(4, 2, 3), T=(2, 8))
    x = torch.randn(5, 2, 3)
    with nimblert.load(plan) as executable, torch.no_grad():
        np.testing.assert_allclose(executable(x.numpy()), module(x), rtol=1e-5, atol=1e-6)


class _First(nn.Module):
    def forward(self, of: tuple[Tensor, Any]) -> Tensor:
        """Return the first of two."""
        return of[0]


PACKED: dict[str, tuple[_Packed, bool]] = {
    "LSTM of two directions": (_Packed(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)), False),
    "LSTM of sorted sequences": (_Packed(nn.LSTM(3, 4), -1.0, is_sorted=True), False),
    "GRU with a state": (_Packed(nn.GRU(3, 4, batch_first=True)), True),
    "RNN": (_Packed(nn.RNN(3, 4, nonlinearity="relu", bidirectional=True)), False),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_sequence_has_lengths_of_the_call(case: str) -> None:
    module, has_state = PACKED[case]
    state = (torch.randn(1, 3, 4),) if has_state else ()

    def call(*lengths: int) -> tuple[Tensor, ...]:
        x = torch.randn(6, 3, 3)
        return (x.transpose(0, 1) if module.layer.batch_first else x, torch.tensor(lengths), *state)

    others = () if module.is_sorted else (call(1, 6, 4), call(2, 2, 5))
    with torch.no_grad():
        agree(module.eval(), call(6, 3, 2), call(5, 5, 1), *others)


@pytest.mark.parametrize("case", PACKED)
def test_packed_sequence_traces_to_plain_calls(case: str) -> None:
    module, has_state = PACKED[case]
    x = torch.randn((3, 6, 3) if module.layer.batch_first else (6, 3, 3))
    state = (torch.randn(1, 3, 4),) if has_state else ()
    program = trace(module.eval(), (x, torch.tensor([6, 3, 2]), *state))
    for lengths in ([6, 3, 2], [4, 4, 1]):
        given = (x, torch.tensor(lengths), *state)
        with torch.no_grad():
            pairs = zip(program.module(*given), tree_leaves(module(*given)), strict=True)
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)


def test_packed_sequences_are_served_between_sizes() -> None:
    module = _Packed(nn.LSTM(3, 4, batch_first=True, bidirectional=True), is_sorted=True)
    rows = Dim("B", min=1, max=64)
    shapes = {"x": {0: rows, 1: Dim("T", min=1, max=64)}, "lengths": {0: rows}}
    plan = steps_of(module, shapes, torch.randn(3, 2, 3), torch.tensor([2, 2, 1]), T=(2, 8), B=(2, 4))
    x, lengths = torch.randn(3, 5, 3), torch.tensor([5, 4, 1])
    with nimblert.load(plan) as executable, torch.no_grad():
        found = tree_leaves(executable(x.numpy(), lengths.numpy()))
        for array, expected in zip(found, tree_leaves(module(x, lengths)), strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(nimblert.InputError, match="sequence_lens"):
            executable(np.zeros((2, 2, 3), np.float32), np.array([3, 1]))


class _Uses(nn.Module):
    def __init__(self, use: Callable[[PackedSequence], Any]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        """Use a packed sequence."""
        return self.use(pack_padded_sequence(x, lengths))


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda packed: pad_packed_sequence(packed)[0], "pad_packed_sequence makes as many steps as the longest"),
        (lambda packed: packed, "and an output takes what is in it: pad it first"),
        (lambda packed: torch.relu(packed.data), "and relu takes what is in it: pad it first"),
        (lambda packed: packed.data.sum(), "and sum takes what is in it: pad it first"),
        (lambda packed: torch.zeros(int(packed.batch_sizes[1])), "and batch_sizes takes what is in it: pad it first"),
    ],
)
def test_what_is_in_a_packed_sequence_is_refused(use: Callable[[PackedSequence], Any], sentence: str) -> None:
    with pytest.raises(CompileError, match=sentence):
        nimblec.compile(_Uses(use), (torch.randn(4, 2, 3), torch.tensor([4, 2])), target="cpu")
