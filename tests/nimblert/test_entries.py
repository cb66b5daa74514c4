"""Plans of several entries and profiles: what they may be, and which program a call takes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import plans
import pytest
from command_line import CommandLine
from kept_state import KEEP, OUTPUT, STATE, copying, keeping

import nimblert
from nimblec.plan import encoder
from nimblert.calls.entries import Signature
from nimblert.check import verify
from nimblert.check.verify import read_plan
from nimblert.errors import InputError, PlanInvalidError
from nimblert.executable import Executable
from nimblert.plan import Plan


def changed(index: int, **changes: object) -> Callable[[Plan], Plan]:
    """Replace fields of one program of a plan."""

    def change(plan: Plan) -> Plan:
        programs = list(plan.programs)
        programs[index] = replace(programs[index], **changes)
        return replace(plan, programs=tuple(programs))

    return change


def test_a_plan_of_several_entries_is_sound() -> None:
    plan = plans.several_entries()
    assert list(verify.problems(plan)) == []
    assert {name: len(programs) for name, programs in plan.entries.items()} == {"main": 2, "tail": 1}
    assert read_plan(encoder.encode_file(plan)) == plan


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            changed(2, entry="main", profile=(("batch", 4),)),
            "programs[2].profile: batch=4, as programs[0] of the same entry",
        ),
        (changed(2, entry="main"), "programs[2]: takes or gives other tensors than programs[0], which is of the"),
        (
            changed(2, entry="main", profile=(("batch", 8),)),
            "programs[2].inputs: have the shapes of programs[0], which is of the same entry",
        ),
        (changed(1, outputs=()), "programs[1]: takes or gives other tensors than programs[0]"),
        (changed(1, profile=(("rows", 2),)), "programs[1]: takes or gives other tensors than programs[0]"),
    ],
)
def test_programs_that_a_call_cannot_tell_apart_are_refused(change: Callable[[Plan], Plan], sentence: str) -> None:
    found = list(verify.problems(change(plans.several_entries())))
    assert [problem for problem in found if problem.startswith(sentence)], found


def test_the_arena_is_that_of_the_largestprogram() -> None:
    assert changed(1, arena_nbytes=1 << 20)(plans.several_entries()).arena_nbytes == 1 << 20


def test_memory_is_counted_over_all_programs() -> None:
    plan = plans.several_entries()
    passed = sum(sum(p.input_nbytes) + sum(p.output_nbytes) for p in plan.programs)
    needed = plan.state_nbytes + plan.arena_nbytes + passed
    assert list(verify.problems(plan, nimblert.Limits(memory_nbytes=needed))) == []
    (sentence,) = verify.problems(plan, nimblert.Limits(memory_nbytes=needed - 1))
    assert sentence.startswith(f"memory: {needed} bytes, the limit is {needed - 1}")


@pytest.fixture
def loaded() -> Iterator[Executable]:
    with nimblert.load(encoder.encode_file(keeping()), poison=True) as executable:
        yield executable


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_entries_are_called_by_name_and_share_the_state(loaded: Executable) -> None:
    assert loaded.entries == ("write", "read")
    assert loaded(entry="read").tolist() == [1, 2, 3, 4]
    assert loaded(floats(5, 6, 7, 8), entry="write").tolist() == [5, 6, 7, 8]
    assert loaded.entry("read")().tolist() == [5, 6, 7, 8]
    assert loaded.run({"x": floats(9, 9, 9, 9)}, entry="write").keys() == {"y"}
    assert loaded.entry("read").run({})["y"].tolist() == [9, 9, 9, 9]


def test_the_shapes_choose_the_program(loaded: Executable) -> None:
    write = loaded.entry("write")
    assert [program.name for program in write.programs] == ["write[count=4]", "write[count=2]"]
    assert [tensor.name for tensor in write.inputs] == ["x"]
    assert write(floats(7, 8)).tolist() == [7, 8]
    assert loaded(entry="read").tolist() == [7, 8, 3, 4]
    loaded.replay()
    message = "'count' is 3 at axis 0, and 'write' has programs for count=2, 4: give one of these, or compile with"
    with pytest.raises(InputError, match=message):
        write(floats(1, 2, 3))


def test_an_entry_must_be_named_where_none_is_main(loaded: Executable) -> None:
    for ask in (loaded, loaded.entry, lambda: loaded.program, lambda: loaded.inputs):
        with pytest.raises(InputError, match=r"no entry is named, the plan has \['write', 'read'\]: name one"):
            ask()
    with pytest.raises(InputError, match=r"entry 'head': not found, the plan has \['write', 'read'\]"):
        loaded.entry("head")


def test_main_is_meant_where_there_is_one() -> None:
    plan = keeping()
    renamed = tuple(replace(p, entry="main") if p.entry == "read" else p for p in plan.programs)
    with nimblert.load(replace(plan, programs=renamed)) as executable:
        assert executable().tolist() == [1, 2, 3, 4]
        assert executable.entry().name == "main"


def test_one_program_may_be_loaded_alone() -> None:
    with nimblert.load(keeping(), program="read") as executable:
        assert executable.entries == ("read",)
        assert executable().tolist() == [1, 2, 3, 4]
    with pytest.raises(InputError, match=r"program 'head': not found, the plan has \['write\[count=4\]', "):
        nimblert.load(keeping(), program="head")


def test_steps_and_reads_are_of_the_program_that_runs(loaded: Executable) -> None:
    read = [loaded.read(STATE, 8).view(np.float32).tolist() for _ in loaded.steps({"x": floats(7, 8)}, entry="write")]
    assert read == [[1, 2], [7, 8], [7, 8]]
    with pytest.raises(InputError, match=r"12 bytes at 0 lie outside OUTPUT\(0\) \(8 bytes\)"):
        loaded.read(OUTPUT, 12)


def test_hazards_of_every_program_are_found_when_it_is_loaded() -> None:
    plan = keeping()
    racing = replace(
        plan.programs[1],
        stream_count=2,
        commands=(plan.programs[1].commands[0], *(replace(c, stream=1) for c in plan.programs[1].commands[1:])),
    )
    with pytest.raises(PlanInvalidError, match="nothing orders"):
        nimblert.load(replace(plan, programs=(plan.programs[0], racing, plan.programs[2])))


def test_many_profiles_are_not_all_listed() -> None:
    programs = [copying("write", count, KEEP, (("count", count),)) for count in range(1, 40)]
    signature = Signature("write", programs)
    assert signature.serve_at_once([floats(*range(39))]) is programs[-1]
    with pytest.raises(InputError, match=r"for count=1, 2, 3, 4, 5, 6, \.\.\., 39: give one of these"):
        signature.serve_at_once([floats(*range(40))])


# --- on the command line


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "keeping.plan"
    encoder.write(keeping(), path)
    return path


def test_an_entry_is_run_by_its_name(nimblec: CommandLine, kept: Path, tmp_path: Path) -> None:
    assert "[1. 2. 3. 4.]" in nimblec("run", kept, "--entry", "read").out
    assert "entry 'head': not found, the plan has ['write', 'read']" in nimblec.refused("run", kept, "--entry", "head")
    assert "no entry is named" in nimblec.refused("run", kept)
    np.save(tmp_path / "two.npy", floats(3, 4))
    assert "[3. 4.]" in nimblec("run", kept, "--entry", "write", "--input", f"x={tmp_path / 'two.npy'}").out
    assert "drawn from seed 0: x" in nimblec("run", kept, "--entry", "write").out


def test_inspect_shows_entries_and_profiles(nimblec: CommandLine, kept: Path) -> None:
    programs = json.loads(nimblec("inspect", kept, "--json").out)["programs"]
    assert [(program["entry"], program["profile"], program["role"]) for program in programs] == [
        ("write", {"count": 4}, "entry"),
        ("write", {"count": 2}, "entry"),
        ("read", {}, "entry"),
    ]
    assert "Program 'write[count=2]'" in nimblec("inspect", kept).out
    assert nimblec("inspect", kept, "--timeline").out.count("stream") >= 3


def test_verify_checks_every_program(nimblec: CommandLine, kept: Path) -> None:
    out = nimblec.prints("verify", kept)
    for program in keeping().programs:
        assert f"golden of {program.name!r}: the plan holds no golden record" in out


def test_traces_and_graphs_have_every_program(nimblec: CommandLine, kept: Path, tmp_path: Path) -> None:
    nimblec.prints("inspect", kept, "--chrome-trace", tmp_path / "trace.json", "--dot", tmp_path / "graph.dot")
    for file in ("trace.json", "graph.dot"):
        text = (tmp_path / file).read_text()
        assert all(program.name in text for program in keeping().programs)
