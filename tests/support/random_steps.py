"""Training steps that draw random numbers: entries for compilations on the GPU, and eager PyTorch's loop.

NAME is MODEL_OPTIMIZER, such as dropouts_sgd.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from training_steps import OPTIMIZERS, deterministic

import nimblec
from nimblec.pytorch.model import set_arithmetic

Entries = Mapping[str, tuple[Any, ...]]
SEED = 0x1234_5678_9ABC
NAMES = ("dropouts_sgd", "dropouts_adam", "depth_sgd", "depth_adam")
_SLOTS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq", "step")}
loss = nn.functional.cross_entropy


class Dropouts(nn.Module):
    """Dropouts of several sizes and kinds: of channels, of many and of few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.wide, self.last = nn.Linear(16 * 64, 1500), nn.Linear(1500, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Score images of 16 by 16."""
        drop = partial(nn.functional.dropout, training=self.training)
        x = nn.functional.dropout2d(self.norm(self.conv(x)).relu(), 0.125, self.training)
        x = drop(nn.functional.avg_pool2d(x, 2).flatten(1), 0.5)
        return drop(self.last(drop(self.wide(x).relu(), 0.25)), 0.0625)


class Depth(nn.Module):
    """Stochastic depth as in torchvision, by row and by batch, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(768, 96), nn.Linear(96, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Score images of 16 by 16."""
        x = self.first(x.flatten(1))
        for block, rows in zip(self.blocks, (len(x), len(x), 1), strict=True):
            kept = torch.ones(rows, 1, dtype=x.dtype, device=x.device)
            if self.training:
                kept = kept.bernoulli_(0.75).div_(0.75)
            x = x + block(x) * kept
        scores: Tensor = self.last(nn.functional.dropout(x, 0.5, self.training))
        return scores


_MODELS: dict[str, Callable[[], nn.Module]] = {"dropouts": Dropouts, "depth": Depth}


def made(name: str) -> nn.Module:
    """Build the model of a step; `SEED` determines its weights and the random numbers of its steps."""
    torch.manual_seed(SEED)
    return _MODELS[name.partition("_")[0]]()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Draw images and labels."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(24, 3, 16, 16, generator=drawn), torch.randint(0, 10, (24,), generator=drawn)


def _compiled(name: str) -> Entries:
    deterministic()
    set_arithmetic("fp32")
    model = made(name)
    return nimblec.training_step(model, loss, OPTIMIZERS[name.partition("_")[2]](model), batch(0))


def __getattr__(name: str) -> Callable[[], Entries]:
    """Return NAME as a callable without arguments."""
    if name not in NAMES:
        raise AttributeError(name)
    return partial(_compiled, name)


class Eager:
    """PyTorch's own loop on the GPU, which draws from the GPU's default generator."""

    def __init__(self, name: str) -> None:
        self._slots = _SLOTS[name.partition("_")[2]]
        self.model = made(name).cuda().train()
        self.optimizer = OPTIMIZERS[name.partition("_")[2]](self.model)

    def __call__(self, seed: int) -> np.ndarray:
        """Return the loss of a batch, before the step."""
        x, y = (tensor.cuda() for tensor in batch(seed))
        self.optimizer.zero_grad()
        value = loss(self.model(x), y)
        value.backward()
        self.optimizer.step()
        return value.detach().cpu().numpy()

    def state(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield all of a plan's state except the rate, by its names."""
        for name, tensor in self.model.state_dict().items():
            yield f"model.{name}", tensor.cpu().numpy()
        for name, parameter in self.model.named_parameters():
            for slot in self._slots:
                yield f"optimizer.{name}.{slot}", self.optimizer.state[parameter][slot].cpu().numpy()
        seed, offset = torch.cuda.get_rng_state().numpy().view(np.int64)
        yield from (("generator.seed", seed), ("generator.offset", offset))
