"""Channels last from end to end: one conversion at each border, values and output strides kept."""

from functools import partial

import pytest
import torch
from rewriting import assert_same, checked, counts, family, optimize, record, rewritten
from torch import Tensor, fx

from nimblec.graph.rewriter import fake
from nimblec.graph.vocabulary import CONVOLUTION, CONVOLUTION_BACKWARD, CONVOLUTIONS
from nimblec.optimize.passes.channels_last import CONTIGUOUS, lay_contiguous, propagate_channels_last

X = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0)).half()
FLOAT = frozenset({torch.float32})


def _weight(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).half() / 8


def _images(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if isinstance(n.meta.get("val"), Tensor) and fake(n).dim() == 4]


def _is_channels_last(node: fx.Node) -> bool:
    return fake(node).is_contiguous(memory_format=torch.channels_last)


def _network(x: Tensor) -> Tensor:
    """Join two branches on one input, pooling, concatenation, a residual, upsampling, and the head."""
    y = torch.relu(torch.conv2d(x, _weight(8, 8, 3, 3), padding=1))
    z = torch.conv2d(x, _weight(8, 1, 3, 3), padding=1, groups=8) + y
    y = torch.cat([torch.max_pool2d(y, 2), torch.nn.functional.avg_pool2d(z, 2)], 1)
    y = torch.nn.functional.interpolate(torch.sigmoid(y), scale_factor=2)
    return torch.conv2d(y, _weight(4, 16, 1, 1))


def test_one_conversion_in_and_one_out() -> None:
    before = record(_network, X)
    after = rewritten(before, propagate_channels_last)
    assert counts(after)["clone"] == counts(before)["clone"] + 2
    inside = [n for n in _images(after) if n.op != "placeholder" and not n.users.keys() & {after.graph.output_node()}]
    assert len(inside) > 10
    assert all(_is_channels_last(node) for node in inside)
    assert_same(before, after, X)


