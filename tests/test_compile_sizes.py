"""Plans for several sizes of named dimensions, from the compiler to a run."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from command_line import CommandLine
from cpu_plans import floats, write_model
from onnx import NodeProto, TensorProto, helper
from sized_models import (
    UNLIKE_ROWS,
    attention,
    largest_under_a_mask,
    products_of_rows,
    rows_model,
    unlike_rows,
)
from sized_modules import TOKENS, Averaging, Previous, encoder, images
from torch import Tensor, nn

import nimblec
import nimblert
from nimblec import compile as compile_model
from nimblec.base.errors import ArgumentError, CompileError
from nimblec.base.options import read_options, read_sizes
from nimblec.padding.fits import differences
from nimblec.padding.trials import Trial
from nimblec.plan.encoder import write
from nimblert.check.verify import read_plan
from nimblert.plan import Fit, Program

node = helper.make_node


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


@pytest.mark.parametrize("other", ["4", "4,8"])
def test_a_dimension_of_several_sizes_is_given_once(nimblec: CommandLine, tmp_path: Path, other: str) -> None:
    model = rows_model(tmp_path / "rows.onnx")
    refused = nimblec.refused("compile", model, "-o", tmp_path / "p", "--dim", "batch=1,2", "--dim", f"batch={other}")
    assert "--dim batch: given twice; give all of its sizes at once, such as batch=1,2,4" in refused


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


def test_a_dimension_without_a_name_gets_one(nimblec: CommandLine, tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["x", "unk"], ["y"], axis=1)]
    inputs = [floats("x", None, 3), floats("unk", "unk__3", 1)]  # as skl2onnx and tf2onnx write it
    model, path = write_model(tmp_path / "rows.onnx", nodes, inputs, [floats("y", None, 4)]), tmp_path / "rows.plan"
    named = ("--input", "x:rows,3", "--input", "unk:rows,1:float32")
    done = nimblec("compile", model, "-o", path, "--target", "cpu", *named, "--dim", "rows=1..4")
    assert done.status == 0, done.err
    session = onnxruntime.InferenceSession(model)
    with nimblert.load(path) as executable:
        for rows in (1, 3, 4, 9):
            draws = np.random.default_rng(rows)
            arrays = {name: draws.random((rows, n), np.float32) for name, n in (("x", 3), ("unk", 1))}
            np.testing.assert_array_equal(executable(**arrays), session.run(None, arrays)[0])


@pytest.mark.parametrize("model", [nn.Linear(3, 2), Path("m.pt2")])
def test_a_dimension_of_a_module_gets_no_name_there(tmp_path: Path, model: nn.Module | Path) -> None:
    if isinstance(model, Path):
        model = tmp_path / model
        torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.ones(1, 3),)), model)
    given = (torch.ones(1, 3),) if isinstance(model, nn.Module) else None
    with pytest.raises(CompileError, match=r"^--input input: 'n' is no size, and only dimensions of an ONNX model get"):
        nimblec.compile(model, given, target="cpu", inputs={"input": ("n", 3)})


def test_an_input_that_fixes_the_dimension_is_refused(tmp_path: Path) -> None:
    model = rows_model(tmp_path / "rows.onnx")
    with pytest.raises(CompileError, match="inputs have the same shapes for batch=1 and batch=2: give one size for"):
        nimblec.compile(model, target="cpu", dims={"batch": (1, 2)}, inputs={"x": (3, 8)})


def test_an_example_bounds_integers_at_every_size(tmp_path: Path) -> None:
    plan = nimblec.compile(
        rows_model(tmp_path / "rows.onnx"),
        target="cpu",
        dims={"batch": (1, 2)},
        examples={"x": np.zeros((5, 8), np.float32)},
    )
    assert [program.inputs[0].shape for program in plan.programs] == [(1, 8), (2, 8)]


@pytest.mark.parametrize("what", UNLIKE_ROWS)
def test_runs_find_out_which_sizes_a_program_serves(tmp_path: Path, what: str) -> None:
    model = unlike_rows(tmp_path / "rows.onnx", what)
    plan = nimblec.compile(model, target="cpu", dims={"batch": (1, 2, 8)})
    expected = Fit[UNLIKE_ROWS[what][1].upper()]
    assert {fit for program in plan.programs for fit in program.fits} == {expected}
    session = onnxruntime.InferenceSession(model)
    with nimblert.load(plan) as executable:
        for rows in (1, 2, 3, 7, 8, 9, 29):
            x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
            served = rows in {1, 2, 8} or (rows < 8 and expected >= Fit.PADDED) or expected is Fit.SPLIT
            if served:
                np.testing.assert_allclose(executable(x), session.run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)
            else:
                with pytest.raises(nimblert.InputError, match="'main' has programs for batch=1, 2, 8: give"):
                    executable(x)


def centred(path: Path, *divided: NodeProto) -> Path:
    """Write a model of a vector without its mean, which no padding leaves alone."""
    nodes = [node("ReduceMean", ["x"], ["m"], keepdims=1), node("Sub", ["x", "m"], ["y"]), *divided]
    return write_model(path, nodes, [floats("x", "n")], [floats("y", "n")], constants={"pairs": np.array([-1, 2])})


def test_range_has_a_program_for_every_size_that_cannot_be_padded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = centred(tmp_path / "model.onnx")
    plan = nimblec.compile(model, target="cpu", dims={"n": "3..10"}, plan_cache=tmp_path / "plans")
    assert [dict(program.profile)["n"] for program in plan.programs] == [*range(3, 11)]
    assert "every size of a range has a program, since calls cannot be padded" in caplog.messages
    with nimblert.load(plan) as executable:
        x = np.arange(7, dtype=np.float32)
        np.testing.assert_allclose(executable(x), x - x.mean(), rtol=1e-5)
    sizes = {"n": (4, 6)}
    assert len(nimblec.compile(model, target="cpu", dims=sizes, plan_cache=None).programs) == 2, "a list is no range"


@pytest.mark.parametrize(("given", "count"), [("1..200", 9), ("2..16", 4)])
def test_range_has_powers_of_two_where_more_do_not_fit(tmp_path: Path, given: str, count: int) -> None:
    """There is room for 128 programs, and no odd size fits a model of pairs."""
    pairs = (node("Reshape", ["x", "pairs"], ["z"]),) if given == "2..16" else ()
    model = centred(tmp_path / "model.onnx", *pairs)
    assert len(nimblec.compile(model, target="cpu", dims={"n": given}, plan_cache=None).programs) == count


def test_an_output_with_two_axes_of_a_dimension_is_padded_and_not_split(tmp_path: Path) -> None:
    plan = nimblec.compile(products_of_rows(tmp_path / "rows.onnx"), target="cpu", dims={"batch": (2, 4)})
    assert {fit for program in plan.programs for fit in program.fits} == {Fit.PADDED}
    with nimblert.load(plan) as executable:
        for rows in (1, 2, 3, 4):
            x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
            np.testing.assert_allclose(executable(x), x @ x.T, rtol=1e-5, atol=1e-6)
        with pytest.raises(nimblert.InputError, match="'main' has programs for batch=2, 4: give 1 to 4"):
            executable(np.ones((6, 4), np.float32))


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin", "ReduceSum"])
def test_zeros_that_a_mask_leaves_may_not_be_the_most_or_the_least(tmp_path: Path, operator: str) -> None:
    model = largest_under_a_mask(tmp_path / "masked.onnx", operator)
    plan = nimblec.compile(model, target="cpu", dims={"length": (2, 4, 8)}, pad_masks="mask")
    expected = Fit.PADDED if operator == "ReduceSum" else Fit.EXACT
    assert {fit for program in plan.programs for fit in program.fits} == {expected}


ROWS = floats("x", "batch", 4)
MEAN = node("ReduceMean", ["x", "zeros"], ["mean"])


@pytest.mark.parametrize(
    ("nodes", "given"),
    [
        (
            [
                node("Cast", ["i"], ["x"], to=1),
                node("Neg", ["x"], ["negative"]),
                node("ReduceMax", ["negative"], ["largest"]),
                node("Relu", ["largest"], ["m"]),
                node("Add", ["x", "m"], ["y"]),
            ],
            [("i", TensorProto.INT64, ("batch", 4))],
        ),
        (
            [
                MEAN,
                node("Relu", ["a"], ["positive"]),
                node("Mul", ["positive", "mean"], ["m"]),
                node("Add", ["x", "m"], ["y"]),
            ],
            [ROWS, floats("a", 1)],
        ),
        (
            [MEAN, node("Greater", ["a", "one"], ["is_mean"]), node("Where", ["is_mean", "mean", "x"], ["y"])],
            [ROWS, ("a", TensorProto.INT64, (1,))],
        ),
        (
            [
                node("Shape", ["x"], ["count"], end=1),
                node("Squeeze", ["count"], ["end"]),
                node("Range", ["zero", "end", "one"], ["places"]),
                node("Mod", ["places", "two"], ["odd"]),
                node("Cast", ["odd"], ["numbers"], to=1),
                node("Unsqueeze", ["numbers", "ones"], ["column"]),
                node("Add", ["x", "column"], ["y"]),
            ],
            [ROWS],
        ),
    ],
    ids=["negative integers", "a number of either sign", "an integer beyond 1", "the parity of its place"],
)
def test_rows_that_are_alone_only_sometimes_are_not_split(
    tmp_path: Path, nodes: list[NodeProto], given: list[Any]
) -> None:
    constants = {"zero": np.array(0), "one": np.array(1), "two": np.array(2)}
    constants |= {"zeros": np.array([0]), "ones": np.array([1])}
    used = {name for of in nodes for name in of.input}
    constants = {name: array for name, array in constants.items() if name in used}
    model = write_model(tmp_path / "rows.onnx", nodes, given, [floats("y", "batch", 4)], constants=constants)
    plan = nimblec.compile(model, target="cpu", dims={"batch": (2, 4, 8)})
    assert Fit.SPLIT not in {fit for program in plan.programs for fit in program.fits}


@pytest.mark.parametrize(("axis", "expected"), [(1, Fit.SPLIT), (0, Fit.EXACT)])
def test_floats_may_be_indices(tmp_path: Path, axis: int, expected: Fit) -> None:
    """As Keras writes them; large ones lie outside of the table."""
    nodes = [
        node("Cast", ["x"], ["indices"], to=TensorProto.INT64),
        node("Gather", ["table", "indices"], ["rows"]),
        node("ReduceMean", ["rows", "axis"], ["mean"]),
        node("Sub", ["rows", "mean"], ["y"]),
    ]
    constants = {"table": np.arange(20, dtype=np.float32), "axis": np.array([axis])}
    model = write_model(tmp_path / "rows.onnx", nodes, [ROWS], [floats("y", "batch", 4)], constants=constants)
    plan = nimblec.compile(model, target="cpu", dims={"batch": (2, 4)})
    assert {fit for program in plan.programs for fit in program.fits} == {expected}


@pytest.mark.parametrize("dtype", ["FLOAT", "BOOL"])
def test_an_input_may_have_no_axes(tmp_path: Path, dtype: str) -> None:
    nodes = [node("Cast", ["a"], ["factor"], to=1), node("Mul", ["x", "factor"], ["y"])]
    given = [ROWS, ("a", getattr(TensorProto, dtype), ())]
    model = write_model(tmp_path / "rows.onnx", nodes, given, [floats("y", "batch", 4)])
    plan = nimblec.compile(model, target="cpu", dims={"batch": (2, 4)})
    assert {fit for program in plan.programs for fit in program.fits} == {Fit.SPLIT}


@pytest.mark.parametrize("dtype", ["INT64", "FLOAT"])
def test_an_additive_mask_may_be_of_floats(tmp_path: Path, dtype: str) -> None:
    nodes = [
        node("Cast", ["mask"], ["m"], to=1),
        node("Sub", ["one", "m"], ["hidden"]),
        node("Mul", ["hidden", "low"], ["bias"]),
        node("Add", ["x", "bias"], ["scores"]),
        node("Softmax", ["scores"], ["p"], axis=1),
        node("Mul", ["p", "x"], ["z"]),
        node("ReduceSum", ["z"], ["y"]),
    ]
    given = [floats("x", 1, "length"), ("mask", getattr(TensorProto, dtype), (1, "length"))]
    constants = {"one": np.array(1, np.float32), "low": np.array(-10000, np.float32)}
    model = write_model(tmp_path / "mask.onnx", nodes, given, [floats("y", 1, 1)], constants=constants)
    plan = nimblec.compile(model, target="cpu", dims={"length": (2, 4, 8)}, pad_masks="mask")
    assert {fit for program in plan.programs for fit in program.fits} == {Fit.PADDED}


@pytest.fixture(scope="module")
def rows_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the plan file of `rows_model` for 1, 2 and 8 rows."""
    folder = tmp_path_factory.mktemp("rows")
    plan = nimblec.compile(rows_model(folder / "rows.onnx"), target="cpu", dims={"batch": (1, 2, 8)})
    plan.save(folder / "rows.plan")
    return folder / "rows.plan"


