"""Two runs of a model that should be equal."""

import pytest
import torch
from torch import Tensor

from nimblec.base.errors import UnsupportedModelError
from nimblec.pytorch.repeatable import refuse_differing

ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ONES, ONES * (1 + 5e-4)),
        (ONES.half(), ONES.half() * (1 + 4 * torch.finfo(torch.float16).eps)),
        (ONES.bfloat16(), ONES.bfloat16() * (1 + 4 * torch.finfo(torch.bfloat16).eps)),
        (torch.full((2,), torch.nan), torch.full((2,), torch.nan)),
        (torch.arange(3), torch.arange(3)),
        ((ONES + 1j).conj(), (ONES + 1j).conj()),
    ],
    ids=["float32", "float16", "bfloat16", "nan", "int64", "complex"],
)
def test_rounding_is_no_difference(first: Tensor, second: Tensor) -> None:
    refuse_differing("Model", [("y", first)], [("y", second)])


@pytest.mark.parametrize(
    "second",
    [[("y", ONES * 1.01)], [("y", ONES[:3])], [("z", ONES)], [("y", torch.full((4,), torch.nan))]],
    ids=["another value", "another shape", "another name", "nan"],
)
def test_what_differs_is_refused_by_name(second: list[tuple[str, Tensor]]) -> None:
    sentence = "^Model: two runs on equal inputs differ in output 'y': the model draws .* or has a state, and a plan "
    with pytest.raises(UnsupportedModelError, match=sentence):
        refuse_differing("Model", [("y", ONES)], second)


def test_integers_are_equal_but_for_a_tie_in_a_hundred() -> None:
    first = torch.full((1000,), 1 << 40)
    second = first.clone()
    second[:10] += 1
    refuse_differing("Model", [("y", first)], [("y", second)])
    second[10] += 1
    with pytest.raises(UnsupportedModelError):
        refuse_differing("Model", [("y", first)], [("y", second)])
