"""The kernels' shapes, packed weights, candidates and ops: what needs neither Triton nor a GPU."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import random_half
from torch import Tensor
from torch.nn import functional
from triton_process import run

from nimblec.kernels.choosing import Choice, choose
from nimblec.kernels.gpu import SM_90
from nimblec.kernels.images import channels_last, convolution_shape, laid_like
from nimblec.kernels.products import gemm_op as ops
from nimblec.kernels.products.depthwise_op import depthwise, pack_depthwise
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling, depthwise_candidates
from nimblec.kernels.products.gemm_reference import as_multiplied
from nimblec.kernels.products.gemm_tilings import Tiling, candidates, row_candidates, shared_budget
from nimblec.kernels.products.packing import (
    for_tensor_cores,
    join_groups,
    kernel_groups,
    pack_convolution,
    pack_linear,
    pack_rows,
    unpack_rows,
)
from nimblec.kernels.shapes import Convolution, ceil_div, product

if TYPE_CHECKING:
    from collections.abc import Callable

TILING = Tiling(block_m=16, block_n=32, block_k=16, split_k=2, num_warps=2, num_stages=2)
RESNET = Convolution(
    batch=1, height=7, width=7, channels=512, out_channels=512, kernel=(3, 3), padding=(1, 1), stride=(1, 1)
)


def _images(*shape: int, seed: int = 0) -> Tensor:
    return random_half(*shape, seed=seed).contiguous(memory_format=torch.channels_last)


@examples(60)
@given(
    size=st.tuples(st.integers(5, 12), st.integers(5, 12)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_a_shape_is_torchs(**geometry: tuple[int, int]) -> None:
    (height, width), kernel = geometry.pop("size"), geometry["kernel"]
    shape = Convolution(batch=2, height=height, width=width, channels=3, out_channels=4, **geometry)
    result = functional.conv2d(torch.zeros(2, 3, height, width), torch.zeros(4, 3, *kernel), None, **_rest(geometry))
    assert result.shape == (2, 4, shape.out_height, shape.out_width)
    assert shape.rows == result.numel() // 4
    assert shape.depth == 3 * kernel[0] * kernel[1]


def _rest(geometry: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {name: value for name, value in geometry.items() if name != "kernel"}


@pytest.mark.parametrize(
    ("groups", "read", "made", "expected"),
    [(4, 32, 16, 4), (4, 16, 16, 2), (8, 4, 4, 1), (32, 4, 8, 4), (6, 32, 12, 1), (3, 10, 10, 1), (2, 48, 48, 1)],
)
def test_groups_are_joined_until_they_fit_tiles(groups: int, read: int, made: int, expected: int) -> None:
    weight, x = random_half(groups * made, read, 3, 2), _images(1, groups * read, 5, 6).float()
    fewer = kernel_groups(weight, groups)
    assert fewer == expected
    joined = join_groups(weight, convolution_shape(x, groups * made, (3, 2), (1, 1), (0, 0), (1, 1), groups=fewer))
    assert joined.count_nonzero() == weight.count_nonzero()
    expected_images = functional.conv2d(x, weight.float(), groups=groups)
    torch.testing.assert_close(functional.conv2d(x, joined.float(), groups=fewer), expected_images, atol=1e-4, rtol=0)


@examples(60)
@given(columns=st.integers(1, 70), depth=st.integers(1, 70))
def test_packed_weights_are_the_weights(columns: int, depth: int) -> None:
    weight = random_half(columns, depth)
    packed = pack_rows(weight, TILING)
    assert packed.shape == (ceil_div(columns, 32), ceil_div(depth, 16), 32, 16)
    assert torch.equal(unpack_rows(packed, columns, depth), weight)
    assert int(packed.count_nonzero()) == int(weight.count_nonzero()), "past the edges lie zeros"
    assert torch.equal(packed[0, 0][: min(32, columns), : min(16, depth)], weight[:32, :16])


def test_tilings_survive_an_ops_argument() -> None:
    assert Tiling.of(TILING.numbers) == TILING


SHAPES = (
    RESNET,
    Convolution(batch=1, height=56, width=56, channels=64, out_channels=256),
    Convolution(
        batch=1, height=224, width=224, channels=3, out_channels=64, kernel=(7, 7), stride=(2, 2), padding=(3, 3)
    ),
    Convolution(batch=64, height=7, width=7, channels=2048, out_channels=512),
    product(1, 2048, 1000),
    product(128, 768, 3072),
    product(64, 768, 50257),
    product(3, 5, 7),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_candidates_are_few_and_fit(shape: Convolution) -> None:
    found = candidates(shape, SM_90, limit=10)
    assert 1 <= len(found) <= 10
    assert len(set(found)) == len(found)
    for tiling in found:
        part = ceil_div(tiling.steps(shape), tiling.split_k)
        assert part * (tiling.split_k - 1) < tiling.steps(shape), "every part of the sum has work"
        stage = 2 * tiling.block_k * (tiling.block_m + tiling.block_n)
        assert stage * tiling.num_stages <= max(shared_budget(SM_90), stage)
        assert tiling.block_m == 16 or tiling.block_m < 2 * shape.rows


@pytest.mark.parametrize("depth", [7, 96, 600, 2048, 5632])
def test_a_row_is_cut_without_much_padding(depth: int) -> None:
    shape = product(1, depth, 2560)
    found = row_candidates(shape)
    assert len({*found}) == len(found) >= 2
    assert all(each.steps(shape) * each.block_k <= max(1.15 * depth, 128) for each in found)
    if depth == 2048:
        assert found[0].blocks(shape) > 4 * SM_90.multiprocessors


def test_a_long_sum_of_few_tiles_is_split() -> None:
    best = candidates(RESNET, SM_90)[0]
    assert best.split_k > 1
    assert SM_90.multiprocessors // 3 <= best.blocks(RESNET) <= 2 * SM_90.multiprocessors


def test_choose_the_first_unless_another_is_clearly_faster() -> None:
    choice = _chosen({"theirs": 5.0, "a": 4.99, "b": 6.0})
    assert choice.best == "theirs"


def _chosen(times: dict[str, float]) -> Choice:
    calls: dict[str, Callable[[int], object]] = {name: lambda _, name=name: name for name in times}
    return choose(calls, lambda call: times[call(0)])


def test_convolution_on_the_cpu() -> None:
    x, weight, bias = _images(2, 6, 9, 8), random_half(10, 6, 3, 3), random_half(10, seed=2)
    expected = functional.conv2d(x.float(), weight.float(), bias.float(), 2, 1)
    residual = _images(*expected.shape, seed=3)
    arrived = torch.zeros(6, dtype=torch.int32)
    arguments = (
        x, pack_convolution(weight, TILING), bias, residual, arrived, 10, [3, 3], [2, 2], [1, 1], [1, 1],
        "relu6", TILING.numbers, "none",
    )  # fmt: skip
    y = ops.convolution(*arguments)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, functional.relu6(expected + residual).half(), atol=2e-3, rtol=2e-3)
    whole = _images(2, 16, *y.shape[2:])
    before = whole.clone()
    into = ops.convolution_into(*arguments, out=whole[:, 2:12])
    assert into.data_ptr() == whole[:, 2:].data_ptr()
    assert torch.equal(whole, torch.cat([before[:, :2], y, before[:, 12:]], 1))


def test_linear_on_the_cpu() -> None:
    x, weight, bias = random_half(5, 20), random_half(20, 7), random_half(7, seed=2)
    y = ops.linear(x, pack_linear(weight, TILING), bias, None, None, 7, "gelu", TILING.numbers, "none")
    expected = functional.gelu(x.float() @ weight.float() + bias.float())
    torch.testing.assert_close(y, expected.half(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("multiplier", [1, 3])
def test_depthwise_on_the_cpu(multiplier: int) -> None:
    out = 20 * multiplier
    x, weight, bias = _images(2, 20, 9, 8), random_half(out, 1, 5, 5), random_half(out, seed=2)
    tiling = DepthwiseTiling(block_m=4, block_c=16, num_warps=2)
    packed = pack_depthwise(weight, tiling)
    how = (out, [5, 5], [2, 2], [2, 2], [1, 1], "silu", tiling.numbers, "none")
    y = depthwise(x, packed, bias, None, *how)
    expected = functional.silu(functional.conv2d(x.float(), weight.float(), bias.float(), 2, 2, groups=20))
    assert packed.shape == (-(-out // 16), 25, 16)
    torch.testing.assert_close(y, expected.half(), atol=2e-3, rtol=2e-3)
    inferred = depthwise(x.to("meta"), packed.to("meta"), None, None, *how)
    assert (inferred.shape, inferred.stride(), inferred.dtype) == (y.shape, y.stride(), y.dtype)


def test_depthwise_candidates_fill_the_device() -> None:
    shape = Convolution(batch=1, height=14, width=14, channels=576, out_channels=576, kernel=(3, 3), padding=(1, 1))
    found = depthwise_candidates(shape, SM_90)
    assert len(set(found)) == len(found) == 5
    assert SM_90.multiprocessors <= found[0].blocks(shape) <= 4 * SM_90.multiprocessors
    assert all(tiling.num_warps * 32 * 8 <= tiling.block_m * tiling.block_c for tiling in found)


def test_fake_results_need_no_triton(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["triton"] = None  # cannot be imported
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from nimblec.kernels.products import gemm_op as ops
with FakeTensorMode():
    x = torch.empty(2, 6, 9, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight = torch.empty(1, 4, 32, 16, dtype=torch.bfloat16)
    y = ops.convolution(
        x, weight, None, None, None, 10, [3, 3], [2, 2], [1, 1], [1, 1], "none", [16, 32, 16, 1, 2, 2], "late"
    )
    z = ops.linear(x[0, :, 0].t(), weight, None, None, None, 7, "none", [16, 32, 16, 1, 2, 2], "late")
print(tuple(y.shape), y.stride(), y.dtype, tuple(z.shape), z.dtype)
"""
    told = run(code, tmp_path).strip()
    assert told == "(2, 10, 5, 4) (200, 1, 40, 10) torch.bfloat16 (8, 7) torch.bfloat16"


