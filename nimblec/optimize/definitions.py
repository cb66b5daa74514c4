"""What the fused calls of CUDA libraries compute there, in plain ATen calls.

They exist on CUDA only, or mean something else on the CPU; these definitions infer their shapes and
check rewrites on any machine. Sources: aten/src/ATen/native/cudnn/ConvShared.cpp and
torch/_decomp/decompositions.py of PyTorch.
"""

from collections.abc import Callable, Sequence
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
    """``relu(convolution(x))``."""
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
    """``relu(convolution(x) + alpha * z)``, alpha 1 where it is None."""
    y = aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return aten.relu(aten.add(y, z, alpha=1 if alpha is None else alpha))


def addmm_activation(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, use_gelu: bool = False
) -> Tensor:
    """``relu(addmm)``, or ``gelu(addmm)`` by tanh on CUDA; on the CPU it is by erf."""
    y = aten.addmm(bias, left, right, beta=beta, alpha=alpha)
    return aten.gelu(y, approximate="tanh") if use_gelu else aten.relu(y)


DEFINITIONS: dict[Any, Callable[..., Tensor]] = {
    aten.cudnn_convolution_relu.default: convolution_relu,
    aten.cudnn_convolution_add_relu.default: convolution_add_relu,
    aten._addmm_activation.default: addmm_activation,
}


class Interpreter(fx.Interpreter):
    """Runs a graph with these calls replaced by their definitions."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a call."""
        return super().call_function(DEFINITIONS.get(target, target), args, kwargs)
