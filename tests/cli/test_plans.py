"""run, inspect and verify on plan files, and the refusal of every kind of bad file."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import OLD_PLAN, CommandLine
from plans import cpu_plan, cuda_plan

from nimblec.inspect.inspection import describe
from nimblec.plan import encoder
from nimblert.check.verify import read_plan
from nimblert.plan import Plan, ScheduleRecord

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "samples" / "digits.onnx"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the digits sample, compiled for the CPU once."""
    import nimblec

    path = tmp_path_factory.mktemp("plans") / "digits.plan"
    nimblec.compile(DIGITS, target="cpu").save(path)
    return path


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """Return a CUDA plan whose cubins are none."""
    path = tmp_path / "cuda.plan"
    encoder.write(cuda_plan(), path)
    return path


# --- compile


def test_compile_prints_the_parts_and_the_stages(nimblec: CommandLine, tmp_path: Path) -> None:
    done = nimblec("compile", DIGITS, "-o", tmp_path / "d.plan", "--target", "cpu")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("target: cpu (asked for)\n")
    for words in ("kernels", "modules", "weights", "arena", "file", "all stages", "d.plan"):
        assert words in done.out


def test_compile_json_stages_add_up_to_wall_time(nimblec: CommandLine, tmp_path: Path) -> None:
    plan = tmp_path / "d.plan"
    facts = json.loads(nimblec.prints("compile", DIGITS, "-o", plan, "--target", "cpu", "--no-plan-cache", "--json"))
    assert sum(stage["seconds"] for stage in facts["stages"]) == pytest.approx(facts["seconds"])
    assert [stage["name"] for stage in facts["stages"]][:3] == ["start", "import", "read"]
    assert facts["sizes"]["file"] == plan.stat().st_size


def test_verify_json_lists_checks_and_fails(nimblec: CommandLine, digits: Path, tmp_path: Path) -> None:
    facts = json.loads(nimblec.prints("verify", digits, "--json"))
    assert facts["passed"]
    assert {check["name"]: check["result"] for check in facts["checks"]}["symbols"] == "skipped"
    cut = tmp_path / "cut.plan"
    cut.write_bytes(digits.read_bytes()[:-100])
    done = nimblec("verify", cut, "--json")
    assert done.status == 2
    (check,) = json.loads(done.out)["checks"]
    assert (check["name"], check["result"]) == ("format", "failed")


def test_reproducible_builds_are_equal_and_hold_no_times(nimblec: CommandLine, tmp_path: Path) -> None:
    """Durations of commands are in every other plan, and no two of these are equal."""
    built = []
    for name in ("one.plan", "two.plan"):
        nimblec.prints("compile", DIGITS, "-o", tmp_path / name, "--target", "cpu", "--reproducible", "--no-plan-cache")
        built.append((tmp_path / name).read_bytes())
    assert built[0] == built[1]
    assert "No durations in the plan" in nimblec("inspect", tmp_path / "one.plan", "--timeline").out
    cache = "--timing-cache", tmp_path / "t.json"
    refused = nimblec.refused("compile", DIGITS, "-o", tmp_path / "d.plan", "--reproducible", *cache)
    assert "cannot be used together" in refused


@pytest.mark.parametrize("model", ["none.onnx", "none.pt2", "none", "none:", "README.md"])
def test_what_is_no_model_is_refused_by_name(nimblec: CommandLine, tmp_path: Path, model: str) -> None:
    output = tmp_path / "m.plan"
    output.write_bytes(OLD_PLAN)
    assert model in nimblec.refused("compile", model, "-o", output, "--target", "cpu")
    assert output.read_bytes() == OLD_PLAN


