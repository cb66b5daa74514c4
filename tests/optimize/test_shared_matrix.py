"""Batched products by one matrix: one product of all rows without copies, values and strides kept."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import assert_same, check, checked, counts, optimize, record, rewritten
from torch import Tensor, fx, nn

from nimblec.graph.rewriter import Rewriter, fake
from nimblec.graph.views import is_view
from nimblec.kernels.products.gemm_match import requests
from nimblec.optimize.passes.shared_matrix import join_batches
from nimblec.pytorch.aten_graph import trace

HALF = (torch.float16, torch.bfloat16)
DENSE = torch.contiguous_format


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


WEIGHT, BIAS = _random(6, 4, seed=1), _random(6, seed=2)
MATRIX = WEIGHT.t().contiguous()


def _nbytes(module: fx.GraphModule) -> int:
    """Return the bytes of memory that constants keep."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.buffers()}
    return sum(storages.values())


def _only(module: fx.GraphModule, name: str) -> fx.Node:
    (node,) = (n for n in module.graph.nodes if name in str(n.target))
    return node


@examples(80)
@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 3),
    order=st.permutations(range(3)),
    dtype=st.sampled_from([torch.float32, torch.float64, *HALF]),
)
def test_rows_in_any_order(*, batch: int, rows: int, order: list[int], dtype: torch.dtype) -> None:
    inverse = [order.index(axis) for axis in range(3)]
    x = _random(batch, rows, 4, dtype=dtype).permute(order).contiguous()
    repeated = MATRIX.to(dtype).repeat(batch, 1, 1)
    after = checked(lambda x: torch.bmm(x.permute(inverse), repeated).clone(memory_format=DENSE), x, join_batches)
    rows_read = x.permute(inverse)
    matrices = (rows.reshape(-1, 4) for rows in (rows_read, rows_read.transpose(0, 1)))
    is_one_matrix = any(matrix.data_ptr() == x.data_ptr() for matrix in matrices)
    is_read_in_place = 1 in rows_read.stride()[1:]
    assert counts(after)["mm"] == (is_one_matrix or not is_read_in_place)
    assert counts(after)["bmm"] == 1 - counts(after)["mm"]
    if counts(after)["mm"]:
        Rewriter(after).propagate()
        (product,) = (n for n in after.graph.nodes if "aten.mm" in str(n.target))
        assert is_view(product.args[0]) == is_one_matrix
        assert fake(product).shape == (batch * rows, 6)
        assert _nbytes(after) == repeated.nbytes // batch


@pytest.mark.parametrize(
    "multiply",
    [
        lambda x: torch.bmm(x, torch.stack([MATRIX, MATRIX * 2])),
        lambda x: torch.bmm(x, torch.stack([MATRIX * 0, MATRIX * -0.0])),
        lambda x: torch.bmm(x, torch.stack([MATRIX, MATRIX.nextafter(MATRIX + 1)])),
        lambda x: torch.bmm(MATRIX.repeat(2, 1, 1), x.reshape(2, 6, 2)),  # on the left
        lambda x: torch.bmm(x, x.reshape(2, 4, 3)),
        lambda x: torch.bmm(x.transpose(1, 2), MATRIX[:3].repeat(2, 1, 1)),  # one matrix by a copy alone
        lambda x: torch.bmm(x[:, 1:], MATRIX.repeat(2, 1, 1)),
        lambda x: torch.bmm(x.long(), torch.ones(2, 4, 6, dtype=torch.int64)),
        lambda x: torch.bmm(x[:, :, :0], MATRIX[:0].repeat(2, 1, 1)),
        lambda x: torch.bmm(x[:, :0], MATRIX.repeat(2, 1, 1)).sum(1),
        lambda x: torch.baddbmm(x[:, :, :1], x, MATRIX.repeat(2, 1, 1)),
    ],
)
def test_what_is_not_one_product_stays(multiply: Callable[[Tensor], Tensor]) -> None:
    x = _random(2, 3, 4)
    before = record(multiply, x)
    after = rewritten(before, join_batches)
    assert counts(after) == counts(before)
    assert_same(before, after, x)


def test_numbers_that_are_not_finite_are_like_themselves() -> None:
    matrix = MATRIX.clone()
    matrix[0, 0] = torch.nan
    after = rewritten(record(lambda x: torch.bmm(x, matrix.repeat(2, 1, 1)), _random(2, 3, 4)), join_batches)
    assert counts(after)["mm"] == 1


def test_calls_that_read_one_constant_read_one_matrix() -> None:
    repeated, x = MATRIX.repeat(3, 1, 1), _random(3, 2, 4)
    after = checked(lambda x: torch.bmm(x, repeated) + torch.bmm(x.sin(), repeated), x, join_batches)
    assert counts(after)["mm"] == 2
    assert sum(n.op == "get_attr" for n in after.graph.nodes) == 1
    assert _nbytes(after) == MATRIX.nbytes


