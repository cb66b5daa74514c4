"""Convolution, residual and ReLU as one cuDNN call: the pattern, checked by the calls' definitions."""

from collections.abc import Callable

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import assert_same, checked, counts, record, rewritten
from torch import Tensor

from nimblec.optimize.passes.convolutions import fuse_convolutions

X = torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def _weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@examples(40)
@given(
    groups=st.sampled_from([1, 2]),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    with_bias=st.booleans(),
    residual=st.sampled_from(["none", "left", "right"]),
    relu=st.sampled_from(["relu", "clamp", "clamp_min"]),
)
def test_any_geometry(
    *, groups: int, stride: int, padding: int, dilation: int, with_bias: bool, residual: str, relu: str
) -> None:
    images, weight, bias = X.repeat(1, 2, 1, 1), _weight(8, 8 // groups, 3, 3), _weight(8) if with_bias else None

    def model(x: Tensor) -> Tensor:
        y = torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
        z = torch.conv2d(x, weight, bias, stride, padding, dilation, groups) * 2
        y = {"none": y, "left": y + z, "right": z + y}[residual]
        return {"relu": torch.relu(y), "clamp": torch.clamp(y, 0.0), "clamp_min": torch.clamp_min(y, 0)}[relu]

    after = checked(model, images, fuse_convolutions)
    fused = "cudnn_convolution_relu" if residual == "none" else "cudnn_convolution_add_relu"
    assert counts(after)[fused] == 1
    assert counts(after)[relu] == 0


@pytest.mark.parametrize(("channels", "groups"), [(2, 2), (1, 4), (4, 1)])
def test_only_common_groups_are_fused(channels: int, groups: int) -> None:
    before = record(lambda x: torch.relu(torch.conv2d(x, _weight(8, channels, 3, 3), groups=groups)), X)
    if groups == 1:
        assert counts(rewritten(before, fuse_convolutions)) == {"cudnn_convolution_relu": 1}
        return
    assert counts(rewritten(before, fuse_convolutions)) == counts(before)


def test_later_convolution_takes_residual() -> None:
    first, second = _weight(8, 4, 3, 3), _weight(8, 4, 1, 1)
    after = checked(
        lambda x: torch.relu(torch.conv2d(x, second) + torch.conv2d(x, first, padding=1)), X, fuse_convolutions
    )
    assert counts(after) == {"convolution": 1, "cudnn_convolution_add_relu": 1}


@pytest.mark.parametrize("biases", [(True, True), (False, True), (True, False)])
def test_the_bias_of_a_convolution_that_is_added_joins_the_other(biases: tuple[bool, bool]) -> None:
    first, second = (_weight(8) * n if given else None for n, given in enumerate(biases, 1))

    def model(x: Tensor) -> Tensor:
        y = torch.conv2d(x, _weight(8, 4, 1, 1), second)
        return torch.relu(torch.add(torch.conv2d(x, _weight(8, 4, 3, 3), first, padding=1), y, alpha=-2))

    after = checked(model, X, fuse_convolutions)
    (shortcut,) = (n for n in after.graph.nodes if "aten.convolution" in str(n.target))
    assert shortcut.args[2] is None
    assert counts(after) == {"convolution": 1, "cudnn_convolution_add_relu": 1}


def test_the_bias_of_a_convolution_that_others_read_stays() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.conv2d(x, _weight(8, 4, 1, 1), _weight(8))
        return torch.relu(torch.conv2d(x, _weight(8, 4, 3, 3), padding=1) + y), torch.sigmoid(y)

    assert counts(checked(model, X, fuse_convolutions))["cudnn_convolution_add_relu"] == 1


def test_alpha_scales_the_residual() -> None:
    weight = _weight(4, 4, 1, 1)
    left = record(lambda x: torch.relu(torch.add(torch.conv2d(x, weight), x, alpha=-3)), X)
    after = rewritten(left, fuse_convolutions)
    assert counts(after) == {"cudnn_convolution_add_relu": 1}
    assert_same(left, after, X)
    right = record(lambda x: torch.relu(torch.add(x, torch.conv2d(x, weight), alpha=-3)), X)
    assert counts(rewritten(right, fuse_convolutions)) == {"convolution": 1, "add": 1, "relu": 1}


def _twice(x: Tensor) -> Tensor:
    y = torch.conv2d(x, _weight(4, 4, 1, 1))
    return torch.relu(y) + y


def _twice_the_sum(x: Tensor) -> Tensor:
    y = torch.conv2d(x, _weight(4, 4, 1, 1)) + x
    return torch.relu(y) + y


def _own_residual(x: Tensor) -> Tensor:
    y = torch.conv2d(x, _weight(4, 4, 1, 1))
    return torch.relu(y + y)


@pytest.mark.parametrize(
    "model",
    [
        _twice,
        _twice_the_sum,
        _own_residual,
        lambda x: torch.relu(torch.conv2d(x, _weight(4, 4, 1, 1)) + x[:1]),  # the residual is broadcast
        lambda x: torch.relu(torch.conv2d(x, _weight(4, 4, 1, 1)) + x.double()),
        lambda x: torch.relu(torch.conv2d(x, _weight(4, 4, 1, 1)) + 1),
        lambda x: torch.clamp(torch.conv2d(x, _weight(4, 4, 1, 1)), 0, 6),
        lambda x: torch.relu(torch.conv_transpose2d(x, _weight(4, 4, 3, 3))),
        lambda x: torch.relu(torch.conv2d(x, _weight(8, 1, 3, 3), groups=4)),  # depthwise: served, but slowly
        lambda x: torch.relu(torch.conv2d(x.double(), _weight(4, 4, 1, 1, dtype=torch.float64))),
        lambda x: torch.relu(torch.conv2d(x, x[:, :, :1, :1])),  # weights that are computed
    ],
)
def test_what_the_calls_cannot_say_stays(model: Callable[[Tensor], Tensor]) -> None:
    names = counts(rewritten(record(model, X), fuse_convolutions))
    assert not any(name.startswith("cudnn") for name in names)
    assert names["convolution"] == 1
