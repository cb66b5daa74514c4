"""The common part of measuring processes: weights, inputs and errors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench import reference

MODEL = """
import torch
def half():
    return torch.nn.Linear(4, 3).half(), (torch.randn(2, 4).half(),)
"""


def test_seeded_repeats_weights_and_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_of_two.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    first, (x,), _ = reference.seeded("model_of_two:half")
    torch.rand(5)
    second, (y,), _ = reference.seeded("model_of_two:half")
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(x, y)


def test_error_is_relative_to_the_largest_magnitude() -> None:
    right = [np.array([1.0, -4.0]), np.array([100.0])]
    assert reference.error([np.array([1.5, -4.0], np.float16), np.array([101.0], np.float16)], right) == 0.125
    assert reference.error(right, right) == 0


def test_error_of_a_nan_is_infinite() -> None:
    right = [np.ones(2), np.ones(2)]
    assert reference.error([right[0], np.array([np.nan, 1.0])], right) == np.inf


def test_floats_finds_floating_outputs_in_containers() -> None:
    outputs = {"a": (torch.ones(2, dtype=torch.bfloat16), torch.arange(3)), "b": torch.ones(1, dtype=torch.float64)}
    assert [(array.dtype, array.shape) for array in reference.floats(outputs)] == [
        (np.dtype(np.float32), (2,)),
        (np.dtype(np.float64), (1,)),
    ]


def test_host_arrays_are_in_c_order() -> None:
    image = torch.randn(1, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last)
    first, second = reference.host_arrays(((image,), {"tokens": torch.arange(3)}))
    assert first.flags.c_contiguous
    assert str(first.dtype) == "bfloat16"
    assert np.array_equal(first.astype(np.float32), image.float().numpy())
    assert second.tolist() == [0, 1, 2]
