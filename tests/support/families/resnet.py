"""ResNet-18 (He et al. 2016): residual blocks of two 3x3 convolutions."""

from collections.abc import Sequence

import torch
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / stride, W / stride)."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet of images (N, 3, H, W), by the number of blocks in each stage; the default is ResNet-18."""

    def __init__(self, width: int = 64, classes: int = 1000, stages: Sequence[int] = (2, 2, 2, 2)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks = []
        channels_in = width
        for stage, count in enumerate(stages):
            for block in range(count):
                channels = width << stage
                blocks.append(Block(channels_in, channels, 2 if stage and not block else 1))
                channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to logits."""
        return self.head(self.blocks(self.stem(x)))


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Build a narrow ResNet, whose last stage has two blocks, and an image of 64 pixels."""
    return ResNet(width=16, classes=10, stages=(1, 1, 1, 2)).eval(), (torch.randn(1, 3, 64, 64),)
