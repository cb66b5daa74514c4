"""Ranges of inputs whose least number, with which smaller inputs are padded, is none of their dtype."""

from dataclasses import replace

import numpy as np
import pytest
from hostile_plans import refusal
from sized_plans import sized

import nimblert
from nimblert.plan import ITEM_NBYTES, Fit, Plan, Program


def padded(dtype: str, low: int, high: int) -> Plan:
    """Return a plan for 4 and 8 rows that pads smaller inputs, which are integers of a range."""
    plan = sized(4, 8, fit=Fit.PADDED)

    def program(old: Program) -> Program:
        inputs = tuple(replace(tensor, dtype=dtype, sample_range=(low, high)) for tensor in old.inputs)
        outputs = tuple(replace(tensor, dtype=dtype) for tensor in old.outputs)
        input_nbytes, output_nbytes = (
            tuple(nbytes // 4 * ITEM_NBYTES[dtype] for nbytes in sizes)
            for sizes in (old.input_nbytes, old.output_nbytes)
        )
        commands = tuple(replace(copy, nbytes=nbytes) for copy, nbytes in zip(old.commands, input_nbytes, strict=True))
        return replace(
            old,
            inputs=inputs,
            outputs=outputs,
            input_nbytes=input_nbytes,
            output_nbytes=output_nbytes,
            commands=commands,
        )

    return replace(plan, programs=tuple(map(program, plan.programs)))


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("uint8", 300, 400),
        ("int8", -1000, -500),
        ("bool", 5, 9),
        ("uint64", -5, -1),
        ("float16", 1 << 62, 1 << 62),
        ("complex64", 1, 2),
    ],
)
def test_verify_refuses_range_outside_of_dtype(dtype: str, low: int, high: int) -> None:
    found = refusal(padded(dtype, low, high)).split("; ")
    assert len(found) == 4
    assert all(f".sample_range: {low} to {high}, expected " in sentence for sentence in found)


@pytest.mark.parametrize(("dtype", "low"), [("uint8", 255), ("int8", -128), ("bool", 1), ("int64", -(1 << 63))])
def test_load_pads_with_extremes_of_dtype(dtype: str, low: int) -> None:
    with nimblert.load(padded(dtype, low, low)) as model:
        x, w = np.full((3, 3), low, dtype), np.full((2, 3), low, dtype)
        assert np.array_equal(model.run({"x": x, "w": w})["y"], x)
