"""What the kernels compute, in torch: the ops' meaning on the CPU, and what tests compare with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
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
"""By the names that the ops take."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prologue:
    """What is done to images while they are read: ``activation(x * scale + shift) * gate``.

    ``scale`` and ``shift`` are (channels,) in float32 and constant; ``gate`` is (images, channels, 1, 1)
    in the dtype of the images, without gaps. Padding is added to the result, and is zero.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    gate: Tensor | None = None
    activation: str = "none"

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the order of the kernels' arguments."""
        return self.scale, self.shift, self.gate

    def __call__(self, x: Tensor) -> Tensor:
        """In the dtype of ``x`` (images, channels, height, width)."""
        if self.scale is not None:
            x = x * self.scale[:, None, None].to(x.dtype)
        if self.shift is not None:
            x = x + self.shift[:, None, None].to(x.dtype)
        x = ACTIVATIONS[self.activation](x)
        return x if self.gate is None else x * self.gate.to(x.dtype)


NO_PROLOGUE = Prologue()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowNorm:
    """A norm of the rows (rows, columns) of a product, as its sum is corrected by it.

    ``moments`` (parts, 2, rows) are sums and sums of squares of parts of each row; ``column_sums``
    (out channels,) of the weights, which hold the norm's own. Both are in float32.
    """

    moments: Tensor
    column_sums: Tensor
    eps: float
    rms: bool

    @property
    def settings(self) -> Mapping[str, Any]:
        """As `nimblec.kernels.launching.settings` takes it."""
        return {"norm": "rms" if self.rms else "layer", "eps": self.eps, "parts": len(self.moments)}

    def __call__(self, total: Tensor, columns: int) -> Tensor:
        """What the product of the normalised rows is, ``total`` being that of the rows as they are, in float32."""
        mean, square = self.moments.sum(0) / columns
        if self.rms:
            mean = torch.zeros_like(mean)
        scale = torch.rsqrt((square - mean.square()).clamp(min=0) + self.eps)
        return (total - mean[:, None] * self.column_sums) * scale[:, None]


def moments_of(values: Tensor, width: int) -> Tensor:
    """The moments (parts, 2, rows), in float32, of parts of ``width`` columns each of ``values`` (rows, columns)."""
    parts = values.float().unflatten(1, (-1, width))
    return torch.stack([parts.sum(2), parts.square().sum(2)]).permute(2, 0, 1).contiguous()


def as_multiplied(x: Tensor, dtype: torch.dtype, arithmetic: str) -> Tensor:
    """``x`` as kernels multiply it: of float32, tensor cores ignore the last 13 bits."""
    if dtype is torch.float32 and arithmetic == "tf32":
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return x.float()


def finish(total: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """Residual and activation in the dtype of ``total``."""
    return ACTIVATIONS[activation](total if residual is None else total + residual.to(total.dtype))
