"""Attention of PyTorch modules on the CPU target, of any number of axes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

import nimblec
import nimblert

LEADS = {"none": (), "one": (3,), "two": (2, 3), "three": (2, 1, 3), "four": (1, 2, 2, 3)}
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "mask": {"attn_mask": torch.arange(30).reshape(5, 6) % 4 > 0},
    "added": {"attn_mask": torch.linspace(-2, 2, 30).reshape(5, 6)},
}


class Attention(nn.Module):
    """Of five queries over six keys, of which it has a part of its inputs."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Attend with (..., 5, 8) to (..., 6, 20)."""
        key, value = y[..., :8], y[..., 8:]
        return functional.scaled_dot_product_attention(x, key, value, **self.how) * 2


class Each(nn.Module):
    """Attention of each kind of the same inputs, for which one export does."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(Attention(how) for how in HOWS.values())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Return the results of all `Attention` modules."""
        return tuple(attention(x, y) for attention in self.each)


def _result(module: nn.Module, *inputs: Tensor) -> Any:
    exe = nimblert.load(nimblec.compile(module.eval(), inputs, target="cpu"))
    return tree_map(torch.from_numpy, exe(*(tensor.numpy() for tensor in inputs)))


@pytest.mark.parametrize("lead", LEADS)
def test_any_number_of_axes(lead: str) -> None:
    x, y = torch.randn(*LEADS[lead], 5, 8), torch.randn(*LEADS[lead], 6, 20)
    module = Each()
    torch.testing.assert_close(_result(module, x, y), module(x, y))


def test_a_mask_of_every_axis() -> None:
    x, y, mask = torch.randn(2, 2, 3, 5, 8), torch.randn(2, 2, 3, 6, 20), torch.randn(2, 2, 1, 5, 6)
    module = Attention({"attn_mask": mask})
    torch.testing.assert_close(_result(module, x, y), module(x, y))


@pytest.mark.parametrize("biased", [False, True])
def test_a_result_that_is_joined_where_it_lies(biased: bool) -> None:
    """Which of torch's kernels computes it decides how it lies, and whether joining its heads copies."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(1, 4, 12, 12)) if biased else None  # as T5 has it

        def forward(self, x: Tensor) -> Tensor:
            heads, bias = x.view(2, 12, 4, 8).transpose(1, 2), None if self.bias is None else self.bias * 2
            made = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
            return made.transpose(1, 2).contiguous().view(2, 12, 32)

    x, module = torch.randn(2, 12, 32), Joined()
    torch.testing.assert_close(_result(module, x), module(x).detach())


def test_queries_that_share_heads() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, y, y, enable_gqa=True)

    x, y = torch.randn(6, 5, 8), torch.randn(2, 7, 8)
    torch.testing.assert_close(_result(Shared(), x, y), Shared()(x, y))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("lead", ["one", "two", "three"])
def test_a_mask_that_leaves_no_key(lead: str, dtype: torch.dtype) -> None:
    """Unlike that of the example."""

    def mask(*of: int) -> Tensor:
        chosen = torch.ones(*LEADS[lead][:-1], 1, 5, 6, dtype=torch.bool)
        chosen[..., of, :] = False
        return chosen if dtype == torch.bool else torch.zeros(chosen.shape).masked_fill(~chosen, -torch.inf)

    q, k, v = (torch.randn(*LEADS[lead], *shape) for shape in ((5, 8), (6, 8), (6, 4)))
    exe = nimblert.load(nimblec.compile(functional.scaled_dot_product_attention, (q, k, v, mask()), target="cpu"))
    for given in (mask(), mask(0, 3)):
        found = torch.from_numpy(exe(*(tensor.numpy() for tensor in (q, k, v, given))))
        torch.testing.assert_close(found, functional.scaled_dot_product_attention(q, k, v, given))
