"""Training steps under torch.autocast: entries for compilations on the GPU, by name, and eager PyTorch's loop.

NAME is OPTIMIZER_DTYPE, such as sgd_bf16; "clipped_fp16" accumulates the gradients of two calls for a step of SGD.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from training_steps import deterministic

import nimblec
from nimblec.pytorch.model import set_arithmetic
from nimblec.training.scaler import SCALE, TRACKER

Entries = Mapping[str, tuple[Any, ...]]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HUGE = 2.0**60
"""A scale at which gradients overflow in float16, whatever the rounding."""
INTERVAL = 2000
"""Steps after which GradScaler increases the scale."""
loss = nn.functional.cross_entropy


def network() -> nn.Module:
    """Chain layers that autocast computes in half precision, in float32, and in either."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.LayerNorm(256), nn.Linear(256, 10)),
    )


def without_norms() -> nn.Module:
    """Chain layers without norms: on mixed dtypes, torch's fake tensors have another dtype than CPU results."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.GELU()),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 10)),
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Draw images and labels."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 16, 16, generator=drawn), torch.randint(0, 10, (8,), generator=drawn)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with a plan's kernels, which skip a step by themselves."""
    return torch.optim.SGD(model.parameters(), 1 / 16, momentum=0.9, fused=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam whose kernels take every step; those of a GPU are a plan's."""
    return torch.optim.Adam(model.parameters(), 1 / 128, eps=1e-3, capturable=next(model.parameters()).is_cuda)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam whose kernels skip a step by themselves."""
    return torch.optim.Adam(model.parameters(), 1 / 128, eps=1e-3, fused=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": adam,
    "fused": fused,
    "clipped": sgd,
}


def options(name: str) -> dict[str, Any]:
    """Return further options of an optimizer's step."""
    return {"clip_norm": 0.5, "accumulate": 2} if name == "clipped" else {}


def step(name: str, make: Callable[[], nn.Module] = network) -> Entries:
    """Return the entries of NAME."""
    optimizer, _, kind = name.partition("_")
    model = make()
    return nimblec.training_step(
        model, loss, OPTIMIZERS[optimizer](model), batch(0), autocast=kind, **options(optimizer)
    )


def _compiled(name: str) -> Entries:
    deterministic()
    set_arithmetic("fp32")
    return step(name)


def __getattr__(name: str) -> Callable[[], Entries]:
    """Return NAME as a callable without arguments."""
    if name.rpartition("_")[2] not in TYPES:
        raise AttributeError(name)
    return partial(_compiled, name)


class Eager:
    """PyTorch's own loop, as in its documentation."""

    def __init__(self, name: str, device: str, make: Callable[[], nn.Module] = network) -> None:
        optimizer, _, kind = name.partition("_")
        self.model = make().to(device).train()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scaler = torch.amp.GradScaler(device, enabled=kind == "fp16")
        self._device, self._type = device, TYPES[kind]
        self._calls = 0
        self._clip, self._accumulate = (options(optimizer).get(key) for key in ("clip_norm", "accumulate"))

    def __call__(self, seed: int) -> np.ndarray:
        """Return the loss of a batch, before the step."""
        x, y = (tensor.to(self._device) for tensor in batch(seed))
        with torch.autocast(self._device, self._type):
            value = loss(self.model(x), y)
        self.scaler.scale(value / self._accumulate if self._accumulate else value).backward()
        self._calls += 1
        if self._calls == (self._accumulate or 1):
            if self._clip is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self._calls = 0
        return value.detach().float().cpu().numpy()

    def evaluate(self, seed: int) -> Tensor:
        """Return the model's prediction."""
        self.model.eval()
        with torch.no_grad(), torch.autocast(self._device, self._type):
            found: Tensor = self.model(batch(seed)[0].to(self._device))
        self.model.train()
        return found.cpu()

    def set_scaler(self, scale: float, tracker: int) -> None:
        """Set scale and growth tracker."""
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": tracker})

    def state(self) -> dict[str, np.ndarray]:
        """Return parameters, statistics, and the scaler, by the plan's names."""
        found = {f"model.{key}": tensor.cpu().numpy() for key, tensor in self.model.state_dict().items()}
        if self.scaler.is_enabled():
            kept = self.scaler.state_dict()
            found |= {SCALE: np.array(kept["scale"], np.float32), TRACKER: np.array(kept["_growth_tracker"], np.int32)}
        return found


def run_events(
    eager: Eager, run: Callable[[int], np.ndarray], assign: Callable[[str, np.ndarray], object]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (seed, eager's loss, that of ``run``) in usual steps, overflows, and growth of the scale.

    ``assign`` sets a tensor in the state of ``run``.
    """
    for seed in range(10):
        if eager.scaler.is_enabled() and seed in (2, 6):
            scale, tracker = (HUGE, 7) if seed == 2 else (1024.0, INTERVAL - 1)
            eager.set_scaler(scale, tracker)
            assign(SCALE, np.array(scale, np.float32))
            assign(TRACKER, np.array(tracker, np.int32))
        yield seed, eager(seed), run(seed)
