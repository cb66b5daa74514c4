"""The golden record: frozen inputs, digests, samples and the three verdicts."""

import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from programs import planned

from nimblert import golden
from nimblert.golden import Comparison, Verdict
from nimblert.plan import Pointer, Program, Region, Tensor


def tensor(name: str, dtype: str, shape: tuple[int, ...], sample_range: tuple[int, int] | None = None) -> Tensor:
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    place = Pointer(region=Region.INPUT)
    return Tensor(name=name, dtype=dtype, shape=shape, strides=strides, pointer=place, sample_range=sample_range)


def program(*inputs: Tensor) -> Program:
    return replace(planned(), inputs=inputs)


def test_the_inputs_of_a_seed_never_change() -> None:
    """Values written down once: a plan's golden record outlives numpy's releases."""
    inputs = golden.draw_inputs(
        program(tensor("x", "float32", (2, 2)), tensor("ids", "int64", (6,), (0, 99)), tensor("mask", "bool", (8,))),
        seed=7,
    )
    assert inputs["x"].tobytes().hex() == "5c0f23bd9698ba3ea1ba293fcb8ecc3e"
    assert inputs["ids"].tolist() == [57, 12, 28, 96, 56, 24]
    assert inputs["mask"].astype(int).tolist() == [1, 0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_floats_are_standard_normal_in_their_dtype(dtype: str) -> None:
    values = golden.draw_inputs(program(tensor("x", dtype, (64, 64))), seed=0)["x"]
    assert (values.dtype.name, values.shape) == (dtype, (64, 64))
    wide = values.astype(np.complex128)
    assert abs(wide.real.mean()) < 0.05
    assert abs(wide.real.std() - 1) < 0.05


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_fill_their_sample_range_and_nothing_else(dtype: str) -> None:
    drawn = golden.draw_inputs(program(tensor("a", dtype, (99,), (3, 5)), tensor("b", dtype, (99,))), seed=1)
    assert {value.dtype.name for value in drawn.values()} == {dtype}
    assert set(drawn["a"].tolist()) == {3, 4, 5}
    assert set(drawn["b"].tolist()) == {0, 1}


def test_the_widest_integer_ranges_can_be_drawn() -> None:
    low, high = -(2**63), 2**63 - 1
    drawn = golden.draw_inputs(
        program(tensor("a", "int64", (50,), (low, high)), tensor("b", "uint64", (50,), (0, high))), seed=1
    )
    assert drawn["a"].min() < 0 < drawn["a"].max()
    assert drawn["b"].max() > 2**60


def test_every_input_has_a_stream_of_its_own() -> None:
    x, y = tensor("x", "float32", (5,)), tensor("y", "float32", (5,))
    both = golden.draw_inputs(program(x, y), seed=3)
    assert not np.array_equal(both["x"], both["y"])
    longer = golden.draw_inputs(program(tensor("x", "float32", (9,)), y), seed=3)
    assert np.array_equal(longer["y"], both["y"])


def test_all_64_bits_of_the_seed_count() -> None:
    x = program(tensor("x", "float64", ()))
    drawn = [golden.draw_inputs(x, seed)["x"].item() for seed in (0, 1, 1 << 32, (1 << 64) - 1)]
    assert len(set(drawn)) == 4


def test_digest_sees_values_in_c_order_not_memory_layout() -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    assert golden.digest(array) == golden.digest(np.asfortranarray(array)) == golden.digest(array.copy())
    assert golden.digest(array) != golden.digest(array.T)


@pytest.mark.parametrize(
    "array", [np.float32(2.5), np.zeros((3, 0)), np.array([1, 2], ml_dtypes.bfloat16), np.array([True])]
)
def test_digest_takes_scalars_empty_arrays_and_every_dtype(array: np.ndarray) -> None:
    assert len(golden.digest(np.asarray(array))) == 32


def test_samples_are_evenly_spaced_and_include_both_ends() -> None:
    assert golden.samples(np.arange(5)) == (0, 1, 2, 3, 4)
    many = golden.samples(np.arange(1000))
    assert (len(many), many[0], many[-1]) == (64, 0, 999)
    assert {round(b - a) for a, b in itertools.pairwise(many)} <= {15, 16}
    assert golden.samples(np.array(3.5)) == (3.5,)
    assert golden.samples(np.zeros((0, 4))) == ()
    assert golden.samples(np.array([1 + 2j, 3 + 4j])) == (1, 2, 3, 4)
    assert golden.samples(np.array([1.5, 2], ml_dtypes.bfloat16)) == (1.5, 2.0)


OUTPUT = np.linspace(-8, 8, 500, dtype=np.float32)


def compare(
    actual: np.ndarray, *, expected: np.ndarray = OUTPUT, tolerance: float = 0, rounding: float = 0
) -> Comparison:
    (result,) = golden.check(golden.record(0, [expected], tolerance), [actual], rounding=rounding)
    return result


def test_equal_bits_are_bit_exact() -> None:
    result = compare(OUTPUT.copy())
    assert (result.verdict, result.difference, str(result)) == (Verdict.BIT_EXACT, 0, "bit-exact")


@pytest.mark.parametrize("allow", [{"tolerance": 1e-4}, {"rounding": 1e-4}])
def test_golden_tolerance_must_be_allowed(allow: dict[str, float]) -> None:
    near = OUTPUT.copy()
    near[-1] += 4e-4
    assert compare(near).verdict is Verdict.DIFFERENT
    result = compare(near, **allow)
    assert result.verdict is Verdict.WITHIN_TOLERANCE
    assert result.difference == pytest.approx(4e-4 / 8, rel=0.01)
    assert str(result) == "within tolerance (5e-05 of the largest magnitude, 0.0001 allowed)"


def test_a_large_difference_is_different_and_says_how_large() -> None:
    far = OUTPUT.copy()
    far[0] = 0
    result = compare(far, tolerance=1e-4)
    assert (result.verdict, result.difference) == (Verdict.DIFFERENT, 1.0)


def test_bits_that_differ_between_samples_are_seen() -> None:
    result = compare(np.where(np.arange(500) == 1, np.float32(0), OUTPUT))
    assert result.verdict is Verdict.DIFFERENT
    assert str(result) == "different, though the sampled values agree"


def test_nan_agrees_with_nan_only() -> None:
    nan = np.array([np.nan, 1, 2], dtype=np.float32)
    other_bits = np.array([-np.nan, 1, 2], dtype=np.float32)
    assert compare(other_bits, expected=nan, tolerance=1e-3).verdict is Verdict.WITHIN_TOLERANCE
    finite = compare(np.array([0, 1, 2], dtype=np.float32), expected=nan, tolerance=1e-3)
    assert (finite.verdict, finite.difference) == (Verdict.DIFFERENT, math.inf)


def test_another_number_of_elements_is_different() -> None:
    assert compare(np.zeros(3), expected=np.zeros(4), tolerance=0.5).difference == math.inf


def test_golden_differs_without_warning() -> None:
    actual = np.array([-1.7e308])
    recorded = golden.GoldenOutput(sha256=bytes(32), samples=(1.7e308,))
    (compared,) = golden.check(golden.Golden(seed=0, tolerance=1e9, outputs=(recorded,)), [actual])
    assert compared.verdict is Verdict.DIFFERENT
    assert compared.difference == math.inf
