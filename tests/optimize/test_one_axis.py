"""Convolutions over one axis become convolutions of images, which our kernels compute."""

import torch
from rewriting import checked
from torch import Tensor
from torch.nn import functional

from nimblec.graph.rewriter import bound, fake, is_call
from nimblec.graph.vocabulary import CONVOLUTION, DTYPES
from nimblec.kernels.products.gemm_match import requests
from nimblec.optimize.passes.channels_last import propagate_channels_last
from nimblec.optimize.passes.one_axis import convolve_as_images


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_groups_and_geometry_stay() -> None:
    x, weight, bias, deep = normal(2, 6, 20), normal(8, 3, 5), normal(8), normal(8, 1, 3)

    def model(x: Tensor) -> Tensor:
        y = functional.conv1d(x, weight, bias, stride=2, padding=3, dilation=2, groups=2)
        return functional.conv1d(functional.gelu(y), deep, padding=1, groups=8)

    after = checked(model, x, convolve_as_images, rtol=1e-4)
    given = [bound(node) for node in after.graph.nodes if is_call(node, CONVOLUTION)]
    assert [fake(each["weight"]).shape for each in given] == [(8, 3, 1, 5), (8, 1, 1, 3)]
    assert [each["groups"] for each in given] == [2, 8]


def test_activation_goes_with_its_convolution() -> None:
    x, weight = normal(2, 8, 20), normal(8, 8, 5)

    def model(x: Tensor) -> Tensor:
        return functional.conv1d(functional.gelu(functional.conv1d(x, weight), approximate="tanh"), weight).clamp(0, 6)

    after = checked(model, x, convolve_as_images, lambda m: propagate_channels_last(m, DTYPES), rtol=1e-4)
    assert [request.activation for request in requests(after)] == ["gelu_tanh", "relu6"]


def test_computed_weights_and_transposed_convolutions_stay() -> None:
    weight, other = normal(8, 4, 3), normal(6, 8, 3)

    def model(x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv1d(functional.conv_transpose1d(x, other), weight, groups=2)

    after = checked(model, (normal(1, 6, 9), weight), convolve_as_images, rtol=1e-4)
    assert {fake(node).dim() for node in after.graph.nodes if is_call(node, CONVOLUTION)} == {3}
