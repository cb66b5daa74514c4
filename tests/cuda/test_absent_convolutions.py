"""Convolutions of several groups and over one axis, in the form that our kernels compute."""

import pytest
import torch
from rewriting import checked, counts
from torch import Tensor
from torch.nn import functional

from nimblec.cuda.absent.convolutions import convolve_as_images, join_groups
from nimblec.cuda.absent.layout import sum_vectors
from nimblec.graph.rewriter import bound, fake, is_call
from nimblec.graph.vocabulary import CONVOLUTIONS
from nimblec.kernels.products.gemm_match import requests
from nimblec.optimize.passes.convolutions import fuse_convolutions
from nimblec.optimize.passes.copies import drop_copies


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def geometry(module: torch.fx.GraphModule) -> list[tuple[int, int, int]]:
    """Return axes, groups and channels of the weights of each convolution."""
    given = [bound(node) for node in module.graph.nodes if is_call(node, *CONVOLUTIONS)]
    return [(fake(each["weight"]).dim(), each["groups"], fake(each["weight"]).shape[1]) for each in given]


@pytest.mark.parametrize(
    ("channels", "made", "groups", "parts"),
    [(6, 4, 2, 1), (12, 24, 4, 1), (512, 512, 32, 2), (256, 768, 4, 4), (513, 513, 9, 1)],
)
def test_groups_become_one(channels: int, made: int, groups: int, parts: int) -> None:
    x, weight, bias = normal(2, channels, 5, 4), normal(made, channels // groups, 3, 2), normal(made)

    def model(x: Tensor) -> Tensor:
        return functional.conv2d(x, weight, bias, stride=(1, 2), padding=1, groups=groups)

    assert geometry(checked(model, x, join_groups, rtol=1e-9)) == [(4, 1, channels // parts)] * parts


def test_groups_keep_residual_and_relu() -> None:
    x, weight, bias = normal(1, 512, 4, 4), normal(512, 16, 3, 3), normal(512)

    def model(x: Tensor) -> Tensor:
        first = torch.relu(functional.conv2d(x, weight, bias, padding=1, groups=32))
        return torch.relu(functional.conv2d(first, weight, bias, padding=1, groups=32) + x)

    x = x.float()
    weight, bias = weight.float() / 12, bias.float()
    names = counts(checked(model, x, fuse_convolutions, join_groups, rtol=1e-4))
    assert (names["cudnn_convolution_relu"], names["cudnn_convolution_add_relu"], names["cat"]) == (2, 1, 1)


def test_depthwise_and_transposed_convolutions_stay() -> None:
    x, deep, transposed = normal(1, 6, 5, 5), normal(12, 1, 3, 3), normal(12, 2, 3, 3)

    def model(x: Tensor) -> Tensor:
        return functional.conv_transpose2d(functional.conv2d(x, deep, groups=6), transposed, groups=2)

    assert [groups for _, groups, _ in geometry(checked(model, x, join_groups))] == [6, 2]


def test_one_channel_gets_a_layout() -> None:
    x, weight = normal(1, 1, 50, dtype=torch.float32), normal(8, 1, 10, dtype=torch.float32)

    def model(x: Tensor) -> Tensor:
        return functional.group_norm(functional.conv1d(x, weight, stride=5), 8)

    after = checked(model, x, convolve_as_images, drop_copies, rtol=1e-4)
    assert geometry(after) == [(4, 1, 2)]
    assert len(list(requests(after))) == 1


def test_convolutions_over_one_axis_become_images() -> None:
    x, weight, bias, deep = normal(2, 6, 20), normal(8, 3, 5), normal(8), normal(8, 1, 3)

    def model(x: Tensor) -> Tensor:
        y = functional.conv1d(x, weight, bias, stride=2, padding=3, dilation=2, groups=2)
        return functional.conv1d(functional.gelu(y), deep, padding=1, groups=8)

    after = checked(model, x, convolve_as_images, join_groups, rtol=1e-9)
    assert geometry(after) == [(4, 1, 6), (4, 8, 1)]


def test_activation_goes_with_its_convolution() -> None:
    x, weight = normal(2, 8, 20, dtype=torch.float32), normal(8, 8, 5, dtype=torch.float32)

    def model(x: Tensor) -> Tensor:
        return functional.conv1d(functional.gelu(functional.conv1d(x, weight), approximate="tanh"), weight).clamp(0, 6)

    after = checked(model, x, convolve_as_images, rtol=1e-4)
    assert [request.activation for request in requests(after)] == ["gelu_tanh", "relu6"]


def test_products_of_vectors_become_sums() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        row, column = torch.mm(x[:1], y), torch.addmm(x[0, :1], x, y[:, :1])
        outer = torch.bmm(x[None, :, :1], y[None, :1])
        return torch.baddbmm(outer, x[None], y[None]) * row + column

    after = checked(model, (normal(5, 6), normal(6, 4)), sum_vectors, rtol=1e-9)
    assert (counts(after)["sum"], counts(after)["baddbmm"]) == (3, 1)
    assert not {"mm", "addmm", "bmm"} & counts(after).keys()


def test_products_of_vectors_by_constants_stay() -> None:
    weight = normal(6, 1)
    assert counts(checked(lambda x: torch.mm(x, weight), normal(5, 6), sum_vectors))["mm"] == 1
