"""What torch.onnx exports wrong for other values than those of the example, against PyTorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from translations import agree, each

ROWS = torch.tensor([[0.5, -1.0, 2.0], [4.0, 8.0, -16.0], [32.0, 1.0, 3.0]])
APART = torch.tensor([[0, 1, 2], [1, 2, 3]])
"""No place twice: what one of them makes of it is a sum, a mean and a product."""
TOGETHER = torch.tensor([[0, 3, 3], [0, 3, 1]])
BELOW = torch.tensor([[-torch.inf, -1.0, 2.0], [-torch.inf, 8.0, -16.0]])


def _scattered(reduce: str, *, include_self: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, index, source: x.scatter_reduce(0, index, source, reduce, include_self=include_self)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter", "ignore:index_reduce")
def test_values_are_scattered_with_a_reduction() -> None:
    """Also at places that come twice, unlike those of the example, and more values than places."""
    x, index = torch.arange(12.0).reshape(4, 3), APART[:, :2]
    writes = [
        lambda x, index, source: x.scatter(0, index, source, reduce="add"),
        lambda x, index, source: x.scatter(-1, index % 3, source, reduce="multiply"),
        lambda x, index, _: x.scatter(0, index, 2.5, reduce="add"),
        lambda x, index, source: x.index_reduce(0, index[0], source[:2], "amax"),
        lambda x, index, source: x.index_reduce(-1, index[1] % 3, source.T.repeat(2, 1)[:4, :2], "mean"),
        lambda x, index, source: x.put(index, source[:2, :2]),
        lambda x, index, source: x.put(index, source[:2, :2], accumulate=True),
    ]
    agree(each(writes), (x, index, ROWS), (x, TOGETHER[:, 1:] % 3, -ROWS))


def test_a_diagonal_beside_infinity() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    reads = [
        lambda x: x.diagonal(-1, 0, 2),
        lambda x: x.diagonal(1, -1, 1),
        lambda x: x[1].diag(5),
        lambda x: x[0].trace(),
    ]
    beside = torch.where(x.remainder(5) == 0, x, torch.inf)
    agree(each(reads), (x,), (beside,), (beside * torch.nan,))


def test_an_index_of_32_bits() -> None:
    index = torch.tensor([[2, -1]], dtype=torch.int32)
    agree(lambda x, index: x[index] + x[:, index[0]].sum(), (ROWS, index), (-ROWS, index - 1))


def test_what_a_mask_chooses_gets_values_in_their_order() -> None:
    def model(x: Tensor, values: Tensor) -> Tensor:
        return x.masked_scatter(x > 0, values) + x.masked_scatter(x[:, :1] < 0, values)

    values = torch.arange(16.0)
    agree(model, (ROWS, values), (-ROWS, -values), (ROWS.abs(), values), (torch.zeros(3, 3), values))


def test_a_check_of_all_values() -> None:
    """That a model for images and text has of its placeholders."""

    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torch._check_tensor_all(x > -100)
        return x + 1, (x > 0)._is_all_true(), (x > 0)._is_any_true()

    agree(model, (ROWS,), (ROWS.abs(),), (-ROWS.abs(),))


@pytest.mark.parametrize("include_self", [True, False])
def test_a_reduction_that_is_scattered(include_self: bool) -> None:
    """Below zero without a bound, and at places that come twice, unlike those of the example."""
    x = torch.ones(4, 3)
    reductions = [_scattered(how, include_self=include_self) for how in ("sum", "mean", "prod", "amax", "amin")]
    others = [(x, TOGETHER, source) for source in (ROWS[:2], BELOW, -BELOW)]
    agree(each(reductions), (x, APART, ROWS[:2]), *others)


@pytest.mark.parametrize("include_self", [True, False])
def test_a_mean_of_integers_is_rounded_down(include_self: bool) -> None:
    x, source = torch.full((4, 3), 3), torch.tensor([[-7, 2, 5], [-8, 4, 6]])
    agree(_scattered("mean", include_self=include_self), (x, APART, source.abs()), (x, TOGETHER, source))


def test_a_mean_of_one_number() -> None:
    x, place = torch.tensor(3.0), torch.tensor(0)
    agree(lambda x, source: x.scatter_reduce(0, place, source, "mean"), (x, x), (x, -x * 4))


def test_an_integer_to_a_power_that_is_none() -> None:
    integers, ones = torch.tensor([1, 2, 3]), torch.ones(3)
    agree(torch.pow, (integers, ones), (integers, ones / 2), (integers, -ones))


def test_a_power_has_the_wider_type() -> None:
    narrow, wide = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([40, 40, 2])
    agree(lambda x, y: x**y, (narrow, wide % 3), (narrow, wide))
    agree(lambda x: x ** torch.tensor(2), (narrow,), (-narrow,))


def test_the_logarithm_of_a_sigmoid_that_is_rounded_to_zero() -> None:
    x = torch.tensor([0.5, 1.0, 2.0])
    agree(functional.logsigmoid, (x,), (x * -100,), (x * 100,))


def test_a_sum_of_powers_that_are_infinite() -> None:
    x = torch.tensor([0.5, 120.0, -1000.0, torch.inf, -torch.inf, torch.inf])
    y = torch.tensor([-1.5, 119.0, -1001.0, 1.0, -torch.inf, torch.inf])
    others = [(x, y), (y, x), (x, x + torch.nan)]
    agree(each([torch.logaddexp, torch.logaddexp2]), (torch.ones(6), torch.zeros(6)), *others)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_a_shift_to_the_left(dtype: torch.dtype) -> None:
    agree(each([lambda x: x << 3, lambda x: x << (x % 5)]), (torch.tensor([1, 2, 77], dtype=dtype),))


def test_an_angle_on_an_axis() -> None:
    """Zeros have signs: an angle jumps from pi to -pi where its axis is crossed."""
    ones, zeros = torch.ones(4), torch.tensor([0.0, -0.0, 0.0, -0.0])
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])
    nan = torch.full((4,), torch.nan)
    angles = [torch.atan2, lambda y, x: torch.complex(x, y).angle()]
    others = [(zeros, signs), (signs, zeros), (signs, signs.flip(0)), (zeros, ones), (nan, ones)]
    agree(each(angles), (ones, ones), *others)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_an_image_that_is_resized_with_antialiasing(mode: str) -> None:
    """A smooth one, on which the difference was too small to be taken for another model."""
    smooth = functional.interpolate(torch.rand(1, 2, 4, 5), size=(16, 20), mode="bicubic")
    sizes: list[dict[str, Any]] = [{"size": (7, 31)}, {"scale_factor": 0.4}, {"scale_factor": (1.7, 0.5)}]
    resized = [
        partial(functional.interpolate, mode=mode, antialias=True, align_corners=align_corners, **size)
        for align_corners in (False, True)
        for size in sizes
    ]
    agree(each(resized), (smooth,), (torch.rand(1, 2, 16, 20),))


WHOLE = torch.tensor([123_456_789, -123_456_791, 2**62 + 1, -7])
DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
}


def test_a_quotient_of_integers_that_float32_does_not_have() -> None:
    ten = torch.tensor(10)
    agree(lambda x: each(DIVISIONS.values())(x, ten), (WHOLE % 8,), (WHOLE,))


def test_a_quotient_of_an_integer_and_a_number() -> None:
    hows = [partial(torch.div, other=-10, rounding_mode=how) for how in ("floor", "trunc")]
    agree(each(hows), (WHOLE % 8,), (WHOLE,))


def test_a_quotient_that_rounding_takes_to_the_next_integer() -> None:
    """6 / 0.1 is 60, and 0.1 is more than a tenth: 59 of them fit in."""
    x = torch.tensor([6.0, 0.6, -0.3, 1.0, -6.0, 0.0])
    tenth, inf = torch.full((6,), 0.1), torch.full((6,), torch.inf)
    others = [(x, tenth), (x, -tenth), (x, inf), (x, -inf), (x, tenth * 0), (-x, tenth * 3)]
    divisions = [DIVISIONS[how] for how in ("floor", "//", "%")]
    agree(each(divisions), (torch.ones(6), torch.ones(6)), *others)


def test_the_rest_of_a_number() -> None:
    rests = [lambda x: x % 0.1, lambda x: torch.remainder(7.0, x)]
    agree(each(rests), (torch.ones(3),), (torch.tensor([6.0, -0.6, 0.1]),))


@pytest.mark.parametrize("lead", [(), (2,)], ids=["matrix", "matrices"])
def test_a_transposed_matrix_times_a_vector(lead: tuple[int, ...]) -> None:
    agree(lambda x, y: x.mT @ y, (torch.randn(*lead, 3, 6), torch.randn(3)))


CLASS_WEIGHT = torch.tensor([1.0, 2.0, 0.5])
LABELS = torch.tensor([0, 2, 1, 2])
REDUCTIONS = ("none", "mean", "sum")


def _entropies(**settings: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    return each([partial(functional.cross_entropy, reduction=how, **settings) for how in REDUCTIONS])


@pytest.mark.parametrize("weight", [None, CLASS_WEIGHT], ids=["plain", "weighted"])
def test_a_cross_entropy_of_smoothed_labels(weight: Tensor | None) -> None:
    """It was exported as one of plain labels, and differed by less than an export may."""
    scores = torch.randn(4, 3)
    smoothed = _entropies(label_smoothing=0.1, weight=weight, ignore_index=1)
    agree(smoothed, (scores, LABELS), (scores * 20, LABELS.flip(0)))
    agree(smoothed, (torch.randn(2, 3, 2), LABELS.reshape(2, 2)))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_cross_entropy_of_probabilities(smoothing: float) -> None:
    loss = _entropies(label_smoothing=smoothing, weight=CLASS_WEIGHT)
    for shape in ((4, 3), (2, 3, 2, 2), (3,)):
        agree(loss, (torch.randn(shape), torch.rand(shape)))


def test_a_cross_entropy_of_one_row() -> None:
    agree(_entropies(), (torch.randn(3), torch.tensor(2)), (torch.randn(3), torch.tensor(0)))


TABLE = torch.tensor([[0.5, -1.0], [2.0, 4.0], [-8.0, 0.25], [3.0, -6.0]])


def _bags(**settings: Any) -> list[Callable[..., Tensor]]:
    return [
        partial(functional.embedding_bag, weight=TABLE, mode=mode, padding_idx=index, **settings)
        for mode in ("sum", "mean", "max")
        for index in (None, 1)
    ]


def test_bags_of_embeddings() -> None:
    """Paddings are left out, which may be all of a bag."""
    agree(each(_bags()), (torch.tensor([[0, 2, 3], [1, 1, 1]]),), (torch.tensor([[1, 0, 1], [3, 3, 2]]),))


@pytest.mark.parametrize("last", [False, True])
def test_bags_of_embeddings_by_their_offsets(last: bool) -> None:
    """One of the bags is empty."""
    ragged = each([lambda x, offsets, bag=bag: bag(x, offsets=offsets) for bag in _bags(include_last_offset=last)])
    indices, offsets, others = torch.tensor([0, 2, 1, 1, 3]), torch.tensor([0, 2, 2, 5]), torch.tensor([0, 0, 1, 5])
    count = 3 + last
    agree(ragged, (indices, offsets[:count]), (indices.flip(0), others[:count]))


def test_bags_of_weighted_embeddings() -> None:
    bags = partial(functional.embedding_bag, weight=TABLE, mode="sum")
    agree(lambda x, y: bags(x, per_sample_weights=y), (torch.tensor([[0, 2], [1, 1]]), torch.rand(2, 2)))


def test_an_average_pool_with_a_divisor_of_its_own() -> None:
    pools = [
        lambda x: functional.avg_pool2d(x, (3, 2), padding=1, divisor_override=5),
        lambda x: functional.avg_pool3d(x, 2, stride=1, divisor_override=7),
    ]
    agree(each(pools), (torch.rand(2, 3, 6, 7),))


def test_values_are_clamped_to_several_constant_bounds() -> None:
    """Of which onnxscript's optimizer registers one alone."""
    bounds = [(torch.tensor(-1.0 - n), torch.tensor(0.5 + n)) for n in range(3)]

    def model(x: Tensor) -> Tensor:
        doubled = x * 2
        return torch.stack([doubled.clamp(low, high) for low, high in bounds])

    agree(model, (torch.randn(2, 8),), (2 * torch.randn(2, 8),))