@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_run_and_bench_draw_any_size(nimblec: CommandLine, rows_plan: Path, rows: int, tmp_path: Path) -> None:
    done = nimblec("run", rows_plan, "--dim", f"batch={rows}")
    assert f"float32 {rows}x4" in done.out, done.err
    np.save(tmp_path / "x.npy", np.zeros((rows, 8), np.float32))
    assert f"float32 {rows}x4" in nimblec("run", rows_plan, "--input", f"x={tmp_path / 'x.npy'}").out
    done = nimblec("bench", rows_plan, "--dim", f"batch={rows}", "--warm-up", "0", "--duration", "0.05")
    assert done.status == 0, done.err


def test_a_dimension_to_run_is_one_of_the_plans(nimblec: CommandLine, rows_plan: Path, tmp_path: Path) -> None:
    refused = nimblec.refused("run", rows_plan, "--dim", "rows=3")
    assert refused == "--dim rows: 'main' has no dimension of that name; the names are 'batch'"
    model, plan = rows_model(tmp_path / "m.onnx"), tmp_path / "m.plan"
    assert nimblec("compile", model, "--dim", "batch=2", "--target", "cpu", "-o", plan).status == 0
    refused = nimblec.refused("run", plan, "--dim", "batch=2")
    assert refused == "--dim batch: 'main' is for one size: leave --dim out"
    assert "expected a size such as 4" in nimblec.refused("run", rows_plan, "--dim", "batch=1,2")
    refused = nimblec.refused("run", rows_plan, "--dim", "batch=3", "--dim", "batch=2")
    assert refused == "--dim batch: given twice, 3 and 2; give it once"
    np.save(tmp_path / "x.npy", np.zeros((3, 8), np.float32))
    refused = nimblec.refused("run", rows_plan, "--dim", "batch=2", "--input", f"x={tmp_path / 'x.npy'}")
    assert refused == "--dim batch: 2, and input 'x' has the size 3"
    assert "'main' has programs for batch=1" in nimblec.refused("run", rows_plan, "--dim", "batch=0")
    refused = nimblec.refused("run", rows_plan, "--dim", "batch=9", "--repeat", "2")
    assert refused.startswith("the call before was split into 2 runs")


