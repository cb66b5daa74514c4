"""Inception-like (Szegedy et al. 2015): four branches side by side, concatenated by channel."""

import torch
from torch import nn


def _conv(channels_in: int, channels: int, kernel: int | tuple[int, int]) -> nn.Sequential:
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, padding=(height // 2, width // 2), bias=False),
        nn.BatchNorm2d(channels, eps=0.001),
        nn.ReLU(),
    )


class Mixed(nn.Module):
    """1x1, 1x1 and 5x5, factorised 1x7 and 7x1, and pooling branches, ``width`` channels each."""

    def __init__(self, channels_in: int, width: int) -> None:
        super().__init__()
        self.branch1 = _conv(channels_in, width, 1)
        self.branch2 = nn.Sequential(_conv(channels_in, width // 2, 1), _conv(width // 2, width, 5))
        self.branch3 = nn.Sequential(
            _conv(channels_in, width // 2, 1), _conv(width // 2, width, (1, 7)), _conv(width, width, (7, 1))
        )
        self.branch4 = nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(channels_in, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, channels_in, H, W) to (N, 4 * width, H, W)."""
        return torch.cat((self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)), 1)


class Inception(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes)."""

    def __init__(self, width: int = 64, blocks: int = 8, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2)
        )
        mixed = [Mixed(width if block == 0 else 4 * width, width) for block in range(blocks)]
        self.mixed = nn.Sequential(*mixed)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to logits."""
        return self.head(self.mixed(self.stem(x)))


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Build three narrow blocks and an image of 64 pixels."""
    return Inception(width=16, blocks=3, classes=10).eval(), (torch.randn(1, 3, 64, 64),)