@pytest.mark.parametrize("frozen", [False, True])
def test_layout_of_gradients_is_channels_last(frozen: bool) -> None:
    x, grad = (torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(n)) for n in range(2))
    weight, pointwise = _weight(8, 8, 3, 3).float(), _weight(8, 8, 1, 1).float()

    def step(x: Tensor, grad: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        (first,) = weights or (weight,)
        y = torch.relu(torch.conv2d(x, first, padding=1))
        one, zero = ([1, 1], [0, 0])
        back = torch.ops.aten.convolution_backward
        of_y, of_pointwise, _ = back(grad, y, pointwise, None, one, zero, one, False, zero, 1, [True, True, False])
        of_x, of_first, _ = back(of_y * (y > 0), x, first, None, one, one, one, False, zero, 1, [True, True, False])
        return of_x, of_first, of_pointwise

    inputs = (x, grad) if frozen else (x, grad, weight)
    after = checked(step, inputs, partial(propagate_channels_last, dtypes=FLOAT))
    read = [a for n in after.graph.nodes if n.target in (CONVOLUTION, CONVOLUTION_BACKWARD) for a in n.all_input_nodes]
    assert len(read) == 8
    assert all(map(_is_channels_last, read))


def test_views_and_means_read_any_order() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.conv2d(x, _weight(8, 8, 3, 3))
        return y.view(2, -1), y.flatten(2).transpose(1, 2).contiguous(), y.mean((2, 3)), y.permute(0, 2, 3, 1) * 2

    before = record(model, X)
    after = rewritten(before, propagate_channels_last)
    assert counts(after)["clone"] == counts(before)["clone"] + 2  # of the images, and of the last output
    for wanted, got in zip(before(X), after(X), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)
        assert got.stride() == wanted.stride()


def test_outputs_keep_their_strides() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.conv2d(x, _weight(8, 8, 3, 3))
        return y, torch.relu(y)

    checked(model, X, propagate_channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_only_where_asked(dtype: torch.dtype) -> None:
    before = record(lambda x: torch.conv2d(x, _weight(8, 8, 3, 3).to(dtype)), X.to(dtype))
    assert counts(rewritten(before, propagate_channels_last)) == {"convolution": 1}
    after = rewritten(before, lambda module: propagate_channels_last(module, FLOAT))
    assert counts(after)["clone"] == (2 if dtype == torch.float32 else 0)
    assert_same(before, after, X.to(dtype))


def test_calls_that_read_strides_keep_the_layout() -> None:
    after = checked(
        lambda x: torch.conv2d(x, _weight(8, 8, 3, 3)).as_strided((4, 4), (4, 1)), X, propagate_channels_last
    )
    assert counts(after) == {"convolution": 1, "as_strided": 1}


def test_one_dimensional_and_three_dimensional_convolutions_stay() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return torch.conv1d(x.flatten(2), _weight(8, 8, 3)), torch.conv3d(x[:, :, None], _weight(8, 8, 1, 3, 3))

    before = record(model, X)
    assert counts(rewritten(before, propagate_channels_last)) == counts(before)


def _normalized(x: Tensor) -> Tensor:
    """Return a convolution, group norm twice on its result, and convolutions of both."""
    y = torch.conv2d(x, _weight(8, 8, 3, 3), padding=1)
    z = torch.group_norm(y, 4, X[0, :, 0, 0], X[1, :, 0, 0]), torch.group_norm(torch.relu(y), 2)
    return torch.conv2d(torch.sigmoid(z[0]), _weight(8, 8, 3, 3)) + torch.conv2d(z[1], _weight(8, 8, 3, 3))


def _refused(module: fx.GraphModule) -> list[fx.Node]:
    calls = [n for n in module.graph.nodes if n.target in CONTIGUOUS]
    assert calls
    return [n for n in calls if not fake(n.args[0]).is_contiguous()]


def test_group_norm_reads_contiguous_images() -> None:
    after = checked(_normalized, X, propagate_channels_last, rtol=1e-2)
    assert not _refused(after)
    read = [n.args[0] for n in after.graph.nodes if n.target in CONVOLUTIONS]
    assert read
    assert all(map(_is_channels_last, read))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_group_norm_in_a_network(dtype: torch.dtype) -> None:
    before, inputs = family("unet", dtype)
    after = optimize(before, device="cuda")
    assert not _refused(after)
    assert_same(before, after, *inputs, rtol=2e-2 if dtype == torch.float16 else 1e-4)


def test_layout_of_weight_norm_is_contiguous() -> None:
    grad, kept, size = X * 0.5, _weight(8, 8, 3, 3).float(), torch.rand(8, 1, 1, 1) + 0.5

    def step(x: Tensor, grad: Tensor, kept: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        weight, norms = torch.ops.aten._weight_norm_interface(kept, size)
        one, zero = [1, 1], [0, 0]
        y = torch.conv2d(x, weight, padding=1)
        back = torch.ops.aten.convolution_backward
        _, of_weight, _ = back(grad, x, weight, None, one, one, one, False, zero, 1, [False, True, False])
        return y, *torch.ops.aten._weight_norm_interface_backward(of_weight, kept, size, norms, 0)

    inputs = X.float(), grad.float(), kept, size
    before = record(step, *inputs)
    assert_same(before, rewritten(before, partial(propagate_channels_last, dtypes=FLOAT)), *inputs)


def test_other_orders_are_copied_too() -> None:
    before = record(lambda x: torch.ops.aten.native_group_norm(x.mT, None, None, 2, 8, 36, 4, 1e-5)[0], X)
    after = rewritten(before, lay_contiguous)
    assert counts(after) - counts(before) == {"clone": 1}
    assert not _refused(after)
    torch.testing.assert_close(after(X)[0], torch.group_norm(X.mT, 4))


def test_a_weight_that_is_computed_stays_as_it_is() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return torch.conv2d(x, w * 2)

    weight = _weight(8, 8, 3, 3)
    before = record(model, X, weight)
    after = rewritten(before, propagate_channels_last)
    assert counts(after)["convolution"] == 1
    torch.testing.assert_close(after(X, weight)[0], before(X, weight)[0], rtol=2e-3, atol=2e-3)