def test_inspect_lists_the_sizes(nimblec: CommandLine, rows_plan: Path) -> None:
    out = nimblec("inspect", rows_plan).out
    (line,) = [line for line in out.splitlines() if "1, 2, 8" in line]
    assert line.split() == ["main", "batch", "1,", "2,", "8", "padded,", "larger", "ones", "split"]
    programs = json.loads(nimblec("inspect", rows_plan, "--json").out)["programs"]
    assert [program["fits"] for program in programs] == [{"batch": "split"}] * 3


def test_runs_compare_each_pair_of_programs_once(rows_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of neighbours, on the first elements, on those from the second, and on the last."""
    compared: Counter[tuple[object, ...]] = Counter()
    compare = Trial._agrees_with

    def counted(trial: Trial, small: Program, large: Program, *how: Any) -> bool:
        compared[small.name, large.name, *how] += 1
        return compare(trial, small, large, *how)

    monkeypatch.setattr(Trial, "_agrees_with", counted)
    assert list(differences(read_plan(rows_plan))) == []
    assert sorted(compared.values()) == [1] * 6


def test_verify_repeats_the_runs(nimblec: CommandLine, rows_plan: Path, tmp_path: Path) -> None:
    agree = "ok       padding: runs that are padded or split give what the programs of those sizes give"
    assert agree in nimblec("verify", rows_plan).out
    model = unlike_rows(tmp_path / "m.onnx", "less the mean of all")
    plan = compile_model(model, target="cpu", dims={"batch": (1, 4)})
    plan.save(tmp_path / "exact.plan")
    done = nimblec("verify", tmp_path / "exact.plan")
    assert "skipped  padding: the programs serve no sizes but their own" in done.out
    lying = tuple(replace(program, fits=(Fit.SPLIT,)) for program in plan.programs)
    write(replace(plan, programs=lying), tmp_path / "lying.plan")
    done = nimblec("verify", tmp_path / "lying.plan")
    assert done.status == 2
    assert "FAILED   padding: program 'main[batch=1]': batch is SPLIT, and runs show EXACT" in done.out


EXAMPLES = {"tokens": np.arange(1, 32)[None], "mask": np.ones((1, 31), np.int64)}


def test_a_sequence_is_padded_under_a_mask(tmp_path: Path) -> None:
    model = attention(tmp_path / "attention.onnx")
    plan = nimblec.compile(
        model,
        target="cpu",
        dims={"batch": (1, 4), "length": (4, 8, 16)},
        examples=EXAMPLES,
        pad_masks="mask",
    )
    assert {program.fits for program in plan.programs} == {(Fit.SPLIT, Fit.PADDED)}
    session = onnxruntime.InferenceSession(model)
    with nimblert.load(plan) as executable:
        for batch, length in ((1, 1), (1, 16), (3, 5), (4, 9), (2, 16), (4, 8), (6, 7), (13, 3)):
            generator = np.random.default_rng(100 * batch + length)
            given = {
                "tokens": generator.integers(1, 32, (batch, length)),
                "mask": generator.integers(0, 2, (batch, length)) | (np.arange(length) == 0),
            }
            for found, expected in zip(executable(**given), session.run(None, given), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(nimblert.InputError, match="'main' has programs for length=4, 8, 16: give 1 to 16"):
            executable(tokens=np.ones((1, 17), np.int64), mask=np.ones((1, 17), np.int64))


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_sequence_is_not_padded_where_none_is_named(tmp_path: Path, is_masked: bool) -> None:
    model = attention(tmp_path / "attention.onnx", is_masked=is_masked)
    examples = {name: EXAMPLES[name] for name in ("tokens", "mask")[: 1 + is_masked]}
    sizes = {"batch": (1, 4), "length": (4, 8)}
    plan = nimblec.compile(model, target="cpu", dims=sizes, examples=examples)
    assert {program.fits for program in plan.programs} == {(Fit.SPLIT, Fit.EXACT)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_masks": "mask"}, "--pad-mask mask: needs a dimension of several sizes, such as --dim NAME=1,8"),
        ({"pad_masks": 3}, "pad_masks: 3, expected names of inputs"),
        ({"pad_masks": "y", "dims": {"batch": (1, 2)}}, r"--pad-mask y: is not one of the model's inputs \['x'\]"),
    ],
)
def test_masks_that_are_none_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, CompileError), match=message):
        nimblec.compile(rows_model(tmp_path / "rows.onnx"), target="cpu", **options)


def test_any_batch_of_a_network_from_one_plan() -> None:
    module, inputs, shapes = images()
    given: dict[str, Any] = {"target": "cpu", "dynamic_shapes": shapes}
    plan = nimblec.compile(module, inputs, dims={"batch": "1..16"}, **given)
    assert [dict(p.profile)["batch"] for p in plan.programs] == [1, 2, 4, 8, 16]
    assert plan.arena_nbytes == plan.programs[-1].arena_nbytes
    static = {n: nimblec.compile(module, inputs, dims={"batch": n}, **given) for n in (8, 16)}
    assert plan.weights_nbytes == static[16].weights_nbytes
    x = torch.randn(60, 3, 16, 16)
    with torch.no_grad(), nimblert.load(plan) as executable:
        for rows in (*range(1, 17), 40, 60):
            np.testing.assert_allclose(executable(x[:rows].numpy()), module(x[:rows]).numpy(), rtol=1e-4, atol=1e-5)
        for size, alone in static.items():
            with nimblert.load(alone) as program:
                for rows in (size - 3, size):
                    padded = np.zeros((size, 3, 16, 16), np.float32)
                    padded[:rows] = x[:rows]
                    np.testing.assert_array_equal(executable(x[:rows].numpy()), program(padded)[:rows])


def test_any_length_of_an_encoder_from_one_plan() -> None:
    module, inputs, shapes = encoder()
    plan = nimblec.compile(
        module,
        inputs,
        target="cpu",
        dynamic_shapes=shapes,
        dims={"batch": (1, 4), "length": "8..16"},
        pad_masks="attention_mask",
        examples={"tokens": np.arange(TOKENS)[None]},
    )
    assert {program.fits for program in plan.programs} == {(Fit.SPLIT, Fit.PADDED)}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), nimblert.load(plan) as executable:
        for length in range(1, 17):
            batch = length % 6 + 1
            tokens = torch.randint(TOKENS, (batch, length), generator=generator)
            mask = torch.randint(2, (batch, length), generator=generator)
            mask[:, 0] = 1
            found = executable(tokens.numpy(), mask.numpy())
            for output, expected in zip(found, module(tokens, mask), strict=True):
                np.testing.assert_allclose(output, expected.numpy(), rtol=1e-4, atol=1e-5)
        with pytest.raises(nimblert.InputError, match="'main' has programs for length=8, 16: give 1 to 16"):
            executable(np.ones((1, 17), np.int64), np.ones((1, 17), np.int64))


def test_an_exported_program_names_its_dimensions_by_symbols(nimblec: CommandLine, tmp_path: Path) -> None:
    module, inputs, shapes = images()
    program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "images.pt2")
    (symbol,) = map(str, program.range_constraints)
    done = nimblec(
        "compile", tmp_path / "images.pt2", "-o", tmp_path / "m.plan", "--target", "cpu", "--dim", f"{symbol}=1,4"
    )
    assert done.status == 0, done.err
    assert f"note: {symbol}: calls of sizes between are padded, larger ones split" in done.out
    with torch.no_grad(), nimblert.load(tmp_path / "m.plan") as executable:
        np.testing.assert_allclose(executable(inputs[0].numpy()), module(*inputs).numpy(), rtol=1e-4, atol=1e-5)


def test_plans_of_several_sizes_compute_what_those_of_one_do() -> None:
    """Angles have PyTorch's signs, and torch 2.11 exports a parameter times a number."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(4))

        def forward(self, y: Tensor, x: Tensor) -> Tensor:
            return torch.atan2(y, x) + self.turn * 2

    module, inputs = Turned().eval(), (torch.ones(2, 4), torch.ones(2, 4))
    shapes = ({0: torch.export.Dim("batch", max=8)},) * 2
    plan = nimblec.compile(module, inputs, target="cpu", dynamic_shapes=shapes, dims={"batch": (2, 4)})
    y, x = torch.tensor([[0.0, -0.0, 0.0, -0.0]] * 2), torch.tensor([[1.0, 1.0, -1.0, -1.0]] * 2)
    with torch.no_grad(), nimblert.load(plan) as executable:
        np.testing.assert_allclose(executable(y.numpy(), x.numpy()), module(y, x).numpy(), rtol=1e-6)


def test_what_has_no_names_for_several_sizes_is_refused() -> None:
    module, inputs, shapes = images()
    with pytest.raises(CompileError, match=r"--dim batch: only an ONNX model and .*, or in Python dynamic_shapes"):
        nimblec.compile(module, inputs, target="cpu", dims={"batch": (1, 2)})
    with pytest.raises(CompileError, match=r"--dim rows: .* no dynamic dimension of that name; the names are .batch."):
        nimblec.compile(module, inputs, target="cpu", dims={"rows": (1, 2)}, dynamic_shapes=shapes)
    with pytest.raises(CompileError, match="batch is 100, and was exported for 1 to 64"):
        nimblec.compile(module, inputs, target="cpu", dims={"batch": (1, 100)}, dynamic_shapes=shapes)
    with pytest.raises(ArgumentError, match="dynamic_shapes: only a module or a function takes them"):
        nimblec.compile("m.onnx", target="cpu", dynamic_shapes=shapes)
    with pytest.raises(CompileError, match=r"give --dim batch=<size>, in Python dims=\{'batch': <size>\}"):
        nimblec.compile(module, inputs, target="cpu", dynamic_shapes=shapes)


class _OfFour(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        """Apply a layer to four rows."""
        return super().forward(x.T)


@pytest.mark.parametrize(
    ("module", "rows", "sentence"),
    [
        (nn.Linear(4, 2).eval(), 1, "the dimension batch is 1 in the example, .*: give an example of 2 or more$"),
        (_OfFour(4, 2), 4, "the dimension batch can only be 4, since the model's code makes it so"),
    ],
)
def test_a_dimension_that_torch_takes_for_fixed(module: nn.Module, rows: int, sentence: str) -> None:
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    with pytest.raises(CompileError, match=sentence):
        nimblec.compile(module, (torch.ones(rows, 4),), target="cpu", dims={"batch": "1..64"}, dynamic_shapes=shapes)


class _Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each state of a loop in Python, and the last."""
        states = [x.new_zeros(x.shape[1], 3)]
        for step in range(x.shape[0]):
            states.append(self.cell(x[step], states[-1]))
        return torch.stack(states), states[-1]


def test_size_fixed_by_code_is_exported_alone(caplog: pytest.LogCaptureFixture) -> None:
    module, example = _Running().eval(), torch.randn(3, 2, 4)
    shapes = ({0: torch.export.Dim("steps", min=2, max=64), 1: torch.export.Dim("batch", min=1, max=64)},)
    given: dict[str, Any] = {"target": "cpu", "streams": 1, "dynamic_shapes": shapes}
    with caplog.at_level("INFO"):
        plan = nimblec.compile(module, (example,), dims={"steps": (2, 5), "batch": (1, 2)}, **given)
    refused = "steps, batch: calls of other sizes than the plan's are refused, since the module's code fixes one"
    assert refused in caplog.text
    with nimblert.load(plan) as executable, torch.no_grad():
        for steps, rows in ((2, 1), (5, 2)):
            x = torch.randn(steps, rows, 4)
            for found, expected in zip(executable(x.numpy()), module(x), strict=True):
                np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)
        with pytest.raises(nimblert.InputError, match="'main' has programs for steps=2, 5: give one"):
            executable(np.zeros((3, 1, 4), np.float32))
    with pytest.raises(CompileError, match=r"give --dim steps=<size> --dim batch=<size>"):
        nimblec.compile(module, (example,), **given)


class _Top(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Return the three largest."""
        return x.topk(3, 1).values


def test_the_sizes_that_torch_suggests_are_in_the_refusal() -> None:
    shapes = ({1: torch.export.Dim("seq", min=2, max=64)},)
    with pytest.raises(CompileError) as refused:
        nimblec.compile(_Top(), (torch.ones(3, 5),), target="cpu", dims={"seq": (4, 8)}, dynamic_shapes=shapes)
    said = str(refused.value)
    assert said.startswith("the module: torch.export refuses it: Constraints violated (seq): Not all values of seq = ")
    assert said.endswith("; Suggested fixes: seq = Dim('seq', min=3, max=64)")
    assert "TORCH_LOGS" not in said


def test_recurrence_of_lengths_serves_sizes_between(tmp_path: Path) -> None:
    """The example has lengths that a padded call of one step cannot have."""
    draws = np.random.default_rng(0)
    weights = {name: draws.standard_normal((2, 16, size)).astype(np.float32) for name, size in (("w", 3), ("r", 4))}
    lstm = node("LSTM", ["x", "w", "r", "", "lengths"], ["y", "h", "c"], hidden_size=4, direction="bidirectional")
    inputs = [floats("x", "steps", 2, 3), ("lengths", TensorProto.INT32, (2,))]
    outputs = [floats("y", "steps", 2, 2, 4), floats("h", 2, 2, 4), floats("c", 2, 2, 4)]
    model = write_model(tmp_path / "lstm.onnx", [lstm], inputs, outputs, constants=weights)
    examples = {"lengths": np.array([2, 2], np.int32)}
    plan = nimblec.compile(model, target="cpu", dims={"steps": (2, 4, 8)}, examples=examples)
    session = onnxruntime.InferenceSession(model)
    with nimblert.load(plan) as executable:
        for steps in (1, 2, 5, 8):
            x = draws.standard_normal((steps, 2, 3)).astype(np.float32)
            given = {"x": x, "lengths": np.array([steps, max(steps - 2, 1)], np.int32)}
            for found, expected in zip(executable.run(given).values(), session.run(None, given), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class _OfAll(nn.Module):
    """Each row less what all rows of integers, or bools, have in common."""

    def __init__(self, common: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.common = common

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Map any number of rows."""
        return x - self.common(ids).float()


_INTEGERS, _BOOLS = torch.arange(8).reshape(2, 4), torch.ones(2, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("common", "ids"),
    [(torch.max, _INTEGERS), (torch.min, _INTEGERS), (torch.any, _BOOLS), (torch.all, _BOOLS)],
)
def test_what_all_rows_have_in_common_is_seen_and_told(
    common: Callable[[Tensor], Tensor], ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    given = torch.rand(2, 4), ids
    batch = {0: torch.export.Dim("batch")}
    with caplog.at_level("INFO"):
        plan = nimblec.compile(
            _OfAll(common), given, target="cpu", dims={"batch": (1, 2)}, dynamic_shapes=(batch, batch)
        )
    refused = "batch: calls of other sizes than the plan's are refused, since "
    assert re.search(rf"{refused}Reduce(Max|Min) '\w+' computes across batch", caplog.text)
    assert {program.fits for program in plan.programs} == {(Fit.EXACT,)}


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_programs_of_all_sizes_share_the_state(target: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Averaging().eval(), torch.rand(2, 4)
    shapes = {"x": {0: torch.export.Dim("batch")}}
    options: dict[str, Any] = {"target": target, "precision": "fp32", "plan_cache": None}
    with caplog.at_level("INFO"):
        plan = nimblec.compile(model, (x,), dims={"batch": (1, 2, 8)}, dynamic_shapes=shapes, **options)
    assert "batch: calls of other sizes than the plan's are refused, since a run writes the state" in caplog.text
    assert sorted(tensor.name for tensor in plan.state) == ["count", "mean"]
    assert not model.count
    with nimblert.load(plan) as executable, torch.no_grad():
        for calls, rows in enumerate((1, 8, 2, 2, 1), 1):
            given = torch.rand(rows, 4)
            np.testing.assert_allclose(executable(given.numpy()), model(given).numpy(), rtol=1e-5, atol=1e-6)
            assert executable.state["count"] == calls
        np.testing.assert_allclose(executable.state["mean"], model.mean.numpy(), rtol=1e-5, atol=1e-6)
        with pytest.raises(nimblert.InputError, match="'main' has programs for batch=1, 2, 8: give one"):
            executable(np.zeros((3, 4), np.float32))


def test_a_state_of_the_size_of_a_dimension_is_refused() -> None:
    shapes = {"x": {0: torch.export.Dim("batch")}}
    with pytest.raises(CompileError, match=r"dimension batch cannot .* the state 'previous' of fixed shape \(2, 4\)"):
        nimblec.compile(Previous(), (torch.ones(2, 4),), target="cpu", dims={"batch": (1, 2)}, dynamic_shapes=shapes)