def test_a_number_less_integers() -> None:
    """As 1.0 less a mask is."""
    mask = torch.tensor([[1, 0], [1, 1]])
    differences = [
        lambda mask: 1.0 - mask,
        lambda mask: 1.0 - mask.double(),
        lambda mask: (1.0 - mask.int()) * -10000,
        lambda mask: torch.rsub(mask, 1.5, alpha=2),
        lambda mask: 3 - mask,
    ]
    agree(each(differences), (mask,), (-mask,))


@pytest.mark.parametrize("x", [torch.linspace(-2, 4, 9), torch.arange(-2, 5)])
def test_one_bound_is_an_int_and_the_other_a_float(x: Tensor) -> None:
    """For which torch.onnx.export finds no overload of clamp."""
    agree(each([lambda x: x.clamp(0, 2.5), lambda x: x.clamp(-0.5, max=3), lambda x: x.clamp(min=-1, max=0.5)]), (x,))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_integers_are_rounded_already(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.5, -1, 0, 2.5, 7]).to(dtype)
    agree(each([torch.floor, torch.ceil, torch.round, torch.trunc, torch.relu]), (x,), (-x,))


def test_a_random_slope_is_its_mean_in_evaluation_mode() -> None:
    agree(torch.nn.RReLU(0.1, 0.3).eval(), (ROWS,), (-ROWS,))


