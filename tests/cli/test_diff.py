"""diff and explain on plan files."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from command_line import CommandLine
from onnx import numpy_helper
from parsed_models import compiled
from plans import cpu_plan, cuda_plan, several_entries, weight

from nimblec.plan import encoder
from nimblert.plan import GoldenOutput, Plan

ROOT = Path(__file__).parents[2]
Write = Callable[[str, Plan], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a plan as NAME.plan."""

    def written(name: str, plan: Plan) -> Path:
        encoder.write(plan, tmp_path / f"{name}.plan")
        return tmp_path / f"{name}.plan"

    return written


def cuda(**fields: object) -> Plan:
    """Return `cuda_plan` with other fields in its program."""
    return replace(cuda_plan(), programs=(replace(cuda_plan().programs[0], **fields),))


def slower(factor: float) -> Plan:
    """Return `cuda_plan` with a run that took longer."""
    record = cuda_plan().programs[0].schedule
    assert record is not None
    first, kept = record.candidates
    return cuda(
        schedule=replace(record, candidates=(first, replace(kept, duration_ns=round(factor * kept.duration_ns))))
    )


def golden(value: float, tolerance: float) -> Plan:
    """Return `cuda_plan` with another first value of its recorded output."""
    recorded = cuda_plan().programs[0].golden
    assert recorded is not None
    output = GoldenOutput(sha256=bytes(32), samples=(value, -1.25))
    return cuda(golden=replace(recorded, tolerance=tolerance, outputs=(output,)))


def test_diff_prints_a_table_for_each_section_and_exits_with_1(nimblec: CommandLine, write: Write) -> None:
    a = write("a", cuda_plan())
    weights = (weight("scale", (1.0, 2.0, 3.5, 4.0), 0), cuda_plan().weights[1])
    b = write("b", replace(cuda(arena_nbytes=2048), weights=weights))
    done = nimblec("diff", a, b)
    assert (done.status, done.err) == (1, "")
    assert done.out.startswith(f"{a} and {b} differ: 1 in memory, 1 in weights\n")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "arena 1,024 2,048 +100.0%" in lines
    assert "scale float32 4 float32 4 values differ by up to 0.5, read by model.scale" in lines


def test_diff_of_a_changed_weight_is_as_the_document_shows(nimblec: CommandLine, tmp_path: Path) -> None:
    model = onnx.load(ROOT / "samples" / "digits.onnx")
    compiled(model).save(tmp_path / "a.plan")
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == "classifier.weight")
    changed = numpy_helper.to_array(tensor).copy()
    changed[0, 0] += 0.25
    tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    compiled(model).save(tmp_path / "b.plan")
    out = nimblec("diff", tmp_path / "a.plan", tmp_path / "b.plan").out
    (shown,) = re.findall(r"```\n(Weights.*?)```", (ROOT / "docs" / "ci.md").read_text(), re.DOTALL)
    assert [line.split() for line in shown.splitlines()] == [
        line.split() for line in out[out.index("Weights") :].splitlines() if line.strip(" ─")
    ][:3]


def test_equal_plans_exit_with_0(nimblec: CommandLine, write: Write) -> None:
    a, b = write("a", cpu_plan()), write("b", cpu_plan())
    assert nimblec.prints("diff", a, b) == f"{a} and {b} are equal\n"
    facts = json.loads(nimblec.prints("diff", a, b, "--json", "--fail-on", "numerics,latency"))
    assert (facts["equal"], facts["changes"], facts["failed"]) == (True, [], [])


def test_diff_as_json_has_every_change(nimblec: CommandLine, write: Write) -> None:
    weights = (weight("scale", (1.0, float("nan"), 3.0, 4.0), 0), cuda_plan().weights[1])
    done = nimblec("diff", write("a", cuda_plan()), write("b", replace(cuda_plan(), weights=weights)), "--json")
    facts = json.loads(done.out, parse_constant=pytest.fail)
    (change,) = facts["changes"]
    assert done.status == 1
    assert (change["section"], change["what"], change["largest"]) == ("weights", "scale", "infinite")


RENAMED = replace(cuda_plan().programs[0].outputs[0], name="z")