def test_a_file_that_is_no_onnx_model_is_refused(nimblec: CommandLine, tmp_path: Path) -> None:
    for name, content in [
        ("empty.onnx", b""),
        ("text.onnx", b"hello\n" * 50),
        ("cut.onnx", DIGITS.read_bytes()[:5000]),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        assert name in nimblec.refused("compile", path, "-o", tmp_path / "m.plan", "--target", "cpu")
    assert not (tmp_path / "m.plan").exists()


def test_an_input_that_the_model_has_not_is_refused(nimblec: CommandLine, tmp_path: Path) -> None:
    compile_ = ("compile", DIGITS, "-o", tmp_path / "m.plan", "--target", "cpu")
    assert "img" in nimblec.refused(*compile_, "--input", "img:1x1x8x8")
    assert "image" in nimblec.refused(*compile_, "--input", "image:1x1x9x9")


# --- run


@pytest.mark.parametrize("digit", [0, 3, 7, 9])
def test_run_reads_the_digit(nimblec: CommandLine, digits: Path, digit: int) -> None:
    out = nimblec.prints("run", digits, "--input", f"image={ROOT / 'samples' / f'digit_{digit}.npy'}")
    (line,) = [line for line in out.splitlines() if line.startswith(" digit ")]
    assert line.split()[1:3] == ["int64", "1"]
    assert line.rstrip().endswith(f"[{digit}]")
    assert "drawn" not in out


def test_the_same_seed_draws_the_same_run(nimblec: CommandLine, digits: Path) -> None:
    first, again, other = (nimblec("run", digits, "--seed", seed).out for seed in (5, 5, 6))
    assert "drawn from seed 5: image" in first
    assert first == again
    assert other.replace("seed 6", "seed 5") != first


def test_run_writes_its_outputs(nimblec: CommandLine, digits: Path, tmp_path: Path) -> None:
    nimblec.prints("run", digits, "--output-dir", tmp_path / "new")
    probabilities = np.load(tmp_path / "new" / "probabilities.npy")
    assert (probabilities.shape, probabilities.dtype) == ((1, 10), np.float32)
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)
    assert np.load(tmp_path / "new" / "digit.npy").tolist() == [int(probabilities.argmax())]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["digit.npy", "probabilities.npy"]


def test_repeat_prints_the_latency(nimblec: CommandLine, digits: Path) -> None:
    out = nimblec("run", digits, "--repeat", "3").out
    (line,) = [line for line in out.splitlines() if line.startswith("latency")]
    assert line.startswith("latency of 3 runs: median ")
    assert line.count(" us") + line.count(" ms") == 3


def test_profile_load_prints_the_stages(nimblec: CommandLine, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimblert.stages.kept", None)
    out = nimblec("run", digits, "--profile-load").out
    printed = out.partition("where the time went, in ms")[2]
    rows = re.findall(r"^ (\w[\w -]+?) +([\d.]+) +([\d.]+) +[\d.]+ $", printed, re.MULTILINE)
    assert {name for name, _, _ in rows} >= {"load", "import", "SHA-256", "check", "first run"}
    assert all(float(begin) <= float(end) for _, begin, end in rows)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((1, 1, 8, 8)), "dtype float64, expected float32"),
        (np.zeros((1, 1, 9, 8), np.float32), "shape (1, 1, 9, 8), expected (1, 1, 8, 8)"),
    ],
)
def test_run_refuses_input(nimblec: CommandLine, digits: Path, tmp_path: Path, array: np.ndarray, words: str) -> None:
    np.save(tmp_path / "x.npy", array)
    out = tmp_path / "out"
    sentence = nimblec.refused("run", digits, "--input", f"image={tmp_path / 'x.npy'}", "--output-dir", out)
    assert words in sentence
    assert "'image'" in sentence
    assert not out.exists()


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize("size", [10**12, 2**62])
def test_inputs_larger_than_memory_are_refused(nimblec: CommandLine, tmp_path: Path, command: str, size: int) -> None:
    from nimblec import compile as compile_model

    plan = tmp_path / "batch.plan"
    compile_model(ROOT / "samples" / "digits_batch.onnx", target="cpu", dims={"batch": "1,2"}).save(plan)
    sentence = nimblec.refused(command, plan, "--dim", f"batch={size}")
    assert sentence.startswith("inputs that are not given cannot be drawn: ")


def test_run_names_known_inputs(nimblec: CommandLine, digits: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(1))
    sentence = nimblec.refused("run", digits, "--input", f"img={tmp_path / 'x.npy'}")
    assert "'img'" in sentence
    assert "image" in sentence


