"""Random numbers of a training step, by Philox: its seed and offset are tensors.

The numbers are not torch's: the counter of four of them is the offset and their position in the tensor, which depends
on no device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from nimblec.base.errors import UnsupportedModelError
from nimblec.pytorch.aten_graph import is_deterministic
from nimblec.pytorch.philox import uniform

aten = torch.ops.aten


class Draws(TorchDispatchMode):
    """Makes ATen calls draw the random numbers of one step from a seed and an offset.

    ``used`` is how far they advance the offset.
    """

    def __init__(self, seed: Tensor, offset: Tensor) -> None:
        TorchDispatchMode.__init__(self)
        self.used = 0
        self._seed = seed
        self._offset = offset
        self._instead: dict[OpOverload, Callable[..., Any]] = {
            aten.native_dropout.default: self._dropout,
            aten.bernoulli.default: partial(_returned, self._bernoulli),
            aten.bernoulli.p: partial(_returned, self._bernoulli),
            aten.bernoulli_.float: partial(_written, self._coin),
            aten.bernoulli_.Tensor: partial(_written, self._bernoulli),
            aten.rand_like.default: partial(_like, self._uniform),
            aten.randn_like.default: partial(_like, self._normal),
            aten.rand.default: partial(_sized, self._uniform),
            aten.randn.default: partial(_sized, self._normal),
            aten.uniform_.default: partial(_written, self._uniform),
            aten.normal_.default: partial(_written, self._normal),
        }

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))

    def _drawn(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Draw numbers in [0, 1), float32."""
        count = math.prod(shape)
        quarter = -(-count // 4)
        counters = torch.arange(quarter, device=device) + (self._offset + self.used)
        self.used += quarter
        return uniform(self._seed, counters, count).reshape(shape)

    def _uniform(self, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        return (self._drawn(like.shape, like.device) * (high - low) + low).to(like.dtype)

    def _normal(self, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Draw normal numbers by Box and Muller's method."""
        radius, angle = self._drawn((2, *like.shape), like.device).unbind()
        drawn = (-2 * (1 - radius).log()).sqrt() * (2 * math.pi * angle).cos()
        return (drawn * std + mean).to(like.dtype)

    def _bernoulli(self, like: Tensor, p: float | Tensor | None = None) -> Tensor:
        """Draw ones with the probability ``p``, or that of each element of ``like``; else zeros."""
        return (self._drawn(like.shape, like.device) < (like if p is None else p)).to(like.dtype)

    def _coin(self, like: Tensor, p: float = 0.5) -> Tensor:
        return self._bernoulli(like, p)

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or not p:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        kept = self._drawn(x.shape, x.device) >= p
        return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


_Draw: TypeAlias = Callable[..., Tensor]


def _returned(draw: _Draw, tensor: Tensor, *given: Any, generator: Any = None) -> Tensor:
    _refuse_generator(generator)
    return draw(tensor, *given)


def _written(draw: _Draw, tensor: Tensor, *given: Any, generator: Any = None) -> Tensor:
    _refuse_generator(generator)
    return tensor.copy_(draw(tensor, *given))


def _like(draw: _Draw, tensor: Tensor, *, dtype: torch.dtype | None = None, **_layout: Any) -> Tensor:
    return draw(tensor.to(dtype or tensor.dtype))


def _sized(
    draw: _Draw,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_layout: Any,
) -> Tensor:
    return draw(torch.zeros(size, dtype=dtype, device=device))


def _refuse_generator(generator: Any) -> None:
    if generator is not None:
        raise UnsupportedModelError(
            "the model draws from a generator of its own, which a plan cannot hold: draw from torch's default one, "
            "which a plan replaces by a seed and an offset in its state"
        )


def refuse_other_draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a call that draws random numbers in a way that `Draws` does not know."""
    draws = isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags
    if draws and not is_deterministic(func, args, kwargs):
        raise UnsupportedModelError(
            f"training_step: {func} draws random numbers inside its kernel: use dropout, torch.rand or "
            "torch.bernoulli instead"
        )
