"""The form and layout of what our kernels and Inductor compute where no GPU is present."""

import torch
from rewriting import checked, counts
from torch import Tensor
from torch.nn import functional

from nimblec.cuda.absent.layout import pad_single_channels, sum_vectors
from nimblec.graph.rewriter import bound, fake
from nimblec.kernels.products.gemm_match import requests
from nimblec.optimize.passes.copies import drop_copies
from nimblec.optimize.passes.one_axis import convolve_as_images


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def test_one_channel_gets_a_layout() -> None:
    x, weight = normal(1, 1, 50, dtype=torch.float32), normal(8, 1, 10, dtype=torch.float32)

    def model(x: Tensor) -> Tensor:
        return functional.group_norm(functional.conv1d(x, weight, stride=5), 8)

    after = checked(model, x, convolve_as_images, pad_single_channels, drop_copies, rtol=1e-4)
    (request,) = requests(after)
    assert fake(bound(request.head)["weight"]).shape == (8, 2, 1, 10)


def test_one_channel_of_a_transposed_convolution_gets_a_layout() -> None:
    x, weight = normal(1, 1, 5, 5, dtype=torch.float32), normal(1, 8, 4, 4, dtype=torch.float32)
    after = checked(lambda x: functional.conv_transpose2d(x, weight), x, pad_single_channels, rtol=1e-4)
    assert counts(after)["constant_pad_nd"] == 1


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