def test_an_output_directory_that_is_a_file_is_refused(nimblec: CommandLine, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in nimblec.refused("run", digits, "--output-dir", tmp_path / "file")
    assert "file" in nimblec.refused("run", digits, "--output-dir", tmp_path / "file" / "below")


# --- every command on files that are no plans


def truncated(content: bytes) -> bytes:
    return content[:-1]


def altered(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("command", ["run", "inspect", "verify"])
@pytest.mark.parametrize("damage", [truncated, altered, lambda _: b"", lambda _: b"hello\n" * 100])
def test_command_refuses_damage(
    nimblec: CommandLine, tmp_path: Path, command: str, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "broken.plan"
    encoder.write(cpu_plan(), path)
    path.write_bytes(damage(path.read_bytes()))
    assert "broken.plan" in nimblec.refused(command, path)


@pytest.mark.parametrize("command", ["run", "inspect", "verify"])
def test_a_missing_plan_and_a_directory_are_refused(nimblec: CommandLine, tmp_path: Path, command: str) -> None:
    assert nimblec.refused(command, tmp_path / "none.plan").endswith("none.plan: no such file")
    assert str(tmp_path) in nimblec.refused(command, tmp_path)


def test_an_onnx_file_is_no_plan_and_the_message_says_compile(nimblec: CommandLine) -> None:
    assert "compile" in nimblec.refused("run", DIGITS)


def test_run_refuses_cuda_plan_without_gpu(nimblec: CommandLine, cuda: Path, request: pytest.FixtureRequest) -> None:
    if request.getfixturevalue("missing_gpu") is None:
        pytest.skip("needs a machine without a GPU")
    assert "this plan needs a GPU" in nimblec.refused("run", cuda)


# --- inspect


def test_inspect_prints_what_describe_says_as_json(nimblec: CommandLine, cuda: Path) -> None:
    facts = json.loads(nimblec("inspect", cuda, "--json").out)
    assert facts == json.loads(json.dumps(describe(read_plan(cuda), file_nbytes=cuda.stat().st_size)))


def test_inspect_shows_every_part(nimblec: CommandLine, cuda: Path) -> None:
    out = nimblec.prints("inspect", cuda)
    for words in ("NVIDIA H200", "_Z5scalePfS_S_i", "triton", "float32 4x4", "arena", "Weights", "13.0"):
        assert words in out


def test_inspect_shows_why_the_schedule_is_what_it_is(nimblec: CommandLine, cuda: Path) -> None:
    rows = [" ".join(line.split()) for line in nimblec("inspect", cuda).out.splitlines()]
    assert "policy max" in rows
    assert "antichain 2 commands, any two of which may run at the same time" in rows
    assert "arena 1,024 bytes, 77.8% above the lower bound" in rows
    assert "1 1 0 768 5.20 us" in rows
    assert "max 2 2 1,024 4.90 us kept" in rows
    program = json.loads(nimblec("inspect", cuda, "--json").out)["programs"][0]
    assert (program["schedule"]["antichain"], program["schedule"]["syncs"]) == ([2, 3], 2)


def test_inspect_draws_the_timeline(nimblec: CommandLine, cuda: Path) -> None:
    out = nimblec.prints("inspect", cuda, "--timeline")
    assert "Program 'main': timeline" in out
    assert "stream 1 ...." in out
    assert "Kernels" not in out


def test_inspect_writes_the_trace_and_the_graph(nimblec: CommandLine, cuda: Path, tmp_path: Path) -> None:
    trace, graph = tmp_path / "trace.json", tmp_path / "graph.dot"
    graph.write_text("old")
    done = nimblec("inspect", cuda, "--chrome-trace", trace, "--dot", graph)
    assert (done.status, done.out) == (0, f"wrote {trace}\nwrote {graph}\n")
    assert json.loads(trace.read_text())["traceEvents"]
    assert graph.read_text().startswith("digraph plan {\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cuda.plan", "graph.dot", "trace.json"]
    assert json.loads(nimblec("inspect", cuda, "--json", "--dot", graph).out)["target"] == "cuda"


def test_inspect_writes_the_page(nimblec: CommandLine, cuda: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    assert nimblec.prints("inspect", cuda, "--html", report) == f"wrote {report}\n"
    assert report.read_text().startswith("<!doctype html>\n")
    assert '"file":"cuda.plan"' in report.read_text()


def test_files_that_inspect_cannot_write_are_refused(nimblec: CommandLine, cuda: Path, tmp_path: Path) -> None:
    before = cuda.read_bytes()
    for option in ("--dot", "--chrome-trace", "--html"):
        missing = tmp_path / "none" / "file"
        assert f"{missing}: cannot be written: No such file" in nimblec.refused("inspect", cuda, option, missing)
        assert str(tmp_path) in nimblec.refused("inspect", cuda, option, tmp_path)
        assert "different files" in nimblec.refused("inspect", cuda, option, cuda)
    assert "different files" in nimblec.refused(
        "inspect", cuda, "--dot", tmp_path / "x", "--chrome-trace", tmp_path / "x"
    )
    assert "cannot be used together" in nimblec.refused("inspect", cuda, "--json", "--timeline")
    assert [path.name for path in tmp_path.iterdir()] == ["cuda.plan"]
    assert cuda.read_bytes() == before


# --- verify


def lines(out: str) -> dict[str, str]:
    """Return the result of each check by its name."""
    return {line[9:].partition(":")[0]: line[:8].strip() for line in out.splitlines()}


def test_verify_repeats_the_recorded_run(nimblec: CommandLine, digits: Path) -> None:
    out = nimblec.prints("verify", digits)
    assert lines(out) == {
        "format": "ok",
        "rules": "ok",
        "hazards": "ok",
        "schedule": "ok",
        "symbols": "skipped",
        "golden": "ok",
    }
    assert "output 'digit': bit-exact" in out


def changed(digits: Path, path: Path, change: Callable[[Plan], Plan]) -> Path:
    """Return a copy of a plan with a change."""
    encoder.write(change(read_plan(digits)), path)
    return path


def other_seed(plan: Plan) -> Plan:
    program = plan.programs[0]
    assert program.golden is not None
    golden = replace(program.golden, seed=program.golden.seed + 1)
    return replace(plan, programs=(replace(program, golden=golden),))


def test_verify_fails_where_the_run_gives_something_else(nimblec: CommandLine, digits: Path, tmp_path: Path) -> None:
    sentence = nimblec.refused("verify", changed(digits, tmp_path / "m.plan", other_seed))
    assert "failed the checks of golden: output " in sentence
    assert ": different (" in sentence


def without_order(plan: Plan) -> Plan:
    """Drop the events that order the two streams."""
    program = plan.programs[0]
    commands = tuple(command for command in program.commands if type(command).__name__ not in {"Record", "Wait"})
    return replace(plan, programs=(replace(program, commands=commands, event_count=0),))


def test_verify_finds_a_hazard(nimblec: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "racy.plan"
    encoder.write(without_order(cpu_plan()), path)
    done = nimblec("verify", path)
    assert done.status == 2
    assert lines(done.out)["hazards"] == "FAILED"
    assert "nothing orders" in done.err


def test_verify_finds_a_false_antichain(nimblec: CommandLine, tmp_path: Path) -> None:
    plan = cpu_plan()
    claim = ScheduleRecord(
        policy="max", antichain=(0, 1), arena_lower_bound_nbytes=0, fewest_sync_count=0, candidates=()
    )
    path = tmp_path / "m.plan"
    encoder.write(replace(plan, programs=(replace(plan.programs[0], schedule=claim),)), path)
    done = nimblec("verify", path)
    assert done.status == 2
    assert lines(done.out)["schedule"] == "FAILED"
    assert "commands[3] comes after commands[0] by their streams and events" in done.err


def test_verify_finds_cubins_that_are_none(nimblec: CommandLine, cuda: Path) -> None:
    done = nimblec("verify", cuda)
    assert done.status == 2
    assert lines(done.out)["symbols"] == "FAILED"
    assert "failed the checks of" in done.err
    assert "modules[0]: cubin" in done.out


def test_a_plan_without_a_record_is_not_run(nimblec: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "m.plan"
    encoder.write(cpu_plan(), path)
    out = nimblec.prints("verify", path)
    assert "skipped  golden: the plan holds no golden record" in out
