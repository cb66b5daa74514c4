"""Fused calls of CUDA libraries in plain ATen calls, and results of calls that torch is slow to infer.

The fused calls exist on CUDA only, or mean something else on the CPU; their definitions infer
shapes and check rewrites on any machine. Sources: aten/src/ATen/native/cudnn/ConvShared.cpp and
torch/_decomp/decompositions.py of PyTorch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def convolution_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Compute ``relu(convolution(x))``."""
    y = aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return aten.relu(y)


def convolution_add_relu(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    alpha: float | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Compute ``relu(convolution(x) + alpha * z)``, with alpha 1 for None."""
    y = aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return aten.relu(aten.add(y, z, alpha=1 if alpha is None else alpha))


def addmm_activation(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, use_gelu: bool = False
) -> Tensor:
    """Compute ``relu(addmm)``, or ``gelu(addmm)``, on CUDA by tanh and on the CPU by erf."""
    y = aten.addmm(bias, left, right, beta=beta, alpha=alpha)
    return aten.gelu(y, approximate="tanh") if use_gelu else aten.relu(y)


DEFINITIONS: dict[Any, Callable[..., Tensor]] = {
    aten.cudnn_convolution_relu.default: convolution_relu,
    aten.cudnn_convolution_add_relu.default: convolution_add_relu,
    aten._addmm_activation.default: addmm_activation,
}


RECURRENT: Mapping[Any, str] = {
    aten.lstm.input: "LSTM",
    aten.gru.input: "GRU",
    aten.rnn_tanh.input: "RNN_TANH",
    aten.rnn_relu.input: "RNN_RELU",
}
"""Whole recurrent networks as `torch.nn` calls them, and torch's names of their cuDNN modes."""


def _normalized(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of a batch norm in inference."""
    return torch.empty_like(x), x.new_empty(0), x.new_empty(0)


def _recurrent(
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    _weights: Sequence[Tensor],
    _has_biases: bool,
    _num_layers: int,
    _dropout: float,
    _train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return the results of a recurrent network for (steps, batch, width), or (batch, steps, width) if ``batch_first``.

    They are the outputs of all steps, (steps, batch, hidden) in memory whatever their shape, and each
    part of the last state. Source: aten/src/ATen/native/RNN.cpp of PyTorch.
    """
    states = (state,) if isinstance(state, Tensor) else tuple(state)
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    outputs = x.new_empty((steps, batch, states[0].shape[2] * (2 if bidirectional else 1)))
    return outputs.transpose(0, 1) if batch_first else outputs, *(x.new_empty(part.shape) for part in states)


FAKES: Mapping[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_no_training.default: _normalized,
    **dict.fromkeys(RECURRENT, _recurrent),
}
"""Results of calls that torch is slow to infer: a deep network has hundreds of norms, and torch infers a recurrent
network step by step."""

INFERENCES: Mapping[Any, Callable[..., Any]] = {**DEFINITIONS, **FAKES}
"""Inference of the calls that torch cannot infer, or is slow to."""


class Interpreter(fx.Interpreter):
    """Runs a graph with these calls replaced by their definitions."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a call."""
        return super().call_function(DEFINITIONS.get(target, target), args, kwargs)
