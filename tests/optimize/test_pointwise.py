"""Convolutions of single pixels as matrix products, and constants without axes as numbers."""

from collections.abc import Callable

import pytest
import torch
from rewriting import checked, counts, record, rewritten
from torch import Tensor

from nimblec.optimize.passes.activations import fuse_activations
from nimblec.optimize.passes.numbers import inline_numbers
from nimblec.optimize.passes.pointwise import linear_convolutions

X = torch.randn(2, 6, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WEIGHT = torch.randn(8, 6, 1, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BIAS = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _squeezed(x: Tensor) -> Tensor:
    y = torch.relu(torch.conv2d(x.mean((2, 3), keepdim=True), WEIGHT, BIAS))
    return torch.conv2d(x, WEIGHT) * torch.sigmoid(torch.conv2d(y, WEIGHT.reshape(6, 8, 1, 1).repeat(2, 1, 1, 1)[:8]))


def test_images_of_one_pixel_become_linears() -> None:
    after = checked(_squeezed, X, linear_convolutions, fuse_activations, rtol=1e-12)
    names = counts(after)
    assert (names["convolution"], names["mm"], names["_addmm_activation"], names["relu"]) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    "convolve",
    [
        lambda x: torch.conv2d(x, WEIGHT, BIAS, stride=2),
        lambda x: torch.conv2d(x, WEIGHT, BIAS, padding=1),
        lambda x: torch.conv2d(x, WEIGHT[:, :3], BIAS, groups=2),
        lambda x: torch.conv_transpose2d(x, WEIGHT.reshape(6, 8, 1, 1), BIAS),
        lambda x: torch.conv2d(x, WEIGHT.expand(8, 6, 1, 3).contiguous(), BIAS),
        lambda x: torch.conv2d(x[:, :, :1, :1], WEIGHT.expand(8, 6, 3, 3).contiguous(), BIAS, padding=1),
    ],
)
def test_what_reads_other_pixels_stays(convolve: Callable[[Tensor], Tensor]) -> None:
    before = record(convolve, X)
    assert counts(rewritten(before, linear_convolutions)) == counts(before)


def test_constants_without_axes_are_numbers() -> None:
    two = torch.tensor(2.0)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        return (
            two * (x + torch.tensor(0.1, dtype=torch.float64)) - two,
            two - x,
            torch.add(two, x, alpha=3),
            x.int() * two,
            x * torch.tensor([2.0]),
            x + torch.tensor(True),
            x * torch.tensor(3, dtype=torch.int32),
            torch.tensor(5, dtype=torch.uint8) + x,
        )

    x = X.float()
    after = checked(model, x, inline_numbers)
    assert sum(n.op == "get_attr" for n in after.graph.nodes) == 3
    numbers = [n.args[1] for n in after.graph.nodes if len(n.args) > 1 and isinstance(n.args[1], float)]
    assert numbers == [0.1, 2.0, 2.0, 3.0, 5.0]