def test_sums_of_booleans() -> None:
    x = torch.tensor([-1.0, 0.5, 2.0])
    sums = [
        lambda x: (x > 0) + (x < 1),
        lambda x: torch.add(x > 0, x < 1, alpha=2),
        lambda x: (x > 0) + True,
        lambda x: (x > 0) + 2,
        lambda x: (x > 0) + x,
        lambda x: x + (x > 0),
    ]
    agree(each(sums), (x,), (-x,))


def test_numbers_at_steps_that_are_fractions() -> None:
    x = torch.tensor([2.0])
    ranges = [(0, 0.6, 0.1), (0.6, 0, -0.1), (0.5, 3), (1, 1, 0.5), (0, 6, 2), (0, 1e-3, 1e-4)]
    made = [lambda x, at=at: x * torch.arange(*at) for at in ranges]
    typed = [lambda x, to=to: x * torch.arange(0, 0.6, 0.1, dtype=to) for to in (torch.float64, torch.float16)]
    integers = [lambda x: x.long() + torch.arange(0, 6.5, 1.5, dtype=torch.int64)]
    agree(each([*made, *typed, *integers]), (x,), (-x,))


def test_numbers_beside_float64_are_not_rounded_to_float32() -> None:
    x = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    functions = [
        lambda x: x * 0.1,
        lambda x: 0.1 - x,
        lambda x: x / 0.3,
        lambda x: 0.9999**x,
        lambda x: x.clamp(0.7, 2.1),
        lambda x: torch.where(x > 1.1, x, 0.1),
        lambda x: torch.full_like(x, 0.1),
        lambda x: x.lerp(x * 2, 0.1),
        lambda x: x.masked_fill(x > 1.1, 0.1),
        lambda x: torch.remainder(x, 0.3),
        lambda x: x.addcmul(x, x, value=0.1),
        lambda x: x.addcdiv(x, x + 1, value=0.1),
        lambda x: functional.hardtanh(x, 0.7, 2.1),
        lambda x: x.clone().fill_(0.1),
        torch.log2,
        torch.log10,
        torch.sinc,
    ]
    wanted = torch.stack([function(x) for function in functions])
    agree(lambda x, wanted: (torch.stack([function(x) for function in functions]) - wanted) * 1e8 + 1, (x, wanted))
