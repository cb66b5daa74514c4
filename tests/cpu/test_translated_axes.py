"""Operators along axes, and writes under a mask, that torch.onnx does not export as they are, against PyTorch."""

from collections.abc import Callable
from functools import partial
from math import inf, nan

import pytest
import torch
from torch import Tensor
from translations import agree, each

X = torch.tensor([[[3.0, 1.0, 2.0], [0.0, 2.0, 2.0]], [[5.0, -1.0, 2.0], [1.0, 1.0, 4.0]]])
WITH_NAN = X.where(X != 1, nan)


def test_a_stable_sort() -> None:
    """In both directions equal values keep their order."""
    x = torch.tensor([[1.0, 2.0, 1.0, 0.0, 2.0], [0.0, 0.0, 1.0, 1.0, 0.0]])
    sorts = [partial(torch.sort, stable=True, dim=dim, descending=down) for dim in (0, 1) for down in (False, True)]
    agree(lambda x: tuple(part for sort in sorts for part in sort(x)), (x,), (x.flip(1),))


@pytest.mark.parametrize("dim", [0, -1])
def test_values_in_the_middle(dim: int) -> None:
    """The places of equal values are anyone's, and each value of a row of X comes once."""
    x = torch.tensor([[3.0, 1.0, 2.0, 7.0], [0.5, 9.0, -2.0, 4.0], [8.0, 6.0, 1.5, -1.0]])

    def found(x: Tensor) -> tuple[Tensor, ...]:
        return *x.median(dim), *x.median(dim, keepdim=True), *x.kthvalue(2, dim), x.median()

    agree(found, (x,), (x.where(x != 1, nan),))
    agree(found, (x.long(),))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_running_extremes_and_products(dim: int) -> None:
    """The last of equal values leads, and NaN stays; the product of integers has 64 bits."""

    def running(x: Tensor) -> tuple[Tensor, ...]:
        return *x.cummax(dim), *x.cummin(dim), x.cumprod(dim)

    agree(running, (X,), (WITH_NAN,), (-X,))
    agree(running, (X.int() * 100_000,))


def test_places_among_sorted_values() -> None:
    edges, x = torch.tensor([-1.0, 1.0, 1.0, 4.0]), X[0]
    sides: list[Callable[[Tensor, Tensor], Tensor]] = [
        torch.searchsorted,
        lambda edges, x: torch.searchsorted(edges, x, side="right", out_int32=True),
        lambda edges, x: torch.searchsorted(edges.flip(0), x, sorter=edges.flip(0).argsort()),
        lambda edges, _: torch.searchsorted(edges, 1.0, right=True),
        lambda edges, x: torch.bucketize(x, edges),
    ]
    agree(each(sides), (edges, x), (edges, x - 1))
    agree(torch.searchsorted, (torch.stack([edges, edges * 2]), x))


def test_distances_of_all_pairs() -> None:
    x, y = torch.rand(2, 30, 4), torch.rand(2, 1, 5, 4)
    norms = [partial(torch.cdist, p=p) for p in (0.0, 1.0, 2.0, 3.5, inf)]
    norms += [partial(torch.cdist, compute_mode="use_mm_for_euclid_dist")]
    norms += [partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")]
    agree(each(norms), (x, y[0]), (-x, y[1]))
    agree(torch.cdist, (x[:, :5], y[0, 0]))


@pytest.mark.parametrize("rank", range(4))
def test_tensors_that_are_stacked(rank: int) -> None:
    stacks = [torch.hstack, torch.vstack, torch.dstack, torch.column_stack]
    x = torch.rand((2, 3, 4)[:rank])
    agree(each([lambda x, y, stack=stack: stack([x, y]) for stack in stacks]), (x, x + 1))


def test_extremes_of_all_and_of_one() -> None:
    agree(lambda x: (x.amax(), x.amin(), *torch.aminmax(x), x.sum().amax(), x.amin((0, 2))), (X,))


def test_pairs_of_numbers() -> None:
    """Zeros with signs, squares beyond the largest number, and what is no number."""
    x = torch.tensor([0.0, -0.0, 3e38, inf, 1.0, nan, 2.0, nan])
    y = torch.tensor([0.0, 1.0, 3e37, 1.0, -inf, 1.0, nan, nan])
    pairs = [torch.hypot, torch.fmax, torch.fmin, torch.copysign, lambda x, _: torch.signbit(x)]
    agree(each(pairs), (torch.ones(8), torch.ones(8)), (x, y), (y, x))


def _written(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def after(x: Tensor) -> Tensor:
        copy = x.clone()
        write(copy)
        return copy

    return after


def test_writes_under_a_mask() -> None:
    """One value for all that a mask chooses, or one for each row of it: how many these are is not known."""
    writes: list[Callable[[Tensor], object]] = [
        lambda x: x.__setitem__(x > 1, 0),
        lambda x: x.__setitem__(x > 1, torch.tensor([7.0])),
        lambda x: x.__setitem__(x[:, 0, 0] > 4, torch.arange(3.0)),
        lambda x: x.__setitem__((slice(None), x[0, :, 0] > 0), torch.arange(2.0).reshape(2, 1, 1)),
        lambda x: x.__setitem__(x[:, :, 0] > 0, torch.arange(3.0)),
        lambda x: x[1:].__setitem__(x[1:] > 1, -1),
        lambda x: x.index_put_((x > 1,), torch.tensor(1.0), accumulate=True),
    ]
    agree(each([*map(_written, writes)]), (X,), (-X,))


def test_writes_at_narrow_indices() -> None:
    agree(_written(lambda x: x.__setitem__(torch.tensor([0], dtype=torch.int32), 9)), (X,))


def test_an_axis_of_another_size_than_one_is_not_squeezed() -> None:
    squeezed = [lambda x: x.squeeze(0), lambda x: x.squeeze(1), lambda x: x.squeeze(-1), lambda x: x.sum().squeeze(0)]
    agree(each(squeezed), (torch.randn(3, 1, 4),))
