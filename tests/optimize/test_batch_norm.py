"""Batch norm and other channel-wise scales and shifts, folded into convolutions and linears."""

from collections.abc import Callable

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import assert_same, checked, counts, record, rewritten
from torch import Tensor

from nimblec.optimize.passes.batch_norm import fold_batch_norm
from nimblec.optimize.passes.folding import fold_constants

aten = torch.ops.aten


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def _norm(x: Tensor, channels: int, dtype: torch.dtype = torch.float64, eps: float = 1e-3) -> Tensor:
    mean, variance = _random(channels, dtype=dtype), (torch.rand(channels) + 0.5).to(dtype)
    weight, bias = _random(channels, dtype=dtype), _random(channels, dtype=dtype)
    return aten._native_batch_norm_legit_no_training(x, weight, bias, mean, variance, 0.1, eps)[0]


@examples(60)
@given(data=st.data())
def test_any_convolution_takes_the_norm_after_it(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    rank, groups = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4]))
    transposed, with_bias = data.draw(st.booleans()), data.draw(st.booleans())
    padding, stride = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))
    width_in, width = 4, 8
    weight = _random(*((width_in, width // groups) if transposed else (width, width_in // groups)), *[3] * rank)
    bias = _random(width) if with_bias else None
    x = _random(2, width_in, *[6] * rank)

    def model(x: Tensor) -> Tensor:
        once, none = [1] * rank, [0] * rank
        y = aten.convolution(x, weight, bias, [stride] * rank, [padding] * rank, once, transposed, none, groups)
        return torch.relu(_norm(y, width))

    assert counts(checked(model, x, fold_batch_norm, rtol=1e-12)) == {"convolution": 1, "relu": 1}


@examples(40)
@given(data=st.data())
def test_the_norm_before_a_convolution_only_without_padding(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    groups, padding = data.draw(st.sampled_from([1, 2])), data.draw(st.integers(0, 1))
    transposed = data.draw(st.booleans())
    weight = _random(*((4, 6 // groups) if transposed else (6, 4 // groups)), 3, 3)
    x = _random(2, 4, 5, 5)

    def model(x: Tensor) -> Tensor:
        y = _norm(x, 4)
        return aten.convolution(y, weight, None, [2, 1], [padding, 0], [1, 1], transposed, [0, 0], groups)

    after = checked(model, x, fold_batch_norm, rtol=1e-12)
    assert counts(after)["addcmul"] == (1 if padding or transposed else 0)
    assert counts(after)["_native_batch_norm_legit_no_training"] == 0


@pytest.mark.parametrize(
    "arithmetic",
    [
        lambda y, c: y * c,
        lambda y, c: y / c,
        lambda y, c: c - y,
        lambda y, c: torch.sub(y, c, alpha=3),
        lambda y, c: torch.add(c, y, alpha=3),
        lambda y, _: 2 - y * 0.5,
        lambda y, c: (y + c) * c - 1,
    ],
)
def test_products_and_sums_with_constants(arithmetic: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    constant, weight, x = _random(6, 1, 1), _random(6, 4, 3, 3), _random(2, 4, 5, 5)
    after = checked(lambda x: arithmetic(torch.conv2d(x, weight), constant), x, fold_batch_norm, rtol=1e-12)
    assert counts(after) == {"convolution": 1}


def test_what_varies_along_another_axis_stays() -> None:
    weight, x, rows = _random(6, 4, 3, 3), _random(2, 4, 8, 8), _random(6, 1)
    before = record(lambda x: torch.conv2d(x, weight) * rows + rows.reshape(6), x)
    assert counts(rewritten(before, fold_batch_norm)) == {"convolution": 1, "mul": 1, "add": 1}


def test_a_convolution_that_others_read_stays() -> None:
    weight, x = _random(4, 4, 1, 1), _random(2, 4, 8, 8)

    def model(x: Tensor) -> Tensor:
        y = torch.conv2d(x, weight)
        return _norm(y, 4) + y

    assert counts(checked(model, x, fold_batch_norm, rtol=1e-12)) == {"convolution": 1, "addcmul": 1, "add": 1}


def test_a_concatenation_of_convolutions() -> None:
    weights, x = [_random(n, 4, 3, 3) for n in (2, 5, 3)], _random(1, 4, 8, 8)

    def model(x: Tensor, count: int) -> Tensor:
        parts = [torch.conv2d(x, w) for w in weights[:count]] + [x[:, :3, 1:-1, 1:-1]] * (3 - count)
        return _norm(torch.cat(parts, 1), sum(p.shape[1] for p in parts))

    whole = record(lambda x: model(x, 3), x)
    after = rewritten(whole, fold_batch_norm)
    assert counts(after) == {"convolution": 3, "cat": 1}
    assert_same(whole, after, x, rtol=1e-12)
    mixed = record(lambda x: model(x, 2), x)
    after = rewritten(mixed, fold_batch_norm)
    assert counts(after)["addcmul"] == 1
    assert_same(mixed, after, x, rtol=1e-12)


def test_a_concatenation_that_began_as_an_empty_tensor() -> None:
    weight, x = _random(6, 4, 3, 3), _random(1, 4, 8, 8)
    after = checked(
        lambda x: _norm(torch.cat([torch.empty(0), torch.conv2d(x, weight)], 1), 6), x, fold_batch_norm, rtol=1e-12
    )
    assert counts(after) == {"convolution": 1, "cat": 1, "addcmul": 1}


def test_a_linear_over_three_axes_takes_bias_and_scale() -> None:
    weight, bias, scale, x = _random(4, 6), _random(6), _random(6), _random(2, 3, 4)

    def model(x: Tensor) -> Tensor:
        y = torch.mm(x.reshape(6, 4), weight).reshape(2, 3, 6)
        return torch.relu((y + bias) * scale)

    assert counts(checked(model, x, fold_batch_norm, rtol=1e-12)) == {"reshape": 2, "addmm": 1, "relu": 1}


@pytest.mark.parametrize(
    "viewed",
    [
        lambda y, scale: y.reshape(2, 3, 6).permute(0, 2, 1) * scale[:, None],
        lambda y, scale: scale[:, None, None] * y.reshape(2, 3, 1, 6).permute(0, 3, 1, 2),
        lambda y, scale: y.t().reshape(6, 2, 3) * scale[:, None, None],
        lambda y, scale: y.unsqueeze(0).transpose(1, 2) * scale[:, None],
        lambda y, scale: y.reshape(2, 3, 6, 1).squeeze(-1) * scale,
        lambda y, _: y.reshape(2, 3, 2, 3).permute(0, 2, 1, 3) * 0.5,
    ],
)
def test_a_linear_takes_the_scale_of_each_channel_through_views(viewed: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, bias, scale, x = _random(4, 6), _random(6), _random(6), _random(6, 4)
    after = checked(lambda x: torch.relu(viewed(torch.addmm(bias, x, weight), scale)), x, fold_batch_norm, rtol=1e-12)
    assert counts(after)["mul"] == 0


@pytest.mark.parametrize("scale_as", [lambda y, s: y * s, lambda y, s: y.permute(0, 3, 1, 2) * s[:, None, None]])
def test_scale_reaches_convolution_through_views(scale_as: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, scale, x = _random(6, 4, 3, 3), _random(6), _random(2, 4, 5, 5)
    after = checked(
        lambda x: scale_as(torch.conv2d(x, weight).permute(0, 2, 3, 1), scale), x, fold_batch_norm, rtol=1e-12
    )
    assert counts(after)["mul"] == 0


def _read_between(y: Tensor, scale: Tensor) -> Tensor:
    viewed = y.reshape(2, 3, 6)
    return (viewed * scale).sum(1) + viewed.sum(1)


@pytest.mark.parametrize(
    "viewed",
    [
        # The scale is of parts of the channels.
        lambda y, scale: y.reshape(6, 2, 3) * scale[:3],
        # The scale is of the channels of several rows.
        lambda y, scale: y.reshape(2, 18) * scale.repeat(3),
        # The scale is of rows.
        lambda y, scale: y.t() * scale,
        lambda y, scale: y.reshape(2, 3, 6).permute(0, 2, 1) * scale[:3],
        # The axis is as long as the channels, but another one.
        lambda y, scale: y.t().reshape(2, 3, 6) * scale,
        _read_between,
    ],
)
def test_a_scale_of_anything_else_stays(viewed: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, scale, x = _random(4, 6), _random(6), _random(6, 4)
    after = checked(lambda x: viewed(torch.mm(x, weight), scale), x, fold_constants, fold_batch_norm, rtol=1e-12)
    assert counts(after)["mul"] == 1


@pytest.mark.parametrize(("factor", "folds"), [(1e-2, True), (1e-6, False), (0.0, True)])
def test_float32_weights_stay_in_the_range_of_half_precision(factor: float, folds: bool) -> None:
    weight, x = _random(16, 8, dtype=torch.float32) / 50, _random(4, 16, dtype=torch.float32)
    before = record(lambda x: torch.mm(x, weight) * torch.full((8,), factor), x)
    assert counts(rewritten(before, fold_batch_norm))["mul"] == (0 if folds else 1)
    tiny = record(lambda x: torch.mm(x, weight * 1e-6) * torch.full((8,), factor), x)
    assert counts(rewritten(tiny, fold_constants, fold_batch_norm))["mul"] == 0  # out of it before


def test_a_linear_after_the_norm() -> None:
    weight, bias, x = _random(4, 6), _random(6), _random(5, 4)
    after = checked(lambda x: torch.addmm(bias, _norm(torch.relu(x), 4), weight), x, fold_batch_norm, rtol=1e-12)
    assert counts(after) == {"relu": 1, "addmm": 1}


def test_scaled_products_and_biases_stay() -> None:
    weight, bias, x = _random(4, 6), _random(6), _random(5, 4)
    before = record(lambda x: torch.addmm(bias, x, weight, beta=2) * 3, x)
    assert counts(rewritten(before, fold_batch_norm)) == {"addmm": 1, "mul": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = _random(16, 8, 3, 3, dtype=dtype), _random(1, 8, 8, 8, dtype=dtype)
    mean, variance, scale, shift = _random(16), torch.rand(16).double() + 0.5, _random(16), _random(16)
    vectors = [v.to(dtype) for v in (scale, shift, mean, variance)]

    def model(x: Tensor) -> Tensor:
        y = torch.conv2d(x, weight)
        return aten._native_batch_norm_legit_no_training(y, *vectors, 0.1, 1e-5)[0]

    after = rewritten(record(model, x), fold_batch_norm)
    assert counts(after) == {"convolution": 1}
    scale, shift, mean, variance = (v.double() for v in vectors)
    factor = scale / torch.sqrt(variance + 1e-5)
    (new,) = (t for t in after.buffers() if t.dim() == 4)
    assert torch.equal(new, (weight.double() * factor.reshape(-1, 1, 1, 1)).to(dtype))
    (bias,) = (t for t in after.buffers() if t.dim() == 1)
    torch.testing.assert_close(bias.double(), (shift - mean * factor).to(dtype).double(), rtol=1e-7, atol=0)


@pytest.mark.parametrize(("size", "factor"), [(60.0, 5000.0), (0.013, 1e-6)])
def test_weights_that_would_overflow_or_vanish_stay(size: float, factor: float) -> None:
    weight, x = torch.full((2, 2, 1, 1), size).half(), _random(1, 2, 4, 4, dtype=torch.float16)
    factors = torch.tensor([[[factor]], [[factor]]]).half()
    before = record(lambda x: torch.conv2d(x, weight) * factors, x)
    assert counts(rewritten(before, fold_batch_norm)) == {"convolution": 1, "mul": 1}


def test_half_precision_keeps_a_norm_that_cannot_fold() -> None:
    x = _random(1, 4, 4, 4, dtype=torch.float16)
    before = record(lambda x: _norm(torch.relu(x), 4, torch.float32), x)
    assert counts(rewritten(before, fold_batch_norm))["_native_batch_norm_legit_no_training"] == 1


def test_norms_in_training_stay() -> None:
    weight, x = _random(4, 4, 1, 1), _random(2, 4, 4, 4)

    def model(x: Tensor) -> Tensor:
        y = torch.conv2d(x, weight)
        one, zero = torch.ones(4).double(), torch.zeros(4).double()
        return aten._native_batch_norm_legit.no_stats(y, one, zero, True, 0.1, 1e-5)[0]

    assert counts(rewritten(record(model, x), fold_constants, fold_batch_norm))["_native_batch_norm_legit"] == 1


def test_weights_shared_with_another_call_stay_as_they_are_there() -> None:
    weight, bias, x = _random(4, 4, 1, 1), _random(4, 1, 1), _random(2, 4, 4, 4)

    def model(x: Tensor) -> Tensor:
        y = torch.relu(torch.conv2d(x, weight) + bias)
        z = torch.relu(torch.conv2d(y, weight) * bias)
        return torch.conv2d(z, weight)

    after = checked(model, x, fold_batch_norm, rtol=1e-12)
    assert counts(after) == {"convolution": 3, "relu": 2}
    assert sum(t.dim() == 4 for t in after.buffers()) == 2  # a shift alone needs no new weights


def test_what_follows_a_norm_is_folded_too() -> None:
    weight, x = _random(4, 3, 3, 3), _random(1, 3, 6, 6)
    after = checked(lambda x: (_norm(torch.conv2d(x, weight), 4) + 0.5) * 2, x, fold_batch_norm, rtol=1e-12)
    assert counts(after) == {"convolution": 1}


@pytest.mark.parametrize("computed", ["mean", "variance"])
def test_a_norm_by_computed_statistics_stays(computed: str) -> None:
    weight, vector = _random(4, 4, 1, 1), torch.rand(4, dtype=torch.float64) + 0.5

    def model(x: Tensor) -> Tensor:
        statistics = {"mean": vector, "variance": vector, computed: x.abs().mean((0, 2, 3)) + 1}
        y = torch.conv2d(x, weight)
        return aten._native_batch_norm_legit_no_training(y, vector, vector, *statistics.values(), 0.1, 1e-3)[0]

    x = _random(2, 4, 5, 5)
    assert counts(checked(model, x, fold_batch_norm))["_native_batch_norm_legit_no_training"] == 1
