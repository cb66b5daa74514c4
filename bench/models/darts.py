"""DARTS (Liu et al., ICLR 2019, arXiv 1806.09055): the second-order cells, for ImageNet, random weights, batch 1."""

import torch
from torch import nn

from bench.models.batch_statistics import settled
from bench.models.half import channels_last
from bench.models.searched_cells import Cell, Genotype

NORMAL = Genotype(
    edges=(
        *(("sep_conv_3x3", 0), ("sep_conv_3x3", 1)),
        *(("sep_conv_3x3", 0), ("sep_conv_3x3", 1)),
        *(("sep_conv_3x3", 1), ("skip_connect", 0)),
        *(("skip_connect", 0), ("dil_conv_3x3", 2)),
    ),
    outputs=(2, 3, 4, 5),
)
REDUCTION = Genotype(
    edges=(
        *(("max_pool_3x3", 0), ("max_pool_3x3", 1)),
        *(("skip_connect", 2), ("max_pool_3x3", 1)),
        *(("max_pool_3x3", 0), ("skip_connect", 2)),
        *(("skip_connect", 2), ("max_pool_3x3", 1)),
    ),
    outputs=(2, 3, 4, 5),
)


class DartsNetwork(nn.Module):
    """Cells between a stem of three convolutions of stride 2 and a linear classifier; no auxiliary head."""

    def __init__(self, normal: Genotype, reduction: Genotype, *, channels: int = 48, cells: int = 14) -> None:
        """``channels`` of the first cells; they double at each reduction, after a third and two thirds of ``cells``."""
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels // 2, 3, 2, 1, bias=False),
            nn.BatchNorm2d(channels // 2),
            nn.ReLU(),
            nn.Conv2d(channels // 2, channels, 3, 2, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.second_stem = nn.Sequential(
            nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels)
        )
        made = []
        before, now, shrinks_first = channels, channels, True
        for index in range(cells):
            reduces = index in {cells // 3, 2 * cells // 3}
            channels *= 2 if reduces else 1
            genotype = reduction if reduces else normal
            made.append(Cell(genotype, (before, now), channels, reduces=reduces, shrinks_first=shrinks_first))
            before, now, shrinks_first = now, made[-1].out_channels, reduces
        self.cells = nn.ModuleList(made)
        self.classifier = nn.Linear(now, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, 224, 224) to (batch, 1000)."""
        before = self.stem(x)
        now = self.second_stem(before)
        for cell in self.cells:
            before, now = now, cell(before, now)
        return self.classifier(now.mean((2, 3)))


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    return settled_on_others(DartsNetwork(NORMAL, REDUCTION))


def settled_on_others(module: nn.Module) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """`settled` on other images than the example that comes with it.

    Batch norms come last in these cells. On the image of their statistics, what they return has the mean 0, and so
    the features that reach the classifier would be rounding errors.
    """
    return settled(module, torch.randn(2, 3, 224, 224)), (torch.randn(1, 3, 224, 224),)


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module, (image,) = fp32()
    return channels_last(module, image)
