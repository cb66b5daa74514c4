"""Plans for several sizes of named dimensions, from the compiler to a run."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from command_line import CommandLine
from sized_models import rows_model

import nimblec
import nimblert
from nimblec.errors import ArgumentError, CompileError
from nimblec.options import read_options, read_sizes


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (4, (4,)),
        ("4", (4,)),
        ("8,1,2", (1, 2, 8)),
        ((2, 1), (1, 2)),
        ("1..16", (1, 2, 4, 8, 16)),
        ("3..20", (3, 4, 8, 16, 20)),
        ("1..100", (1, 2, 4, 8, 16, 32, 64, 100)),
    ],
)
def test_sizes_are_a_list_or_a_range(given: object, sizes: tuple[int, ...]) -> None:
    assert read_sizes(given) == sizes


@pytest.mark.parametrize("given", [(), "", "1..", "0..4", "4..2", "1,1", 1.5, "1..2..3"])
def test_what_are_no_sizes_is_refused(given: object) -> None:
    with pytest.raises(ArgumentError):
        read_sizes(given)


def test_profiles_are_the_combinations_and_their_number_is_bounded() -> None:
    options = read_options(dims={"batch": (1, 2), "rows": 3, "length": "4..8"})
    assert options.dims == (("rows", 3),)
    assert options.profiles == tuple((("batch", batch), ("length", length)) for batch in (1, 2) for length in (4, 8))
    with pytest.raises(ArgumentError, match="dims: 12 x 11 sizes make 132 programs, expected at most 128"):
        read_options(dims={"batch": range(12), "length": range(1, 12)})


def test_one_plan_runs_every_size_that_was_asked_for(nimblec: CommandLine, tmp_path: Path) -> None:
    model, path = rows_model(tmp_path / "rows.onnx"), tmp_path / "rows.plan"
    done = nimblec("compile", model, "-o", path, "--target", "cpu", "--dim", "batch=1,2,8")
    assert done.status == 0, done.err
    session = onnxruntime.InferenceSession(model)
    with nimblert.load(path) as executable:
        assert [p.profile for p in executable.plan.programs] == [(("batch", n),) for n in (1, 2, 8)]
        assert len(executable.plan.weights) == 1
        for rows in (2, 8, 1):
            x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
            np.testing.assert_array_equal(executable(x), session.run(None, {"x": x})[0])


def test_an_input_that_fixes_the_dimension_is_refused(tmp_path: Path) -> None:
    model = rows_model(tmp_path / "rows.onnx")
    with pytest.raises(CompileError, match="inputs have the same shapes for batch=1 and batch=2: where --input fixes"):
        nimblec.compile(model, target="cpu", dims={"batch": (1, 2)}, inputs={"x": (3, 8)})


def test_an_example_bounds_integers_at_every_size(tmp_path: Path) -> None:
    plan = nimblec.compile(
        rows_model(tmp_path / "rows.onnx"),
        target="cpu",
        dims={"batch": (1, 2)},
        examples={"x": np.zeros((5, 8), np.float32)},
    )
    assert [program.inputs[0].shape for program in plan.programs] == [(1, 8), (2, 8)]
