"""ResNet-18 in plain PyTorch, with seeded random weights.

Compile it from the root of the repository: ``nimblec compile samples.resnet:resnet18 -o resnet18.plan``.
"""

import torch
from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2016, figure 2)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else project(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """N x channels_in x H x W to N x channels x H/stride x W/stride."""
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + self.shortcut(x)).relu()


def project(channels_in: int, channels: int, stride: int) -> nn.Module:
    """The 1x1 convolution on a shortcut whose shape changes."""
    conv = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels))


class ResNet18(nn.Module):
    """Images (N x 3 x H x W) to ``classes`` scores."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTHS[0], 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(WIDTHS[0]),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks, channels_in = [], WIDTHS[0]
        for stage, channels in enumerate(WIDTHS):
            blocks += [
                BasicBlock(channels_in, channels, stride=2 if stage else 1),
                BasicBlock(channels, channels, stride=1),
            ]
            channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels_in, classes)

    def forward(self, image: Tensor) -> Tensor:
        """The scores of every class."""
        return self.classifier(self.blocks(self.stem(image)).mean(dim=(2, 3)))


def resnet18(size: int = 224) -> tuple[nn.Module, tuple[Tensor]]:
    """The module in evaluation mode and one example image of ``size`` x ``size`` pixels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResNet18().eval(), (torch.randn(1, 3, size, size),)
