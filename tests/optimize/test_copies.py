"""Copies that only change the order in memory are left out where nothing needs that order."""

from collections.abc import Callable

import pytest
import torch
from rewriting import assert_same, checked, counts, optimize, record, rewritten
from torch import Tensor, nn
from torch.nn import functional

from nimblec.graph.rewriter import Rewriter, is_call
from nimblec.graph.simplify import simplify
from nimblec.graph.views import is_view
from nimblec.graph.vocabulary import WHOLE_VIEWS
from nimblec.optimize.passes.copies import drop_copies
from nimblec.pytorch.aten_graph import trace

X = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))


class Attending(nn.Module):
    """A module that keeps its batch second inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, 32) to the same."""
        return x + self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("batch", [1, 3])
def test_joined_queries_keys_and_values_are_read_where_they_lie(batch: int) -> None:
    torch.manual_seed(0)
    module, x = Attending().eval(), torch.randn(batch, 5, 32)
    before = trace(module, (x,)).module
    assert counts(before)["clone"]
    after = optimize(before, device="cuda")
    assert (counts(after)["clone"], counts(after)["bmm"]) == (0, 0)
    Rewriter(after).propagate()
    assert all(is_view(node) for node in after.graph.nodes if is_call(node, *WHOLE_VIEWS))
    assert_same(before, after, x)


def test_a_copy_that_spares_others_stays() -> None:
    def model(x: Tensor) -> Tensor:
        return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).reshape(18, 4) * 2

    assert counts(checked(model, X, drop_copies))["clone"] == 1


def test_a_copy_that_is_returned_stays() -> None:
    def model(x: Tensor) -> Tensor:
        return x.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    assert counts(rewritten(record(model, X), drop_copies))["clone"] == 1


def test_rows_with_gaps_are_copied_for_attention() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.transpose(1, 2).clone(memory_format=torch.contiguous_format).unsqueeze(0)
        return functional.scaled_dot_product_attention(y, y, y)

    assert counts(checked(model, X, drop_copies))["clone"] == 1


def test_a_copy_added_to_what_it_copied() -> None:
    def model(x: Tensor) -> Tensor:
        return x + x.clone()

    before = record(model, X)
    assert_same(before, rewritten(before, drop_copies), X)


def test_axes_of_length_one_change_places_without_a_transpose() -> None:
    x = torch.randn(1, 5, 1, 7, generator=torch.Generator().manual_seed(0))
    after = checked(lambda x: torch.relu(x.permute(2, 1, 0, 3)).transpose(0, 2).reshape(5, 7) * 2, x, simplify)
    assert not counts(after).keys() & {"permute", "transpose"}


def test_a_copy_that_a_call_reads_in_its_order_stays() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cumsum(x.transpose(0, 1).clone(memory_format=torch.contiguous_format), 0)

    assert counts(checked(model, X, drop_copies))["clone"] == 1


def _in_pairs(x: Tensor) -> Tensor:
    y = torch.relu(x.transpose(0, 2).clone(memory_format=torch.contiguous_format))
    return torch.view_as_real(torch.view_as_complex(y.reshape(4, 3, 3, 2)) * 1j)


def _by_stride(x: Tensor) -> Tensor:
    return torch.relu(x.transpose(0, 1).clone(memory_format=torch.contiguous_format)).as_strided((2, 2), (1, 2))


@pytest.mark.parametrize("model", [_in_pairs, _by_stride])
def test_a_copy_stays_where_a_call_sees_its_strides(model: Callable[[Tensor], Tensor]) -> None:
    assert counts(checked(model, X, drop_copies))["clone"] == 1


def test_a_copy_before_a_product_goes_whatever_sees_the_product() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.transpose(0, 1).clone(memory_format=torch.contiguous_format) * 2
        return torch.bmm(y, y.transpose(1, 2)).as_strided((2, 2), (1, 2))

    assert "clone" not in counts(checked(model, X, drop_copies))


def test_outputs_keep_any_order_of_their_axes() -> None:
    class Permuted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x.permute(1, 2, 0).contiguous().permute(1, 2, 0))

    before = trace(Permuted(), (X,)).module
    assert_same(before, optimize(before, device="cpu"), X)
