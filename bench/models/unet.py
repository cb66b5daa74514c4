"""A segmentation UNet (Ronneberger et al., 2015) with batch norm, 256x256, 31 million parameters, random weights."""

import torch
from torch import nn

from bench.models.images import precisions

_WIDTHS = (64, 128, 256, 512, 1024)


def _block(channels: int, width: int) -> nn.Sequential:
    """Chain two 3x3 convolutions, each with batch norm and ReLU; the image keeps its size."""
    layers: list[nn.Module] = []
    for source in (channels, width):
        layers += [nn.Conv2d(source, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Four levels of downsampling and four of upsampling; skip connections by concatenation."""

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(_block, (3, *_WIDTHS[:-1]), _WIDTHS))
        wide, narrow = _WIDTHS[:0:-1], _WIDTHS[-2::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(w, n, 2, stride=2) for w, n in zip(wide, narrow, strict=True))
        self.up = nn.ModuleList(map(_block, wide, narrow))
        self.classify = nn.Conv2d(_WIDTHS[0], classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Map (batch, 3, height, width) to (batch, classes, height, width); the sides are multiples of 16."""
        kept = [self.down[0](image)]
        for block in self.down[1:]:
            kept.append(block(nn.functional.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat((kept.pop(), grow(x)), 1))
        return self.classify(x)


fp32, fp16 = precisions(UNet, 256)
