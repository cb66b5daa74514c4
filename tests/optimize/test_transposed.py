"""Transposed convolutions that make blocks: convolutions of pixels and one copy, values and strides kept."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import assert_same, check, checked, counts, optimize, randomize, record, rewritten
from torch import Tensor, fx, nn

from bench.models import unet
from nimblec.graph.rewriter import fake
from nimblec.graph.views import is_view
from nimblec.kernels.products.gemm_match import requests
from nimblec.optimize.passes.partition import extract, partition, replace
from nimblec.optimize.passes.transposed import block_transposed_convolutions
from nimblec.pytorch.aten_graph import trace

HALF = (torch.float16, torch.bfloat16)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X = _random(2, 4, 3, 5)


def _weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return _random(*shape, dtype=dtype, seed=1)


def _convolution(module: fx.GraphModule) -> fx.Node:
    (convolution,) = (n for n in module.graph.nodes if "aten.convolution" in str(n.target))
    return convolution


@examples(60)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.integers(1, 2),
    channels=st.sampled_from([1, 3]),
    with_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, *HALF]),
    channels_last=st.booleans(),
)
def test_any_block(
    *,
    kernel: tuple[int, int],
    size: tuple[int, int],
    batch: int,
    channels: int,
    with_bias: bool,
    dtype: torch.dtype,
    channels_last: bool,
) -> None:
    weight, bias = _weight(4, channels, *kernel, dtype=dtype), _weight(channels, dtype=dtype) if with_bias else None
    order = torch.channels_last if channels_last else torch.contiguous_format
    x = _random(batch, 4, *size, dtype=dtype)

    def model(x: Tensor) -> Tensor:
        return torch.conv_transpose2d(x.clone(memory_format=order), weight, bias, kernel)

    before = record(model, x)
    after = rewritten(before, block_transposed_convolutions)
    convolution = _convolution(after)
    assert fake(convolution).shape == (batch, channels * kernel[0] * kernel[1], *size)
    assert fake(convolution.args[1]).shape[2:] == (1, 1)
    assert convolution.args[6] is False
    assert (convolution.args[2] is None) != with_bias
    assert counts(after)["clone"] <= counts(before)["clone"] + (1 if max(kernel) > 1 else 0)
    assert all(is_view(n) for n in after.graph.nodes if "reshape" in str(n.target))
    assert_same(before, after, x)


@pytest.mark.parametrize("channels_last", [False, True])
def test_each_number_goes_where_it_went(channels_last: bool) -> None:
    order = torch.channels_last if channels_last else torch.contiguous_format
    weight, bias = torch.arange(1.0, 49).reshape(2, 4, 2, 3), torch.arange(4.0) * 1000
    x = torch.arange(12.0).reshape(1, 2, 2, 3)
    before = record(lambda x: torch.conv_transpose2d(x.clone(memory_format=order), weight, bias, (2, 3)), x)
    after = rewritten(before, block_transposed_convolutions)
    assert counts(after)["clone"] == counts(before)["clone"] + 1
    assert_same(before, after, x, rtol=0)


def test_one_pixel_makes_one_block_whatever_the_stride() -> None:
    """As the first layer of a DCGAN (Radford et al. 2016)."""
    x = X[:, :, :1, :1]
    after = checked(
        lambda x: torch.conv_transpose2d(x, _weight(4, 3, 4, 4), stride=1), x, block_transposed_convolutions
    )
    assert fake(_convolution(after)).shape == (2, 48, 1, 1)


@pytest.mark.parametrize(
    "convolve",
    [
        lambda x: torch.conv_transpose2d(x, _weight(4, 3, 3, 3), stride=2),
        lambda x: torch.conv_transpose2d(x, _weight(4, 3, 2, 2), stride=3),
        lambda x: torch.conv_transpose2d(x, _weight(4, 3, 2, 2), stride=(2, 1)),
        lambda x: torch.conv_transpose2d(x, _weight(4, 3, 2, 2), stride=2, padding=1),
        lambda x: torch.conv_transpose2d(x, _weight(4, 3, 2, 2), stride=2, output_padding=1),
        lambda x: torch.conv_transpose2d(x, _weight(4, 3, 4, 4), stride=2, padding=1),  # twice the size, too
        lambda x: torch.conv_transpose2d(x[:, :, :2, :2], _weight(4, 3, 2, 2), stride=1, dilation=2),
        lambda x: torch.conv_transpose2d(x, _weight(4, 3, 2, 2), stride=2, groups=2),
        lambda x: torch.conv_transpose2d(x, x[:, :, :2, :2].repeat(2, 1, 1, 1), stride=2),
        lambda x: torch.conv_transpose2d(x, _weight(4, 2, 2, 2), x[:, 0, 0, 0], stride=2),
        lambda x: torch.conv_transpose2d(x.double(), _weight(4, 3, 2, 2).double(), stride=2),
        lambda x: torch.conv_transpose1d(x[:, :, 0], _weight(4, 3, 2), stride=2),
        lambda x: torch.conv_transpose3d(x[:, :, None], _weight(4, 3, 2, 2, 2), stride=2),
        lambda x: torch.conv2d(x, _weight(3, 4, 1, 1)),
    ],
)
def test_what_makes_no_blocks_stays(convolve: Callable[[Tensor], Tensor]) -> None:
    before = record(convolve, X)
    after = rewritten(before, block_transposed_convolutions)
    assert counts(after) == counts(before)
    assert_same(before, after, X)


class Network(nn.Module):
    """A UNet of one level, with a batch norm after what doubles the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 1, 1)
        self.grow, self.norm = nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(16, 8, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, height, width), both even, to (batch, 8, height, width)."""
        x = torch.relu(self.stem(x))
        y = self.norm(self.grow(torch.relu(self.deep(F.max_pool2d(x, 2)))))
        return self.last(torch.cat((x, y), 1))


def _network(dtype: torch.dtype, *, channels_last: bool = False) -> tuple[fx.GraphModule, Tensor]:
    torch.manual_seed(0)
    module, x = randomize(Network()).eval().to(dtype), _random(2, 3, 8, 12, dtype=dtype)
    if channels_last:
        module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return trace(module, (x,)).module, x


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_network(dtype: torch.dtype, channels_last: bool) -> None:
    before, x = _network(dtype, channels_last=channels_last)
    after = optimize(before, device="cuda")
    check(after)
    names = counts(after)
    borders = 2 if dtype in HALF and not channels_last else 0  # what lays the input and the output anew
    assert names.pop("clone") == 1 + borders
    assert names.pop("permute") == (2 if dtype in HALF or channels_last else 1)
    assert names == {
        "cudnn_convolution_relu": 2, "convolution": 2, "max_pool2d_with_indices": 1, "cat": 1, "reshape": 2,
    }  # fmt: skip
    assert_same(before, after, x, rtol=32 * torch.finfo(dtype).eps)


def test_cpus_keep_the_call() -> None:
    before, x = _network(torch.float32)
    after = optimize(before, device="cpu")
    assert counts(after)["reshape"] == 0
    assert sum(bool(n.args[6]) for n in after.graph.nodes if "aten.convolution" in str(n.target)) == 1
    assert_same(before, after, x, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_copy_is_part_of_what_follows(dtype: torch.dtype) -> None:
    before, x = _network(dtype)
    after = optimize(before, device="cuda")
    (region,) = (r for r in partition(after) if "cat" in counts(extract(r).module))
    assert [str(call.target) for call in region][-2:] == ["aten.clone.default", "aten.cat.default"]
    extracts = [extract(r) for r in partition(after)]
    replace(after, {lambda inputs, e=e: e.module(*inputs): [e] for e in extracts})
    assert_same(before, after, x, rtol=32 * torch.finfo(dtype).eps)


def test_our_kernels_serve_a_whole_unet() -> None:
    torch.manual_seed(0)
    module = unet.UNet().eval().half()
    graph = trace(module, (_random(1, 3, 32, 32, dtype=torch.float16),)).module
    after = optimize(graph, device="cuda")
    asked = list(requests(after))
    grown = [r.shape.out_channels for r in asked if r.shape.kernel == (1, 1)]
    assert grown == [4 * 512, 4 * 256, 4 * 128, 4 * 64, 21]
    assert all("bias" in r.has for r in asked)
    assert len(asked) == counts(graph)["convolution"] == 23
    joined = [r for r in partition(after) if "cat" in counts(extract(r).module)]
    assert [len(region) for region in joined] == [2, 2, 2, 2]
