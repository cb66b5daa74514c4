"""DARTS (Liu et al., ICLR 2019, arXiv 1806.09055): the second-order cells, for ImageNet, random weights, batch 1."""

from collections.abc import Callable

import torch
from torch import nn

from bench.models.images import Model, channels_last, settled
from bench.models.searched_cells import Cells, Genotype

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
        """Build ``cells`` cells of ``channels``, which double at each reduction, after a third and two thirds."""
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
        reductions = {cells // 3, 2 * cells // 3}
        made_of = []
        for index in range(cells):
            reduces = index in reductions
            width = channels << sum(place <= index for place in reductions)
            made_of.append((reduction if reduces else normal, width, reduces))
        self.cells = Cells(made_of, (channels, channels), shrinks_first=True)
        self.classifier = nn.Linear(self.cells.out_channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 3, 224, 224) to (batch, 1000)."""
        x = self.stem(x)
        return self.classifier(self.cells(x, self.second_stem(x)).mean((2, 3)))


def precisions(build: Callable[[], nn.Module]) -> tuple[Callable[[], Model], Callable[[], Model]]:
    """Return the callables ``fp32`` and ``fp16`` (channels last) of a network, `settled` on other images.

    Cells end with batch norms, whose outputs have mean 0 on the images of their statistics: the classifier would read
    rounding errors.
    """

    def fp32() -> Model:
        return settled(build(), torch.randn(2, 3, 224, 224)), (torch.randn(1, 3, 224, 224),)

    def fp16() -> Model:
        module, (image,) = fp32()
        return channels_last(module, image)

    return fp32, fp16


fp32, fp16 = precisions(lambda: DartsNetwork(NORMAL, REDUCTION))
