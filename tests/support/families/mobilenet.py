"""MobileNetV2 (Sandler et al. 2018): inverted residuals with depthwise convolutions."""

import torch
from torch import nn


def _conv(channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """Widen by 1x1, depthwise 3x3, narrow by 1x1; a shortcut where the shapes allow it."""

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels_in * expansion
        self.residual = stride == 1 and channels_in == channels
        self.layers = nn.Sequential(
            _conv(channels_in, wide, 1),
            _conv(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / stride, W / stride)."""
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes)."""

    def __init__(self, classes: int = 1000, depth: tuple[int, ...] = (1, 2, 3, 4, 3, 3, 1)) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, 2)]
        channels_in = 32
        widths, strides = (16, 24, 32, 64, 96, 160, 320), (1, 2, 2, 2, 1, 2, 1)
        for stage, (channels, count, stride) in enumerate(zip(widths, depth, strides, strict=True)):
            for block in range(count):
                expansion = 6 if stage else 1
                layers.append(InvertedResidual(channels_in, channels, 1 if block else stride, expansion))
                channels_in = channels
        layers += [_conv(channels_in, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers, nn.Linear(1280, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to logits."""
        return self.layers(x)


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Build a shallow MobileNetV2 and an image of 64 pixels."""
    return MobileNet(classes=10, depth=(1, 2, 2, 2, 1, 1, 1)).eval(), (torch.randn(1, 3, 64, 64),)
