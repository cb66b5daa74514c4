"""Grouped convolutions laid as cuDNN computes them fast; values and strides stay."""

import pytest
import torch
from rewriting import assert_same, counts, optimize, record, rewritten
from torch import Tensor, fx
from torch.nn import functional

from nimblec.graph.rewriter import bound, fake, is_call
from nimblec.optimize.passes.layout_groups import lay_groups_contiguous

HALF, FLOAT = torch.float16, torch.float32
CHANNELS_LAST = torch.channels_last


def _graph(
    channels: int, groups: int, made: int, *, size: int = 3, dilation: int = 1, dtype: torch.dtype = HALF
) -> tuple[fx.GraphModule, Tensor]:
    """Return the ReLU of a convolution of ``channels`` with ``made`` results for each of ``groups``, and its images."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(made * groups, channels // groups, size, size, generator=generator).to(dtype) / size
    x = torch.randn(2, channels, 9, 8, generator=generator).to(dtype).contiguous(memory_format=CHANNELS_LAST)

    def function(x: Tensor) -> Tensor:
        padding = dilation * (size // 2)
        return torch.relu(functional.conv2d(x, weight, weight[:, 0, 0, 0], 1, padding, dilation, groups)).neg()

    before = record(function, x)
    (images,) = (node for node in before.graph.nodes if node.op == "placeholder")
    images.meta["val"] = fake(images).contiguous(memory_format=CHANNELS_LAST)
    return optimize(before, device="cuda"), x


def _convolution(module: fx.GraphModule) -> fx.Node:
    (found,) = (node for node in module.graph.nodes if is_call(node, torch.ops.aten.convolution.default))
    return found


@pytest.mark.parametrize(
    ("channels", "groups", "made", "how"),
    [
        (16, 16, 2, {}),
        (16, 8, 2, {}),
        (18, 6, 3, {}),
        (16, 4, 2, {}),
        (48, 2, 24, {}),
        (16, 16, 1, {"size": 9}),
        (16, 16, 1, {"size": 5, "dilation": 2}),
        (8, 8, 8, {"dtype": FLOAT}),
    ],
)
def test_slow_ones_are_computed_in_the_other_order(channels: int, groups: int, made: int, how: dict[str, int]) -> None:
    before, x = _graph(channels, groups, made, **how)
    after = rewritten(before, lay_groups_contiguous)
    call = _convolution(after)
    assert fake(bound(call)["input"]).is_contiguous()
    assert fake(bound(call)["weight"]).is_contiguous()
    assert fake(call).is_contiguous()
    assert counts(after)["clone"] == counts(before)["clone"] + 2
    assert_same(before, after, x)


@pytest.mark.parametrize(
    ("channels", "groups", "made", "how"),
    [
        (16, 1, 16, {}),
        (16, 16, 1, {}),
        (16, 16, 1, {"size": 7}),
        (16, 16, 2, {"size": 1}),
        (32, 4, 8, {}),
        (8, 8, 8, {"dtype": HALF}),
        (96, 2, 48, {}),
    ],
)
def test_fast_ones_stay(channels: int, groups: int, made: int, how: dict[str, int]) -> None:
    before, _ = _graph(channels, groups, made, **how)
    assert counts(rewritten(before, lay_groups_contiguous)) == counts(before)


def test_what_does_not_lie_channels_last_stays() -> None:
    weight = torch.ones(32, 1, 3, 3)
    before = record(lambda x: functional.conv2d(x, weight, groups=16), torch.ones(1, 16, 5, 5))
    assert counts(rewritten(before, lay_groups_contiguous)) == {"convolution": 1}
