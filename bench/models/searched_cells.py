"""Cells found by architecture search, from their published descriptions, for DARTS and AmoebaNet."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Edge = tuple[str, int]
"""A name in `OPERATIONS`, and the state that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Genotype:
    """The result of a search: two edges for each new state, and the states that the cell returns.

    State 0 and state 1 are the cell's inputs; the sum of edges 2i and 2i + 1 is state i + 2.
    """

    edges: tuple[Edge, ...]
    outputs: tuple[int, ...]


def _rectified(*convolutions: nn.Conv2d) -> nn.Sequential:
    """Chain a ReLU, convolutions, and a batch norm."""
    channels = convolutions[-1].out_channels
    return nn.Sequential(nn.ReLU(), *convolutions, nn.BatchNorm2d(channels))


def _depthwise(channels: int, size: int, stride: int, dilation: int = 1) -> nn.Conv2d:
    padding = dilation * (size // 2)
    return nn.Conv2d(channels, channels, size, stride, padding, dilation, groups=channels, bias=False)


def _pointwise(channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 1, bias=False)


def _separable(size: int) -> Callable[[int, int], nn.Module]:
    """Return a builder of two depthwise separable convolutions; as in NASNet, only the first has the stride."""
    return lambda channels, stride: nn.Sequential(
        _rectified(_depthwise(channels, size, stride), _pointwise(channels, channels)),
        _rectified(_depthwise(channels, size, 1), _pointwise(channels, channels)),
    )


def _dilated(size: int) -> Callable[[int, int], nn.Module]:
    return lambda channels, stride: _rectified(_depthwise(channels, size, stride, 2), _pointwise(channels, channels))


OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "avg_pool_3x3": lambda _, stride: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
    "max_pool_3x3": lambda _, stride: nn.MaxPool2d(3, stride, 1),
    "skip_connect": lambda channels, stride: nn.Identity() if stride == 1 else FactorizedReduce(channels, channels),
    "sep_conv_3x3": _separable(3),
    "sep_conv_5x5": _separable(5),
    "sep_conv_7x7": _separable(7),
    "dil_conv_3x3": _dilated(3),
    "conv_1x7_then_7x1": lambda channels, stride: _rectified(
        nn.Conv2d(channels, channels, (1, 7), (1, stride), (0, 3), bias=False),
        nn.Conv2d(channels, channels, (7, 1), (stride, 1), (3, 0), bias=False),
    ),
}
"""Each takes channels and a stride, and returns a module with as many output channels.

``conv_1x7_then_7x1`` has no norm between its convolutions: DARTS' form of NASNet's ``conv_1x7_7x1``.
"""


class FactorizedReduce(nn.Module):
    """Half the size: one 1x1 convolution of the pixels of even index, one of those of odd index (Zoph et al., 2018)."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, out_channels // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(channels, out_channels - out_channels // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels, height, width) to (batch, out_channels, ceil(height / 2), ceil(width / 2))."""
        x = functional.relu(x)
        shifted = functional.pad(x[:, :, 1:, 1:], (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))


class Cell(nn.Module):
    """A genotype at a width; a reduction cell halves the size of both its inputs."""

    def __init__(
        self,
        genotype: Genotype,
        in_channels: tuple[int, int],
        channels: int,
        *,
        reduces: bool,
        shrinks_first: bool,
    ) -> None:
        """Take the ``in_channels`` of states 0 and 1; if ``shrinks_first``, state 0 is twice the size of state 1."""
        super().__init__()
        first, second = in_channels
        self.first = FactorizedReduce(first, channels) if shrinks_first else _rectified(_pointwise(first, channels))
        self.second = _rectified(_pointwise(second, channels))
        self.operations = nn.ModuleList(
            OPERATIONS[name](channels, 2 if reduces and state < 2 else 1) for name, state in genotype.edges
        )
        self._reads = [state for _, state in genotype.edges]
        self._outputs = genotype.outputs
        self.out_channels = channels * len(genotype.outputs)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return the states that the cell returns, concatenated."""
        states = [self.first(first), self.second(second)]
        edges = iter(zip(self.operations, self._reads, strict=True))
        for (left, of_left), (right, of_right) in zip(edges, edges, strict=True):
            states.append(left(states[of_left]) + right(states[of_right]))
        return torch.cat([states[index] for index in self._outputs], dim=1)


class Cells(nn.ModuleList):
    """Cells in a row; each reads the outputs of the two before it."""

    def __init__(
        self, made_of: Iterable[tuple[Genotype, int, bool]], in_channels: tuple[int, int], *, shrinks_first: bool
    ) -> None:
        """Build a `Cell` from each (genotype, channels, whether it reduces); the rest is as of the first `Cell`."""
        super().__init__()
        before, now = in_channels
        for genotype, channels, reduces in made_of:
            cell = Cell(genotype, (before, now), channels, reduces=reduces, shrinks_first=shrinks_first)
            self.append(cell)
            before, now, shrinks_first = now, cell.out_channels, reduces
        self.out_channels = now

    def forward(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """Return the output of the last cell."""
        for cell in self:
            before, now = now, cell(before, now)
        return now
