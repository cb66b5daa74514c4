"""Prologues and epilogues of the kernels in torch: the reference of the ops, on the CPU and in tests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nimblec.graph.vocabulary import LEAKY

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "relu6": functional.relu6,
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
}
"""Activations by the names that the ops take; a leaky ReLU's ends with its slope."""


def activated(x: Tensor, activation: str) -> Tensor:
    """Apply the activation of that name."""
    if activation.startswith(LEAKY):
        return functional.leaky_relu(x, float(activation.removeprefix(LEAKY)))
    return _ACTIVATIONS[activation](x)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prologue:
    """What is applied to images as they are read: ``activation(x * scale + shift) * gate``.

    ``scale`` and ``shift`` are (channels,) in float32 and constant; ``gate`` is (images, channels, 1, 1)
    in the dtype of the images, contiguous. Padding with zeros comes after the prologue.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    gate: Tensor | None = None
    activation: str = "none"

    @property
    def pointers(self) -> dict[str, Tensor | None]:
        """The tensors by the names of the templates' parameters."""
        return {"scale_ptr": self.scale, "shift_ptr": self.shift, "gate_ptr": self.gate}

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it to ``x`` (images, channels, height, width), in the dtype of ``x``."""
        if self.scale is not None:
            x = x * self.scale[:, None, None].to(x.dtype)
        if self.shift is not None:
            x = x + self.shift[:, None, None].to(x.dtype)
        x = activated(x, self.activation)
        return x if self.gate is None else x * self.gate.to(x.dtype)


NO_PROLOGUE = Prologue()


def finish(total: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """Add the residual and apply the activation, in the dtype of ``total``."""
    return activated(total if residual is None else total + residual.to(total.dtype), activation)
