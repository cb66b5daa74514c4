"""AmoebaNet-A (Real et al., AAAI 2019, arXiv 1802.01548) for ImageNet, random weights, batch 1, in two arrangements.

`fp32` and `fp16` are the paper's mobile network: N = 4 normal cells per stack, F = 50 channels in the first.
`fp32_as_in_nimble` and `fp16_as_in_nimble` are the AmoebaNet of Nimble (Kwon et al., NeurIPS 2020): the cells of the
paper's first version as published by the authors of DARTS, in the arrangement of DARTS.
"""

import torch
from torch import nn

from bench.models.darts import DartsNetwork, settled_on_others
from bench.models.half import channels_last
from bench.models.searched_cells import Cells, Genotype

NORMAL = Genotype(
    edges=(
        *(("avg_pool_3x3", 1), ("max_pool_3x3", 1)),
        *(("sep_conv_3x3", 0), ("skip_connect", 0)),
        *(("skip_connect", 1), ("avg_pool_3x3", 0)),
        *(("sep_conv_3x3", 1), ("sep_conv_5x5", 2)),
        *(("avg_pool_3x3", 5), ("sep_conv_3x3", 1)),
    ),
    outputs=(3, 4, 6),
)
REDUCTION = Genotype(
    edges=(
        *(("sep_conv_3x3", 0), ("avg_pool_3x3", 1)),
        *(("max_pool_3x3", 1), ("sep_conv_7x7", 2)),
        *(("max_pool_3x3", 0), ("max_pool_3x3", 1)),
        *(("sep_conv_3x3", 4), ("conv_1x7_7x1", 1)),
        *(("avg_pool_3x3", 0), ("sep_conv_7x7", 1)),
    ),
    outputs=(3, 5, 6),
)

NIMBLE_NORMAL = Genotype(
    edges=(
        *(("avg_pool_3x3", 0), ("max_pool_3x3", 1)),
        *(("sep_conv_3x3", 0), ("sep_conv_5x5", 2)),
        *(("sep_conv_3x3", 0), ("avg_pool_3x3", 3)),
        *(("sep_conv_3x3", 1), ("skip_connect", 1)),
        *(("skip_connect", 0), ("avg_pool_3x3", 1)),
    ),
    outputs=(4, 5, 6),
)
NIMBLE_REDUCTION = Genotype(
    edges=(
        *(("avg_pool_3x3", 0), ("sep_conv_3x3", 1)),
        *(("max_pool_3x3", 0), ("sep_conv_7x7", 2)),
        *(("sep_conv_7x7", 0), ("avg_pool_3x3", 1)),
        *(("max_pool_3x3", 0), ("max_pool_3x3", 1)),
        *(("conv_1x7_then_7x1", 0), ("sep_conv_3x3", 5)),
    ),
    outputs=(3, 4, 6),
)

_STEM_CHANNELS = 32


class AmoebaNetA(nn.Module):
    """A convolution, two reduction cells, and three stacks of normal cells with reduction cells between them."""

    def __init__(self, *, channels: int = 50, stack: int = 4) -> None:
        """``channels`` of the first stack, F in the paper; ``stack``: normal cells in each, N in the paper."""
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, _STEM_CHANNELS, 3, 2, bias=False),
            nn.BatchNorm2d(_STEM_CHANNELS),
        )
        made_of = (
            *((REDUCTION, channels // 4, True), (REDUCTION, channels // 2, True)),
            *[(NORMAL, channels, False)] * stack,
            *((REDUCTION, 2 * channels, True), *[(NORMAL, 2 * channels, False)] * stack),
            *((REDUCTION, 4 * channels, True), *[(NORMAL, 4 * channels, False)] * stack),
        )
        self.cells = Cells(made_of, (_STEM_CHANNELS, _STEM_CHANNELS), shrinks_first=False)
        self.classifier = nn.Linear(self.cells.out_channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, 224, 224) to (batch, 1000)."""
        x = self.stem(x)
        return self.classifier(self.cells(x, x).relu().mean((2, 3)))


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    return settled_on_others(AmoebaNetA())


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    return _halved(*fp32())


def fp32_as_in_nimble() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    return settled_on_others(DartsNetwork(NIMBLE_NORMAL, NIMBLE_REDUCTION))


def fp16_as_in_nimble() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    return _halved(*fp32_as_in_nimble())


def _halved(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    (image,) = inputs
    return channels_last(module, image)