def test_schemas_tell_what_is_written() -> None:
    for op, extra in ((ops.convolution, []), (ops.linear, []), (ops.convolution_into, ["out"])):
        written = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
        assert written == ["counters", *extra]


def test_images_with_gaps_are_refused() -> None:
    x = torch.empty(1, 6, 9, 8)
    with pytest.raises(ValueError, match="channels last"):
        convolution_shape(x, 10, [1, 1], [1, 1], [0, 0], [1, 1])


def test_a_slice_of_channels_is_read_in_place() -> None:
    x = _images(2, 8, 5, 5)[:, :4]
    assert convolution_shape(x, 10, [1, 1], [1, 1], [0, 0], [1, 1]).pixel_stride == 8


def test_what_tensor_cores_cut_off_is_made_up_for() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 1024, generator=generator).relu(), torch.rand(1024, 64, generator=generator)
    exact = x.double() @ weight.double()

    def off(weight: Tensor) -> float:
        """Return by how much results are too large on average, in relation to them."""
        x_read, weight_read = (as_multiplied(t, torch.float32, "tf32").double() for t in (x, weight))
        return float(((x_read @ weight_read) / exact - 1).mean())

    assert off(weight) < -6e-4
    assert abs(off(for_tensor_cores(weight))) < 3e-5
    assert torch.equal(as_multiplied(for_tensor_cores(weight), torch.float32, "tf32"), for_tensor_cores(weight))


def test_what_lies_otherwise_than_inferred_is_laid_anew() -> None:
    images, other = torch.randn(2, 3, 4, 5), torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert torch.equal(channels_last(images), images)
    assert channels_last(images).stride() == other.stride()
    assert channels_last(other) is other
    laid = laid_like(images, other)
    assert laid is not None
    assert torch.equal(laid, images)
    assert laid.stride() == other.stride()
    row = images[:1, :1].as_strided((1, 1, 4, 5), (7, 9, 5, 1))
    assert laid_like(row, torch.empty(1, 1, 4, 5)) is row
    assert laid_like(None, other) is None
