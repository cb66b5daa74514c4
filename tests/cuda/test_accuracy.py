"""Figures of how far a compiled model is from the original."""

from collections.abc import Mapping

import numpy as np
import pytest
from plans import cuda_plan

from nimblec.base.errors import CompileError
from nimblec.cuda import check

PROGRAM = cuda_plan().programs[0]


def _model(shift: float) -> check.Compute:
    def compute(inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        assert set(inputs) == {t.name for t in PROGRAM.inputs}
        return [np.array([4.0, 1.0 + shift, -2.0], np.float32) for _ in PROGRAM.outputs]

    return compute


def test_the_largest_and_the_mean_difference_are_told() -> None:
    sentences = list(check.report(PROGRAM, _model(0.0), _model(0.04), None))
    assert len(sentences) == len(PROGRAM.outputs)
    assert "at most 0.01, 0.0033 on average" in sentences[0]
    assert repr(PROGRAM.outputs[0].name) in sentences[0]


def test_the_error_of_fp16_is_told_beside() -> None:
    sentences = list(check.report(PROGRAM, _model(0.0), _model(0.4), None, fp16=_model(0.04)))
    assert sentences[0].endswith("at most 0.1, 0.033 on average, of its largest magnitude (fp16: 0.01, 0.0033)")


def test_a_difference_above_the_limit_is_refused() -> None:
    assert list(check.report(PROGRAM, _model(0.0), _model(0.04), 0.02))
    with pytest.raises(CompileError, match=r"--max-error allows 0\.005: use -O0"):
        list(check.report(PROGRAM, _model(0.0), _model(0.04), 0.005))


@pytest.mark.parametrize(
    ("expected", "found", "told"),
    [
        ([4.0, -np.inf, np.nan], [4.0, -np.inf, np.nan], "at most 0, 0 on average"),
        ([4.0, -np.inf, 1.0], [4.0, -np.inf, 1.04], "at most 0.01, 0.005 on average"),
        ([4 + 1j], [4 + 1.08j], "at most 0.02, 0.01 on average"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_infinities_and_complex_numbers_have_a_mean(expected: list, found: list, told: str) -> None:
    runs = ([np.array(numbers) for _ in PROGRAM.outputs] for numbers in (expected, found))
    original, changed = (lambda _, run=run: run for run in runs)
    assert all(told in sentence for sentence in check.report(PROGRAM, original, changed, None))


def test_nan_is_no_small_difference() -> None:
    with pytest.raises(CompileError, match="inf"):
        list(check.report(PROGRAM, _model(0.0), _model(float("nan")), 0.5))


def test_equal_runs_have_no_spread() -> None:
    run = _model(0.0)({t.name: np.zeros(1) for t in PROGRAM.inputs})
    assert check.spread(run, run) == 0.0
    assert check.spread(run, [a * 2 for a in run]) == 1.0
