"""The scale of a loss in half precision, as torch.amp.GradScaler finds it, decided by tensors alone.

S. Narang et al., Mixed precision training (ICLR 2018): gradients of a loss times the scale do not vanish in float16; a
step whose gradients overflow is left out, and the scale made smaller; after many that do not it is made larger.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SCALE, TRACKER = "scaler.scale", "scaler.growth_tracker"
"""The names of the scale, and of the number of steps in a row that were taken with it."""

_FIRST_SCALE = 65536.0
_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000
"""GradScaler's defaults: after the interval the scale is doubled, after an overflow halved."""


def initial_scaler() -> dict[str, Tensor]:
    """Return the state of a scaler that has not seen a step."""
    return {SCALE: torch.tensor(_FIRST_SCALE), TRACKER: torch.tensor(0, dtype=torch.int32)}


def unscale(gradients: Sequence[Tensor], scale: Tensor, *, itself: bool) -> Tensor:
    """Divide gradients by the scale in place; 1.0 if one of them was not finite, else 0.0.

    ``itself``: by the kernels of GradScaler itself; else by plain operators.
    """
    inverse = scale.double().reciprocal().float()
    if itself:
        found = torch.zeros_like(scale)
        for dtype in {gradient.dtype for gradient in gradients}:
            of_dtype = [gradient for gradient in gradients if gradient.dtype is dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(of_dtype, found, inverse)
        return found
    are_finite = [gradient.isfinite().all() for gradient in gradients]
    for gradient in gradients:
        gradient.mul_(inverse)
    return torch.stack(are_finite).all().logical_not().to(scale.dtype)


def update_scale(scale: Tensor, tracker: Tensor, found: Tensor, *, itself: bool) -> None:
    """Update both after a step; ``found`` is 1.0 if one of its gradients was not finite, else 0.0."""
    if itself:
        torch._amp_update_scale_(scale, tracker, found, _GROWTH, _BACKOFF, _INTERVAL)
        return
    overflows, steps, grown = found > 0, tracker + 1, scale * _GROWTH
    is_due = steps == _INTERVAL
    kept = torch.where(is_due & grown.isfinite(), grown, scale)
    scale.copy_(torch.where(overflows, scale * _BACKOFF, kept))
    tracker.copy_(torch.where(overflows | is_due, torch.zeros_like(steps), steps))
