"""Windows that pass over an image, in terms of ATen's convolution."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Window(NamedTuple):
    """How a window passes over an image, with a number for each axis."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1


def spread(grad: Tensor, weight: Tensor, window: Window, image: Sequence[int]) -> Tensor:
    """A gradient back through the windows of a convolution, to an image of these sizes."""
    reached = [
        (n - 1) * s - 2 * p + d * (k - 1) + 1
        for n, s, p, d, k in zip(
            grad.shape[2:], window.stride, window.padding, window.dilation, weight.shape[2:], strict=True
        )
    ]
    rest = [n - r for n, r in zip(image, reached, strict=True)]
    return convolution(grad, weight, window, transposed=True, output_padding=rest)


def convolution(
    x: Tensor,
    weight: Tensor,
    window: Window,
    *,
    transposed: bool = False,
    output_padding: Sequence[int] | None = None,
) -> Tensor:
    """aten.convolution without a bias."""
    added = list(output_padding or [0] * len(window.stride))
    lists = [list(window.stride), list(window.padding), list(window.dilation)]
    found: Tensor = aten.convolution.default(x, weight, None, *lists, transposed, added, window.groups)
    return found
