"""Functions of torch that a step computes by others, whose gradients can be captured or exported."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp.decompositions import grid_sampler_2d
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_MODES = {"bilinear": 0, "nearest": 1, "bicubic": 2}
_PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}
"""The numbers that ATen's grid_sampler has for what grid_sample names."""
_IMAGE_AXES = 4


class OtherFunctions(TorchFunctionMode):
    """Replaces functions while a step is traced, some of them only for a graph that is ``exported``."""

    def __init__(self, *, exported: bool) -> None:
        super().__init__()
        self._table = _ALWAYS | (_EXPORTED if exported else {})

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._table.get(func, func)(*args, **(kwargs or {}))


def _mean(pool: Any, axes: int, input: Tensor, output_size: Any) -> Tensor:  # noqa: A002 - PyTorch's name
    """Average windows; to one pixel, take the mean of the whole.

    PyTorch's pooling to one pixel marks its result as channels-last by strides, and the gradient then writes by
    strides.
    """
    if output_size in (1, (1,) * axes, [1] * axes):
        return input.mean(tuple(range(-axes, 0)), keepdim=True)
    found: Tensor = pool(input, output_size)
    return found


def _grid_sample(
    input: Tensor,  # noqa: A002 - PyTorch's name
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """Sample images by gathering pixels, whose gradient scatters them; leave volumes to the framework."""
    if input.dim() != _IMAGE_AXES or mode not in _MODES or padding_mode not in _PADDINGS:
        return nn.functional.grid_sample(input, grid, mode, padding_mode, align_corners)
    found: Tensor = grid_sampler_2d(input, grid, _MODES[mode], _PADDINGS[padding_mode], bool(align_corners))
    return found


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **how: Any
) -> Tensor:
    """Let attention that drops weights draw them by an operator of its own, not inside a kernel."""
    with sdpa_kernel(SDPBackend.MATH) if dropout_p else nullcontext():
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, *more, **how)


_ALWAYS: dict[Any, Callable[..., Any]] = {nn.functional.scaled_dot_product_attention: _attention} | {
    pool: partial(_mean, pool, axes)
    for axes, pool in enumerate(
        (nn.functional.adaptive_avg_pool1d, nn.functional.adaptive_avg_pool2d, nn.functional.adaptive_avg_pool3d), 1
    )
}
_EXPORTED: dict[Any, Callable[..., Any]] = {
    nn.functional.grid_sample: _grid_sample,
    torch.grid_sampler: grid_sampler_2d,
}
