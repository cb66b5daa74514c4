"""Rows that are transposed before a product, whose result is transposed back."""

from collections.abc import Callable

import pytest
import torch
from rewriting import assert_same, checked, counts, optimize
from torch import Tensor, nn

from nimblec.graph.simplify import simplify
from nimblec.optimize.passes.row_order import undo_row_orders
from nimblec.pytorch.aten_graph import trace

X = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
"""Heads of 5 rows."""
MATRIX = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
BIAS = MATRIX[0].clone()


def _rows(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3).reshape(15, 8)


def _restored(product: Tensor) -> Tensor:
    return product.reshape(5, 3, 6).transpose(0, 1)


@pytest.mark.parametrize(
    ("model", "transposes"),
    [
        (lambda x: _restored(_rows(x) @ MATRIX).contiguous(), 1),
        (lambda x: _restored(torch.addmm(BIAS, _rows(x), MATRIX)).contiguous(), 1),
        (lambda x: _restored(torch.addmm(torch.ones(15, 6), _rows(x), MATRIX)).contiguous(), 2),
        (lambda x: _restored(_rows(x) @ MATRIX)[:, :, None].transpose(1, 3).contiguous(), 2),
        (lambda x: (_rows(x) @ MATRIX).reshape(3, 5, 6).transpose(0, 1).contiguous(), 2),  # 3 rows of other batches
        (lambda x: (_rows(x) @ MATRIX).reshape(5, 3, 6).transpose(1, 2).contiguous(), 2),
    ],
)
def test_transposes_are_undone(model: Callable[[Tensor], Tensor], transposes: int) -> None:
    after = checked(model, X, undo_row_orders, simplify)
    assert counts(after)["permute"] + counts(after)["transpose"] == transposes


def test_rows_that_lie_as_they_are_multiplied_stay() -> None:
    """As of attention with the batch second, whose result is read with the batch first."""

    def model(x: Tensor) -> Tensor:
        attended = x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        return _restored(_rows(attended) @ MATRIX).contiguous()

    assert counts(checked(model, X, undo_row_orders))["transpose"] == 1


@pytest.mark.parametrize("is_first", [False, True], ids=["batch second", "batch first"])
def test_encoder_layers_copy_nothing(is_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=is_first, norm_first=True)
    module, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(3, 5, 16)
    before = trace(module, (x,)).module
    after = optimize(before, device="cuda")
    called = counts(after)
    assert [called[name] for name in ("clone", "bmm", "addmm", "_addmm_activation")] == [0, 0, 6, 2]
    assert_same(before, after, x)


@pytest.mark.parametrize(
    ("shape", "order", "divided", "reshapes"),
    [
        ((3, 10, 4), (1, 0, 2), (10, 3, 2, 2), 1),
        ((6, 5, 4), (2, 0, 1), (4, 3, 2, 5), 1),  # as it was
        ((6, 5, 4), (2, 0, 1), (2, 2, 6, 5, 1), 2),
        ((6, 5, 4), (2, 0, 1), (8, 3, 5), 2),
        ((6, 20), (1, 0), (5, 4, 3, 2), 1),
    ],
)
def test_axes_are_divided_before_a_transpose(
    shape: tuple[int, ...], order: tuple[int, ...], divided: tuple[int, ...], reshapes: int
) -> None:
    after = checked(lambda x: x.reshape(shape).permute(order).reshape(divided), X, simplify)
    assert counts(after)["reshape"] == reshapes
    assert counts(after)["permute"] == 1
