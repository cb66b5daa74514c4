"""NASNet-A mobile (4 @ 1056), random weights, batch 1, from the cells of timm's NASNet-A large."""

import torch
from timm.models.nasnet import NASNetALarge

from bench.models.images import precisions

_LEFT_OUT = ("cell_4", "cell_5", "cell_10", "cell_11", "cell_16", "cell_17")


class NASNetAMobile(NASNetALarge):
    """Four normal cells per stack instead of six, 44 channels instead of 168 (Zoph et al., 2018)."""

    def __init__(self) -> None:
        super().__init__(stem_size=32, num_features=1056)
        for name in _LEFT_OUT:
            delattr(self, name)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 3, 224, 224) to (batch, 1056, 7, 7)."""
        stem = self.conv0(x)
        before = self.cell_stem_0(stem)
        now = self.cell_stem_1(stem, before)
        for reduction, cells in (
            (None, (self.cell_0, self.cell_1, self.cell_2, self.cell_3)),
            (self.reduction_cell_0, (self.cell_6, self.cell_7, self.cell_8, self.cell_9)),
            (self.reduction_cell_1, (self.cell_12, self.cell_13, self.cell_14, self.cell_15)),
        ):
            if reduction is not None:
                before, now = now, reduction(now, before)
            for cell in cells:
                before, now = now, cell(now, before)
        return self.act(now)


fp32, fp16 = precisions(NASNetAMobile, settle=True)
