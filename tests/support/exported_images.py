"""Convolutional networks in plain torch.nn, for `exported_models`."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn


class ConvNext(nn.Module):
    """A depthwise convolution, a layer norm over channels, layer scale (Liu et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.gamma = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 16, H, W) to the same."""
        y = self.mlp(self.norm(self.depth(x).permute(0, 2, 3, 1))) * self.gamma
        return x + y.permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    """An inverted bottleneck with squeeze and excitation, as EfficientNet and MobileNetV3 have it."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32), activation())
        self.depth = nn.Sequential(nn.Conv2d(32, 32, 5, 2, 2, groups=32, bias=False), nn.BatchNorm2d(32), activation())
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Conv2d(8, 32, 1), nn.Hardsigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(32, 12, 1, bias=False), nn.BatchNorm2d(12))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 8, H, W) to (N, 12, H / 2, W / 2)."""
        x = self.depth(self.expand(x))
        return self.project(x * self.gate(x))


class ShuffleNet(nn.Module):
    """Channel split and shuffle (Ma et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 16, H, W) to the same."""
        left, right = x.chunk(2, 1)
        x = torch.cat([left, self.branch(right)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class DenseNet(nn.Module):
    """Layers that see all before them, and a transition (Huang et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1)) for i in range(3)
        )
        self.transition = nn.Sequential(nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1), nn.AvgPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 8, H, W) to (N, 10, H / 2, W / 2)."""
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.transition(x)


class DeepLab(nn.Module):
    """Dilated convolutions side by side, image pooling, bilinear upsampling (Chen et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(8, 6, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.pool, self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 6, 1)), nn.Conv2d(24, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 8, H, W) to (N, 3, 4 H, 4 W)."""
        parts = [branch(x) for branch in self.branches]
        parts.append(F.interpolate(self.pool(x), size=x.shape[2:], mode="bilinear", align_corners=False))
        y = self.head(torch.cat(parts, 1))
        return F.interpolate(y, scale_factor=4, mode="bilinear", align_corners=False)


class Yolo(nn.Module):
    """SiLU convolutions, pyramid pooling, nearest upsampling, boxes on a grid; no suppression."""

    anchors: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.pool, self.mix = nn.MaxPool2d(5, 1, 2), nn.Conv2d(32, 8, 1)
        self.head = nn.Conv2d(16, 3 * 7, 1)
        self.register_buffer("anchors", torch.rand(1, 3, 1, 1, 2) * 10)

    def forward(self, image: Tensor) -> Tensor:
        """Map (N, 3, 32, 32) to (N, 3 * 16 * 16, 7)."""
        a = F.silu(self.stem(image))
        b = F.silu(self.down(a))
        pooled = [b, self.pool(b), self.pool(self.pool(b)), self.pool(self.pool(self.pool(b)))]
        b = F.interpolate(F.silu(self.mix(torch.cat(pooled, 1))), scale_factor=2.0, mode="nearest")
        y = self.head(torch.cat([a, b], 1))
        n, _, h, w = y.shape
        y = y.view(n, 3, 7, h, w).permute(0, 1, 3, 4, 2).sigmoid()
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack((columns, rows), 2).view(1, 1, h, w, 2).to(y.dtype)
        center = (y[..., 0:2] * 2 - 0.5 + grid) * 8
        size = (y[..., 2:4] * 2) ** 2 * self.anchors
        return torch.cat((center, size, y[..., 4:]), -1).view(n, -1, 7)


def super_resolution() -> nn.Module:
    """Chain convolutions and a pixel shuffle (Shi et al. 2016)."""
    return nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.Tanh(), nn.Conv2d(16, 9, 3, padding=1), nn.PixelShuffle(3))


def style_transfer() -> nn.Module:
    """Chain reflection padding, instance norms, upsampling and transposed convolution (Johnson et al. 2016)."""
    return nn.Sequential(
        nn.ReflectionPad2d(4),
        nn.Conv2d(3, 8, 9),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, 2, 1),
        nn.InstanceNorm2d(12, affine=True),
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.ReplicationPad2d(1),
        nn.Conv2d(12, 8, 3),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, output_padding=0),
    )


class GoogLeNet(nn.Module):
    """A stem with local response normalisation and two modules of four branches (Szegedy et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, ceil_mode=True)
        )
        self.modules_of_branches = nn.ModuleList(self._branches() for _ in range(2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(16, 5))

    @staticmethod
    def _branches() -> nn.ModuleList:
        one = nn.Sequential(nn.Conv2d(16, 4, 1), nn.ReLU())
        three = nn.Sequential(nn.Conv2d(16, 3, 1), nn.ReLU(), nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        five = nn.Sequential(nn.Conv2d(16, 2, 1), nn.ReLU(), nn.Conv2d(2, 3, 5, padding=2), nn.ReLU())
        pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(16, 3, 1), nn.ReLU())
        return nn.ModuleList([one, three, five, pool])

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, h, w) to (N, 5)."""
        x = self.stem(x)
        branches: Any
        for branches in self.modules_of_branches:
            x = torch.cat([branch(x) for branch in branches], 1)
        return self.head(x)


class RegNet(nn.Module):
    """Residual bottlenecks with grouped convolutions and squeeze-and-excitation (Radosavovic et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.grouped = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1, groups=4, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1), nn.Sigmoid()
        )
        self.after = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.shortcut = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 8, h, w) to (N, 16, h / 2, w / 2)."""
        y = self.grouped(self.before(x))
        return F.relu(self.after(y * self.squeeze(y)) + self.shortcut(x))
