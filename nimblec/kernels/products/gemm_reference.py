"""Norms and arithmetic of the kernel of convolutions and products, in torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowNorm:
    """A norm of the rows (rows, columns) that a product reads, applied as a correction of its sums.

    ``moments`` (parts, 2, rows) are sums and sums of squares of parts of each row; ``column_sums``
    (out channels,) are sums of the weights, into which the norm's own are multiplied. Both are in float32.
    """

    moments: Tensor
    column_sums: Tensor
    eps: float
    rms: bool

    @property
    def settings(self) -> Mapping[str, Any]:
        """The template's constants."""
        return {"NORM": "rms" if self.rms else "layer", "EPS": self.eps, "PARTS": len(self.moments)}

    def __call__(self, total: Tensor, columns: int) -> Tensor:
        """Return the product of the normalised rows in float32, from ``total``, that of the rows as they are."""
        mean, square = self.moments.sum(0) / columns
        if self.rms:
            mean = torch.zeros_like(mean)
        scale = torch.rsqrt((square - mean.square()).clamp(min=0) + self.eps)
        corrected: Tensor = (total - mean[:, None] * self.column_sums) * scale[:, None]
        return corrected


def moments_of(values: Tensor, width: int) -> Tensor:
    """Compute moments (parts, 2, rows), in float32, of parts of ``width`` columns of ``values`` (rows, columns)."""
    parts = values.float().unflatten(1, (-1, width))
    return torch.stack([parts.sum(2), parts.square().sum(2)]).permute(2, 0, 1).contiguous()


def as_multiplied(x: Tensor, dtype: torch.dtype, arithmetic: str) -> Tensor:
    """Return ``x`` as the kernels multiply it: as TF32, tensor cores ignore the last 13 bits of float32."""
    if dtype is torch.float32 and arithmetic == "tf32":
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return x.float()
