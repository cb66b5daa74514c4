"""Gradients of distances, bags of embeddings and other layers, in terms of ATen operators that exporters know."""

from collections.abc import Callable, Sequence
from functools import reduce
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_MEAN, _MAX = 1, 2
"""Modes of ATen's embedding_bag; the sum is 0."""


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the gradient of what `masked_scatter` reads: its n-th value went to the n-th chosen place."""
    count = prod(sizes)
    chosen = mask.expand(grad.shape).flatten()
    numbers = torch.where(chosen, chosen.long().cumsum(0) - 1, count)
    return grad.new_zeros(count + 1).scatter(0, numbers, grad.flatten())[:count].reshape(sizes)


def distances_backward(grad: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    """Return the gradient of distances between all rows of ``x`` and of ``y``, for ``x``; 0 for rows that are equal.

    The formulas are those of ATen/native/cpu/DistanceOpsKernel.cpp.
    """
    apart = x.unsqueeze(-2) - y.unsqueeze(-3)
    far, weight = distances.unsqueeze(-1), grad.unsqueeze(-1)
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        found = apart.sign() * weight
    elif p == inf:
        found = apart.sign() * (apart.abs() == far) * weight
    else:
        is_zero = (far == 0) | (apart == 0)
        shares = apart.abs().masked_fill(is_zero, 1) / far.masked_fill(is_zero, 1)
        found = torch.where(is_zero, 0, apart.sign() * shares ** (p - 1) * weight)
    return found.sum(-2).sum_to_size(x.shape)


def shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    """Return the gradient of hardshrink and softshrink, which are 0 within ``lambd`` of 0."""
    return torch.where(x.abs() <= lambd, 0, grad)


def weight_norm_backward(
    grad: Tensor, direction: Tensor, length: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``direction * (length / norms)``, a weight with a norm along all axes but ``dim``."""
    others = [axis for axis in range(grad.dim()) if axis != dim]
    along = (grad * direction).sum(others, keepdim=True) / norms
    return (grad - direction * (along / norms)) * (length / norms), along


def sum_of_products(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Decompose aten._trilinear, and a bilinear layer: expand three tensors, multiply them, and sum along axes."""
    del unroll_dim
    given = ((x, expand1), (y, expand2), (z, expand3))
    x, y, z = (reduce(Tensor.unsqueeze, sorted(axes), tensor) for tensor, axes in given)
    product = x * y * z
    return product.sum(list(sumdim)) if sumdim else product


def bags_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    weights: Tensor | None = None,
    padding_idx: int = -1,
) -> Tensor:
    """Return the gradient of sums or means of bags of embeddings, for the table; maxima are left to ATen."""
    del offset2bag, bag_size, maximum_indices, sparse
    if mode == _MAX or scale_grad_by_freq:
        left: Tensor = NotImplemented
        return left
    bags, counted = _bags(indices, offsets, len(grad), padding_idx)
    rows = grad[bags] * counted[:, None]
    if mode == _MEAN:
        counts = grad.new_zeros(len(grad)).index_add(0, bags, counted.to(grad.dtype))
        rows = rows / counts[bags].clamp(min=1)[:, None]
    if weights is not None:
        rows = rows * weights[:, None]
    return grad.new_zeros((num_weights, grad.shape[1])).index_add(0, indices, rows)


def bag_weights_backward(
    grad: Tensor,
    table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Tensor:
    """Return the gradient of sums of bags of embeddings, for the weight of each."""
    del offset2bag, mode
    bags, counted = _bags(indices, offsets, len(grad), padding_idx)
    return (grad[bags] * table[indices]).sum(1) * counted


def _bags(indices: Tensor, offsets: Tensor, count: int, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Return the number of each index's bag (how many begin there or before, less one) and whether it is in a bag."""
    places = torch.arange(len(indices), device=indices.device)
    bags = (places[:, None] >= offsets).sum(1) - 1
    return bags.clamp(max=count - 1), (indices != padding_idx) & (bags < count)


GRADIENTS: dict[Any, Callable[..., Any]] = {
    aten._cdist_backward.default: distances_backward,
    aten._embedding_bag_backward.default: bags_backward,
    aten._embedding_bag_per_sample_weights_backward.default: bag_weights_backward,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
    aten._trilinear.default: sum_of_products,
    aten.hardshrink_backward.default: shrink_backward,
    aten.masked_scatter_backward.default: masked_scatter_backward,
    aten.softshrink_backward.default: shrink_backward,
}
"""Decompositions for a graph that is exported."""
