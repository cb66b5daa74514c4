"""Training steps as entries for compilations on the GPU, by name; learning rates are exact in float32."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import nimblec
from nimblec.pytorch.model import set_arithmetic

Entries = Mapping[str, tuple[Any, ...]]
BATCH = 8
COUNT = 30


def deterministic() -> None:
    """Make steps deterministic in this process."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def images(dropout: float = 0.0) -> nn.Module:
    """Chain convolutions, one of them grouped, and norms."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16), nn.BatchNorm2d(16), nn.SiLU()),
        *(nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Dropout(dropout), nn.Linear(512, 10)),
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Draw images and labels."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 3, 16, 16, generator=drawn), torch.randint(0, 10, (BATCH,), generator=drawn)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 1 / 16, momentum=0.9, fused=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 1 / 128, capturable=next(model.parameters()).is_cuda),
}
"""With a plan's kernels: eager's default kernels round differently."""


def _step(name: str, dropout: float = 0.0, accumulate: int = 1) -> Entries:
    deterministic()
    set_arithmetic("fp32")
    model = images(dropout)
    loss = nn.functional.cross_entropy
    return nimblec.training_step(model, loss, OPTIMIZERS[name](model), batch(0), accumulate=accumulate)


def sgd() -> Entries:
    """Return a step by SGD."""
    return _step("sgd")


def adam() -> Entries:
    """Return a step by Adam."""
    return _step("adam")


def dropping() -> Entries:
    """Return a step with dropout, and the accumulated gradients of two calls."""
    return _step("sgd", dropout=0.5, accumulate=2)


class Tuned(nn.Module):
    """A frozen body in evaluation mode, before two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = images().requires_grad_(requires_grad=False).eval()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
        self.second.weight = self.first.weight

    def forward(self, image: Tensor) -> Tensor:
        """Score each image."""
        scores: Tensor = self.second(torch.tanh(self.first(self.body(image))))
        return scores


def fine_tuned() -> Entries:
    """Return a step by SGD of what is not frozen."""
    deterministic()
    set_arithmetic("fp32")
    model = Tuned()
    return nimblec.training_step(model, nn.functional.cross_entropy, OPTIMIZERS["sgd"](model), batch(0))


class Networks(nn.Module):
    """Thirty random small networks on one input, so that one plan has the gradients of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.networks = nn.ModuleList(map(self._network, range(COUNT)))

    @staticmethod
    def _network(seed: int) -> nn.Module:
        drawn = torch.Generator().manual_seed(seed)

        def choose(*choices: nn.Module) -> nn.Module:
            return choices[int(torch.randint(len(choices), (), generator=drawn))]

        width = 4 * int(torch.randint(1, 5, (), generator=drawn))
        return nn.Sequential(
            choose(nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(3, width, 5, stride=2), nn.Conv2d(3, width, 1)),
            choose(nn.BatchNorm2d(width), nn.GroupNorm(2, width), nn.InstanceNorm2d(width, affine=True), nn.Identity()),
            choose(nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Hardswish()),
            choose(nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.Identity()),
            choose(nn.Conv2d(width, width, 3, groups=width), nn.Conv2d(width, width, 3, dilation=2), nn.Identity()),
            choose(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Identity()),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            choose(nn.LayerNorm(4 * width), nn.Identity()),
            nn.Linear(4 * width, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Score each image by each network."""
        return torch.stack([network(image) for network in self.networks], -1)


class Deep(nn.Module):
    """Layers whose gradients need their outputs, and no scratch memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.linspace(0.5, 1.5, 256) + n / 8 for n in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to one of the same shape."""
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return x


def deep_batch() -> tuple[Tensor, Tensor]:
    """Draw inputs and targets."""
    return torch.linspace(-1, 1, 128 * 256).reshape(128, 256), torch.linspace(1, -1, 128 * 256).reshape(128, 256)


def deep() -> Entries:
    """Return a step of the deep model by SGD."""
    model = Deep()
    return nimblec.training_step(model, nn.functional.mse_loss, OPTIMIZERS["sgd"](model), deep_batch())


def all_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the networks' losses."""
    return nn.functional.cross_entropy(scores, labels[:, None].expand(-1, COUNT), reduction="none").mean(0).sum()


def networks() -> Entries:
    """Return a step with learning rate 1, which changes parameters by the gradient."""
    set_arithmetic("fp32")
    model = Networks()
    return nimblec.training_step(model, all_losses, torch.optim.SGD(model.parameters(), 1.0), batch(0))
