"""U-Net (Ronneberger et al. 2015): an encoder, a decoder, and shortcuts across."""

import torch
from torch import nn


def _double(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1),
        nn.GroupNorm(4, channels),
        nn.SiLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Images (N, 3, H, W) to class scores (N, classes, H, W); H and W are multiples of 8."""

    def __init__(self, width: int = 32, classes: int = 2) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(_double(2 * w, w) for w in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to class scores of each pixel."""
        shortcuts = []
        for level, layers in enumerate(self.down):
            x = layers(x if level == 0 else nn.functional.max_pool2d(x, 2))
            shortcuts.append(x)
        for widen, layers, shortcut in zip(self.widen, self.up, reversed(shortcuts[:-1]), strict=True):
            x = layers(torch.cat((widen(x), shortcut), 1))
        return torch.sigmoid(self.last(nn.functional.interpolate(x, scale_factor=1.0)))


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Build a narrow U-Net and an image of 32 pixels."""
    return UNet(width=8).eval(), (torch.randn(1, 3, 32, 32),)