@pytest.mark.parametrize(
    ("plan", "conditions", "failed"),
    [
        (cuda(outputs=(RENAMED,)), "interface", "interface: 1 changed, the first is output 0"),
        (cuda(outputs=(RENAMED,)), "numerics,weights,size+5%,latency+3%", ""),
        (cuda(arena_nbytes=2048), "arena+100%", ""),
        (cuda(arena_nbytes=2048), "arena+99%", "arena+99%: the arena grew from 1,024 bytes to 2,048 bytes (+100.0%)"),
        (slower(1.02), "latency+3%", ""),
        (slower(1.05), "latency+3%", "latency+3%: main grew from 4.90 us to 5.14 us (+5.0%)"),
        (golden(0.5001, 0.0), "numerics", "numerics: 1 changed, the first is output 'y'"),
        (golden(0.5001, 1e-3), "numerics", ""),
        (golden(0.6, 1e-3), "numerics", "numerics: 1 changed, the first is output 'y'"),
    ],
)  # fmt: skip
def test_gate_exits_with_1_only_where_a_condition_holds(
    nimblec: CommandLine, write: Write, plan: Plan, conditions: str, failed: str
) -> None:
    done = nimblec("diff", write("a", cuda_plan()), write("b", plan), "--fail-on", conditions)
    assert done.status == (1 if failed else 0)
    assert [line for line in done.out.splitlines() if "failed" in line] == ([f"failed: {failed}"] if failed else [])


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ("frob", "'frob' is no condition: name one of made, interface,"),
        ("interface,", "'' is no condition"),
        ("size+5", "'size+5' is no condition"),
        ("interface+5%", "'interface+5%' is no condition"),
        ("numerics", "numerics cannot be judged: main: the second plan records no outputs"),
        ("latency+3%", "latency+3% cannot be judged: a plan records no times of program 'main'"),
    ],
)
def test_what_cannot_be_judged_is_refused(nimblec: CommandLine, write: Write, conditions: str, words: str) -> None:
    assert words in nimblec.refused("diff", write("a", cuda_plan()), write("b", cpu_plan()), "--fail-on", conditions)


def test_diff_refuses_what_is_no_plan(nimblec: CommandLine, write: Write, tmp_path: Path) -> None:
    a = write("a", cuda_plan())
    (tmp_path / "b.plan").write_bytes(a.read_bytes()[:-100])
    assert "b.plan: is cut short" in nimblec.refused("diff", a, tmp_path / "b.plan")
    assert "none.plan" in nimblec.refused("explain", tmp_path / "none.plan")


def test_explain_says_what_takes_the_time(nimblec: CommandLine, write: Write) -> None:
    out = nimblec.prints("explain", write("a", cuda_plan()))
    assert "Time: 4.00 us on the critical path of 4 commands, of 4.80 us of work: 1.20 commands run at a time" in out
    assert "A whole run took 4.90 us: 0.90 us (18%) go into starting commands" in out
    assert "1 mul model.scale _Z5scalePfS_S_i 1.50 us 31.2% 0.1 critical" in " ".join(out.split())
    assert "an arena of 1.0 kB (78% above what is live at once)" in out
    assert len(out.splitlines()) <= 24


def test_explain_says_so_where_no_times_are_recorded(nimblec: CommandLine, write: Write) -> None:
    out = nimblec.prints("explain", write("a", cpu_plan()))
    assert "Its critical path has 2 commands, one after another. The plan records no times (--reproducible)" in out
    assert "Memory: " in out


def test_explain_takes_one_of_several_programs(nimblec: CommandLine, write: Write) -> None:
    plan = write("a", several_entries())
    assert nimblec.prints("explain", plan).startswith("Program 'main' of 3 on NVIDIA H200: 5 commands on 2 streams.")
    assert nimblec.prints("explain", plan, "--program", "tail").startswith("Program 'tail' of 3")
    assert "has no program 'body'; its programs are 'main'" in nimblec.refused("explain", plan, "--program", "body")


def test_a_page_shows_the_differences_with_names_escaped(nimblec: CommandLine, write: Write, tmp_path: Path) -> None:
    renamed = replace(cuda_plan(), weights=(weight("<img src=x>", (1.0, 2.0, 3.0, 4.0), 0),))
    before, after, page = write("before", cuda_plan()), write("after", renamed), tmp_path / "diff.html"
    found = nimblec("diff", before, after, "--html", page)
    assert found.status == 1
    text = page.read_text()
    assert "&lt;img src=x&gt;" in text
    assert "<img" not in text
    assert "default-src 'none'" in text
