"""Networks trained at the sizes of practice: ImageNet's ResNet-50, BERT-base, CycleGAN's generators; random weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

Parts = tuple[nn.Module, tuple[Tensor, Tensor]]
"""A model, and a batch of inputs and targets."""

_CYCLE = 10.0
"""The weight of the cycle's loss, as in the paper."""


def _resnet50(batch: int) -> Parts:
    import torchvision

    return torchvision.models.resnet50(), (torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,)))


class _Classifier(nn.Module):
    """BERT-base (transformers) with two classes, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert, self.scores = BertModel(BertConfig()), nn.Linear(768, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score (n, 128) token ids."""
        result: Tensor = self.scores(self.bert(tokens).pooler_output)
        return result


def _bert_base(batch: int) -> Parts:
    return _Classifier(), (torch.randint(0, 30522, (batch, 128)), torch.randint(0, 2, (batch,)))


class CycleGAN(nn.Module):
    """Both generators between two kinds of images, and the discriminators, which are not trained here.

    Source: Zhu et al., ICCV 2017, arXiv 1703.10593: nine residual blocks of 256 channels (``width`` 64), PatchGAN.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generators = nn.ModuleList(_generator(width) for _ in range(2))
        self.discriminators = nn.ModuleList(_discriminator(width) for _ in range(2)).requires_grad_(requires_grad=False)

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (n, 2, 3, height, width) translated there and back, and scores of the translated ones."""
        fakes = [g(pairs[:, kind]) for kind, g in enumerate(self.generators)]
        back = [g(fake) for g, fake in zip(self.generators, fakes[::-1], strict=True)]
        judged = [d(fake) for d, fake in zip(self.discriminators, fakes, strict=True)]
        return torch.stack(back[::-1], 1), torch.stack(judged, 1)


def cycle_loss(outputs: tuple[Tensor, Tensor], pairs: Tensor) -> Tensor:
    """Return the generators' loss: the difference after a cycle, and that of the scores from one, for real images."""
    back, judged = outputs
    return _CYCLE * functional.l1_loss(back, pairs) + functional.mse_loss(judged, torch.ones_like(judged))


def _normed(*layers: nn.Module, channels: int) -> list[nn.Module]:
    return [*layers, nn.InstanceNorm2d(channels), nn.ReLU()]


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = ([nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3)] for _ in range(2))
        self.layers = nn.Sequential(*_normed(*first, channels=channels), *second, nn.InstanceNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layers(x)
        return x + changed


def _generator(width: int) -> nn.Module:
    layers = _normed(nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), channels=width)
    for n in (width, 2 * width):
        layers += _normed(nn.Conv2d(n, 2 * n, 3, 2, 1), channels=2 * n)
    layers += [_Residual(4 * width) for _ in range(9)]
    for n in (4 * width, 2 * width):
        layers += _normed(nn.ConvTranspose2d(n, n // 2, 3, 2, 1, 1), channels=n // 2)
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())


def _discriminator(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for n, stride in ((width, 2), (2 * width, 2), (4 * width, 1)):
        layers += [nn.Conv2d(n, 2 * n, 4, stride, 1), nn.InstanceNorm2d(2 * n), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 1))


def _cyclegan(batch: int) -> Parts:
    pairs = torch.randn(batch, 2, 3, 256, 256).clamp(-1, 1)
    return CycleGAN(), (pairs, pairs.clone())


NETWORKS: Mapping[str, Callable[[int], Parts]] = {
    "imagenet_resnet50": _resnet50,
    "bert_base": _bert_base,
    "cyclegan": _cyclegan,
}
"""The networks by name, for a batch size."""