def test_a_batch_of_one_stays_in_its_memory() -> None:
    """As a matrix that others read too must."""
    before = record(lambda x: torch.bmm(x, MATRIX[None]), _random(1, 3, 4))
    after = rewritten(before, join_batches)
    assert [t.data_ptr() for t in after.buffers()] == [t.data_ptr() for t in before.buffers()]


LINEARS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "columns": (lambda x: F.linear(x.transpose(1, 2), WEIGHT, BIAS), (1, 4, 5)),
    "pixels": (lambda x: F.linear(x.permute(0, 2, 3, 1), WEIGHT, BIAS), (1, 4, 3, 5)),
    "pixels of several images": (lambda x: F.linear(x.permute(0, 2, 3, 1), WEIGHT, BIAS), (2, 4, 3, 5)),
    "first of each": (lambda x: F.linear(x[:, :1], WEIGHT, BIAS), (3, 2, 4)),
    "scaled": (lambda x: F.linear(x.transpose(1, 2), WEIGHT, BIAS) * BIAS.cos(), (1, 4, 5)),
    "scaled behind a view": (lambda x: F.linear(x.mT, WEIGHT, BIAS).mT * BIAS.cos()[:, None], (1, 4, 5)),
}


@pytest.mark.parametrize("name", LINEARS)
def test_biases_and_scales_fold(name: str) -> None:
    model, shape = LINEARS[name]
    x = _random(*shape)
    before = record(model, x)
    assert (counts(before)["bmm"] + counts(before)["mm"], counts(before)["add"]) == (1, 1)  # mm with torch 2.15
    after = optimize(before, device="cuda")
    check(after)
    called = counts(after)
    assert [called[n] for n in ("bmm", "mm", "add", "mul", "addmm")] == [0, 0, 0, 0, 1]
    assert fake(_only(after, "aten.addmm").args[2]).shape == (4, 6)
    assert_same(before, after, x)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_after_a_cast(dtype: torch.dtype) -> None:
    x = _random(1, 4, 5)
    before = record(LINEARS["columns"][0], x)
    after = optimize(before, device="cuda", dtype=dtype)
    check(after)
    assert fake(_only(after, "aten.addmm")).dtype == dtype
    assert_same(before, after, x, rtol=4 * torch.finfo(dtype).eps)


class Mixer(nn.Module):
    """A block of an MLP-Mixer (Tolstikhin et al. 2021) on tokens (batch, 12, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink = nn.LayerNorm(16), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens, each channel by itself."""
        y = F.gelu(self.grow(self.norm(x).transpose(1, 2)))
        return x + self.shrink(y).transpose(1, 2)


class CrossCovariance(nn.Module):
    """Attention of channels to channels (XCiT, El-Nouby et al. 2021) on tokens (batch, n, 16), four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.project = nn.Linear(16, 48), nn.Linear(16, 16)
        self.gamma = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the tokens and what attention makes of them."""
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 4, 1).unbind(0)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        y = (q @ k.mT).softmax(-1) @ v
        return x + self.gamma * self.project(y.permute(0, 3, 1, 2).reshape(x.shape))


class ClassAttention(nn.Module):
    """What becomes of the first token alone, as in the last blocks of XCiT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grow = nn.LayerNorm(16), nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, n, 16) to (batch, 1, 24)."""
        return F.gelu(self.grow(self.norm(x)[:, :1]))


def _optimized(network: type[nn.Module], batch: int) -> fx.GraphModule:
    """Return a network in float16, its values compared with those of its own graph."""
    torch.manual_seed(0)
    module, x = network().eval().half(), _random(batch, 12, 16, dtype=torch.float16)
    before = trace(module, (x,)).module
    after = optimize(before, device="cuda")
    check(after)
    assert_same(before, after, x, rtol=16 * torch.finfo(x.dtype).eps)
    return after


@pytest.mark.parametrize(
    ("network", "batch", "expected"),
    [
        (Mixer, 1, {"addmm": 2, "bmm": 0, "add": 1, "mul": 0}),
        (Mixer, 2, {"addmm": 1, "bmm": 1, "add": 2, "mul": 0}),
        (CrossCovariance, 1, {"addmm": 2, "bmm": 2, "add": 1, "mul": 0}),
        (CrossCovariance, 2, {"addmm": 1, "bmm": 3, "add": 2, "mul": 1}),
        (ClassAttention, 2, {"addmm": 1, "bmm": 0, "add": 0, "mul": 0}),
    ],
)
def test_networks(network: type[nn.Module], batch: int, expected: dict[str, int]) -> None:
    assert Counter(expected) == {name: counts(_optimized(network, batch))[name] for name in expected}


def test_our_kernels_take_in_bias_and_activation() -> None:
    (request,) = requests(_optimized(ClassAttention, 2))
    assert (request.kind, request.activation, request.has) == ("linear", "gelu", {"bias"})
    assert (request.shape.rows, request.shape.out_channels) == (2, 24)
