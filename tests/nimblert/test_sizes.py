"""Calls of sizes that no program of a plan is for."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import plans
import pytest
from sized_plans import sized

import nimblert
from nimblec.plan import encoder
from nimblert.arrays import layouts
from nimblert.calls.sizes import Sizes
from nimblert.check import verify
from nimblert.check.verify import read_plan
from nimblert.cpu.backend import CpuBackend, CpuCall, CpuLoaded
from nimblert.cpu.host_memory import HostWorking
from nimblert.errors import InputError
from nimblert.executable import Executable
from nimblert.plan import Fit, Memset, Plan, Pointer, Program, Region, Target, Tensor

SIZES = (2, 4, 8)


@pytest.fixture
def executable() -> Iterator[Executable]:
    with nimblert.load(sized(*SIZES)) as executable:
        yield executable


def drawn(rows: int) -> dict[str, np.ndarray]:
    """Draw inputs of so many rows."""
    numbers = np.arange(1, 3 * rows + 1, dtype=np.int32)
    return {"x": numbers.reshape(rows, 3), "w": -numbers[: 2 * rows].reshape(2, rows)}


def test_an_empty_input_has_the_largest_size(executable: Executable) -> None:
    x, w = executable.empty_input("x"), executable.empty_input("w")
    assert (x.shape, w.shape, x.dtype) == ((8, 3), (2, 8), np.int32)
    for name, array in drawn(5).items():
        head = {"x": x, "w": w}[name][tuple(map(slice, array.shape))]
        head[...] = array
    expected = executable(**drawn(5))
    assert all(map(np.array_equal, executable(x[:5], w[:, :5]), expected))


def runs(rows: int, fit: Fit = Fit.SPLIT) -> list[int] | None:
    """Return the sizes of the programs that a call of so many rows takes."""
    served = Sizes(sized(*SIZES, fit=fit).programs).serve(((rows, 3), (2, rows)))
    return None if served is None else [dict(part.program.profile)["rows"] for part, *_ in served.runs]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        *((1, [2]), (3, [4]), (5, [8]), (7, [8]), (9, [8, 2]), (12, [8, 4]), (13, [8, 8])),
        *((40, [8] * 5), (1002, [8] * 125 + [2]), (0, None)),
    ],
)
def test_the_smallest_program_that_covers_a_call_else_parts_of_it(rows: int, expected: list[int] | None) -> None:
    assert runs(rows) == expected


def test_a_dimension_that_is_only_padded_is_not_split() -> None:
    assert runs(7, Fit.PADDED) == [8]
    assert runs(9, Fit.PADDED) is None
    assert runs(7, Fit.EXACT) is None


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 8, 9, 13, 31, 999])
def test_every_size_gives_what_was_asked_for(executable: Executable, rows: int) -> None:
    given = drawn(rows)
    y, z = executable(**given)
    np.testing.assert_array_equal(y, given["x"])
    np.testing.assert_array_equal(z, given["w"])
    assert y.flags.owndata
    assert y.base is None or y.base.nbytes == y.nbytes


@pytest.mark.parametrize("rows", [2, 3, 13])
def test_outputs_go_into_arrays_of_the_caller(executable: Executable, rows: int) -> None:
    out = {"z": np.zeros((2, rows + 5), np.int32)[:, :rows]}
    given = drawn(rows)
    results = executable.run(given, out=out)
    assert list(results) == ["y", "z"]
    assert results["z"] is out["z"]
    np.testing.assert_array_equal(out["z"], given["w"])
    np.testing.assert_array_equal(results["y"], given["x"])
    with pytest.raises(InputError, match=rf"out 'y': shape \(4, 3\), expected \({rows}, 3\)"):
        executable.run(given, out={"y": np.zeros((4, 3), np.int32)})


def test_a_call_of_several_runs_writes_over_no_input_that_it_still_reads(executable: Executable) -> None:
    room = np.arange(42, dtype=np.int32).reshape(14, 3)
    given = {**drawn(13), "x": room[:13]}
    with pytest.raises(InputError, match=r"out 'y': shares memory with an input, .* a call is 2 runs: give it memory"):
        executable.run(given, out={"y": room[1:]})
    assert np.array_equal(executable.run({**drawn(4), "x": room[:4]}, out={"y": room[1:5]})["y"][0], [0, 1, 2])


def test_a_call_of_several_runs_without_memory_for_its_outputs(
    executable: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", full)
        with pytest.raises(InputError, match="outputs: a new array needs more memory than there is: none left: give"):
            executable.run(drawn(13))
    assert np.array_equal(executable.run(drawn(13))["y"], drawn(13)["x"])


def test_outputs_beside_those_in_out_without_memory(executable: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def copy(self) -> None:
            raise MemoryError("none left")

    monkeypatch.setattr(CpuCall, "_filled", lambda _: [("y", Full())])
    with pytest.raises(InputError, match="outputs: a new array needs more memory than there is: none left: give"):
        executable.run(drawn(4), out={"z": np.zeros((2, 4), np.int32)})


@pytest.mark.parametrize(("rows", "own"), [(3, 4), (6, 5), (6, 4)])
def test_memory_of_a_program_takes_no_other_output(rows: int, own: int) -> None:
    """That of a padded run, of the first of several, and of the last."""
    with nimblert.load(sized(4, 5)) as executable:
        room = executable.run(drawn(own), reuse_outputs=True)["y"].reshape(-1)
        with pytest.raises(InputError, match="out 'z': shares memory with what 'y' is written into: give it memory of"):
            executable.run(drawn(rows), out={"z": room[: 2 * rows].reshape(2, rows)})


@pytest.mark.parametrize(("rows", "own"), [(6, 5), (6, 4)])
def test_a_call_of_several_runs_reads_no_memory_that_it_writes(rows: int, own: int) -> None:
    """That of a program for the first run, and for the last."""
    with nimblert.load(sized(4, 5)) as executable:
        room = executable.run(drawn(own), reuse_outputs=True)["y"].reshape(-1)
        w = room[: 2 * rows].reshape(2, rows)
        with pytest.raises(InputError, match=r"input 'w': shares memory with what 'y' is written into, .* 2 runs"):
            executable.run({**drawn(rows), "w": w})
        copied = w.copy()
        np.testing.assert_array_equal(executable.run({**drawn(3), "w": w[:, :3]})["z"], copied[:, :3])
        np.testing.assert_array_equal(executable.run({**drawn(rows), "w": copied})["z"], copied)


@pytest.mark.parametrize("rows", [3, 4, 6])
def test_a_refused_array_for_an_output_leaves_the_last_run_as_it_was(rows: int) -> None:
    with nimblert.load(sized(4, 5)) as executable:
        room = executable.run(drawn(4), reuse_outputs=True)["y"].reshape(-1)
        executable.run(drawn(5))
        with pytest.raises(InputError, match="out 'z': shares memory"):
            executable.run(drawn(rows), out={"z": room[: 2 * rows].reshape(2, rows)})
        executable.replay()
        y = executable.plan.programs[1].outputs[0]
        assert executable.read(y.pointer, 60).tobytes() == drawn(5)["x"].tobytes()


def test_more_runs_than_there_is_memory_for_are_a_sentence(executable: Executable) -> None:
    rows = 1 << 50
    given = {"x": np.broadcast_to(np.int32(1), (rows, 3)), "w": np.broadcast_to(np.int32(1), (2, rows))}
    with pytest.raises(InputError, match=r"^outputs: a new array needs more memory than there is: .*: give one as"):
        executable.run(given)
    with pytest.raises(InputError, match=rf"a call would be {rows // 8} runs$"):
        next(executable.steps(given))


def test_a_call_of_many_runs_is_remembered_in_little_memory() -> None:
    sizes = Sizes(sized(*SIZES).programs)
    tracemalloc.start()
    try:
        sizes.serve(((100_000, 3), (2, 100_000)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_outputs_may_be_views_of_the_memory_of_the_program(executable: Executable) -> None:
    first = executable.run(drawn(3), reuse_outputs=True)["y"]
    assert np.shares_memory(first, executable.run(drawn(4), reuse_outputs=True)["y"])
    assert first.shape == (3, 3)


@pytest.mark.parametrize(("sample_range", "fill"), [(None, 0), ((-1, 1), 0), ((5, 9), 5), ((-9, -5), -9)])
def test_what_lies_beyond_a_call_is_filled(sample_range: tuple[int, int] | None, fill: int) -> None:
    with nimblert.load(sized(4, 8, sample_range=sample_range), poison=True) as executable:
        for rows in (8, 3):  # what an earlier call left there goes, too
            executable.run(drawn(rows))
        (x, w) = (
            executable.read(Pointer(region=Region.INPUT, index=index, offset=0), nbytes).view(np.int32)
            for index, nbytes in ((0, 48), (1, 32))
        )
    expected = np.full((4, 3), fill)
    expected[:3] = drawn(3)["x"]
    np.testing.assert_array_equal(x.reshape(4, 3), expected)
    np.testing.assert_array_equal(w.reshape(2, 4)[:, 3], [fill, fill])
    np.testing.assert_array_equal(w.reshape(2, 4)[:, :3], drawn(3)["w"])


@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 5, 2), (2, 5, 4), (3, 1, 1), (0, 5, 4)])
def test_the_rest_of_a_view_is_filled_and_nothing_else(shape: tuple[int, ...]) -> None:
    tensor = np.full((3, 5, 4)[: len(shape)], -1, np.int32)
    array = np.arange(1, 1 + np.prod(shape), dtype=np.int32).reshape(shape)
    layouts.place(tensor, array, 7)
    expected = np.full_like(tensor, 7)
    expected[tuple(map(slice, shape))] = array
    np.testing.assert_array_equal(tensor, expected)


def test_a_call_of_several_runs_is_not_repeated(executable: Executable) -> None:
    executable.run(drawn(9))
    sentence = "split into 2 runs, of which only the last could be repeated: call again, or give sizes that one run"
    for again in (executable.replay, executable.launch):
        with pytest.raises(InputError, match=sentence):
            again()
    executable.run(drawn(3))
    executable.replay()


def test_one_run_after_a_call_of_several_is_repeated(executable: Executable) -> None:
    given = drawn(4)
    for one_run in (lambda: list(executable.steps(given)), lambda: executable.profile(given)):
        executable.run(drawn(9))
        one_run()
        executable.replay()
    executable.run(drawn(9))
    executable.bind("x", given["x"])
    executable.launch()
    expected = executable.run({"w": given["w"]})
    assert len(expected) == len(executable.outputs)


def test_single_steps_are_of_one_program(executable: Executable) -> None:
    given = drawn(3)
    assert len(list(executable.steps(given))) == 2
    assert len(executable.profile(given)) == 2
    sentence = "'rows' is 9 at axis 0, and 'main' has programs for rows=2, 4, 8: give 1 to 8; a call would be 2 runs$"
    with pytest.raises(InputError, match=sentence):
        next(executable.steps(drawn(9)))


def test_what_no_program_serves_is_a_sentence(executable: Executable) -> None:
    for x, w, sentence in (
        ((3, 4), (2, 3), r"input 'x': shape \(3, 4\), expected \(rows, 3\)$"),
        ((3, 3), (2, 5), "input 'w': 'rows' is 5 at axis 1, and 3 at axis 0 of input 'x': give both the same size$"),
        ((3, 3, 1), (2, 3), r"input 'x': shape \(3, 3, 1\), expected \(rows, 3\)$"),
        ((0, 3), (2, 0), "input 'x': 'rows' is 0 at axis 0, and 'main' has programs for rows=2, 4, 8: give 1 to 8$"),
    ):
        with pytest.raises(InputError, match=sentence):
            executable.run({"x": np.zeros(x, np.int32), "w": np.zeros(w, np.int32)})


def test_one_program_alone_serves_its_size_alone() -> None:
    with nimblert.load(sized(*SIZES), program="main[rows=4]") as executable:
        executable.run(drawn(4))
        with pytest.raises(InputError, match=r"input 'x': shape \(3, 3\), expected \(4, 3\)"):
            executable.run(drawn(3))


def test_programs_are_loaded_when_they_are_called_or_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    backend = CpuLoaded.backend

    def noted(self: CpuLoaded, program: Program, working: HostWorking, *, poison: bool) -> CpuBackend:
        loaded.append(dict(program.profile)["rows"])
        return backend(self, program, working, poison=poison)

    monkeypatch.setattr(CpuLoaded, "backend", noted)
    with nimblert.load(sized(*SIZES)) as executable:
        executable.run(drawn(7))
        assert loaded == [2, 8]
    loaded.clear()
    with nimblert.load(sized(*SIZES), warm=True) as executable:
        assert loaded == [2, 4, 8]
        executable.run(drawn(7))
        assert loaded == [2, 4, 8]


def test_fits_are_kept_in_the_file() -> None:
    plan = sized(*SIZES, fit=Fit.PADDED)
    assert read_plan(encoder.encode_file(plan)) == plan


def reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return replace(tensor, shape=shape, strides=(shape[1], 1))


def of_programs(plan: Plan, **changes: object) -> Plan:
    """Return the plan with fields of all programs replaced, by functions of a program."""
    programs = (replace(p, **{name: change(p) for name, change in changes.items()}) for p in plan.programs)  # type: ignore[operator]
    return replace(plan, programs=tuple(programs))


def test_fits_that_the_shapes_contradict_are_refused() -> None:
    plan = sized(*SIZES)
    state = Memset(stream=0, op=0, dst=plans.pointer(Region.STATE), value=0, element_nbytes=1, count=1)
    twice = of_programs(
        plan,
        inputs=lambda p: (p.inputs[0], reshaped(p.inputs[1], (1, 2 * p.inputs[1].shape[1]))),
    )
    for changed, sentence in (
        (of_programs(plan, fits=lambda _: ()), None),
        (of_programs(plan, fits=lambda _: (Fit.SPLIT, Fit.EXACT)), "fits: 2, expected one for each of 1 dimensions"),
        (of_programs(plan, profile=lambda p: (("rows", p.profile[0][1] + 1),)), "fits: rows=3 is SPLIT, and no axis"),
        (twice, "fits: rows=2 is SPLIT, and no axis of an input is 'rows' in all programs alike"),
        (of_programs(twice, fits=lambda _: (Fit.EXACT,)), None),
        (
            of_programs(plan, outputs=lambda p: (p.outputs[0], reshaped(p.outputs[1], (2, 2)))),
            "fits: 'rows' is SPLIT, expected one axis of it in each output",
        ),
        (
            of_programs(plan, outputs=lambda p: (p.outputs[0], reshaped(p.outputs[1], 2 * (p.profile[0][1],)))),
            "fits: 'rows' is SPLIT, expected one axis of it in each output",
        ),
        (
            replace(
                of_programs(plan, commands=lambda p: (*p.commands, state)),
                state_nbytes=64,
                state=(plans.weight("kept", (0.0,) * 16, 0),),
            ),
            "fits: 'rows' is SPLIT, and the program writes the state",
        ),
        (  # scratch memory of kernels
            replace(
                of_programs(plan, commands=lambda p: (*p.commands, state)),
                target=Target.CUDA,
                state_nbytes=64,
                state=(plans.weight("", (0.0,) * 16, 0),),
            ),
            None,
        ),
    ):
        found = list(verify.problems(changed))
        assert (found == []) if sentence is None else any(sentence in problem for problem in found), found


def test_only_inputs_are_masks() -> None:
    plan = of_programs(sized(2, fit=Fit.EXACT), outputs=lambda p: tuple(replace(t, mask=True) for t in p.outputs))
    assert list(verify.problems(plan)) == [f"programs[0].outputs[{i}].mask: only inputs are masks" for i in range(2)]


def test_a_mask_is_padded_with_0_whatever_numbers_it_was_seen_to_have() -> None:
    tensor = sized(2, sample_range=(5, 9)).programs[0].inputs[0]
    assert layouts.filling(tensor) == 5
    assert layouts.filling(replace(tensor, mask=True)) == 0


def test_a_size_of_nothing_serves_nothing_else() -> None:
    assert any("rows=0 is SPLIT" in problem for problem in verify.problems(sized(0, 2)))
    served = Sizes(sized(0, 2, fit=Fit.EXACT).programs).serve(((5, 3), (2, 5)))
    assert served is None


def test_dimensions_that_only_vary_together_are_told_by_their_sizes() -> None:
    def along(p: object) -> tuple[tuple[str, int], ...]:
        rows = dict(p.profile)["rows"]  # type: ignore[attr-defined]
        return (("rows", rows), ("same", rows))

    plan = of_programs(sized(2, 4), profile=along, fits=lambda _: (Fit.SPLIT, Fit.SPLIT))
    assert any("'rows' in all programs alike" in problem for problem in verify.problems(plan))
