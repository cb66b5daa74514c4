"""`nimblec build`: plans of a build file, made where they are out of date."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from subprocesses import ROOT

from nimblec.plan import plan_key
from nimblert.check.verify import read_plan

DIGITS = 'model = "digits.onnx"\ntarget = "cpu"\n'
BATCH = 'model = "batch.onnx"\ntarget = "cpu"\n'


@pytest.fixture(autouse=True)
def _at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this process's software for that which it began with: other tests may have changed its path."""
    monkeypatch.setattr(plan_key, "_software_at_first", cache(plan_key._software))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a build file in a folder with two models; `write` fills it."""
    shutil.copy(ROOT / "samples" / "digits.onnx", tmp_path / "digits.onnx")
    shutil.copy(ROOT / "samples" / "digits_batch.onnx", tmp_path / "batch.onnx")
    return tmp_path / "plans.toml"


def write(file: Path, **tables: str) -> None:
    file.write_text("\n".join(f"[plans.{name}]\n{table}" for name, table in tables.items()))


def states(done_out: str) -> dict[str, str]:
    return {plan["name"]: plan["state"] for plan in json.loads(done_out)["plans"]}


def test_build_makes_only_what_changed(nimblec: CommandLine, file: Path) -> None:
    write(file, digits=DIGITS, batch=BATCH + 'dim = { batch = [1, 2] }\noutput = "out/b.plan"\nmax-cold-start = 60')
    done = nimblec("build", file, "--check", "--json")
    assert (done.status, states(done.out)) == (1, {"digits": "missing", "batch": "missing"})
    assert not list(file.parent.glob("*.plan"))
    first = json.loads(nimblec.prints("build", file, "--json", "--jobs", "2"))
    assert [plan["state"] for plan in first["plans"]] == ["built", "built"]
    assert first["plans"][1]["cold_start"] > 0
    assert [p.profile for p in read_plan(file.parent / "out" / "b.plan").programs] == [(("batch", 1),), (("batch", 2),)]
    nimblec.prints("build", file, "--check")
    write(file, digits=DIGITS + 'streams = "1"', batch=BATCH + 'dim = { batch = "1..2" }\noutput = "out/b.plan"')
    out = nimblec("build", file, "--check").out
    assert "digits: digits.plan: out of date: changed since it was built: options" in out
    assert states(nimblec.prints("build", file, "--json")) == {"digits": "built", "batch": "up to date"}
    (file.parent / "digits.plan").write_bytes((file.parent / "out" / "b.plan").read_bytes())
    done = nimblec("build", file, "--check")
    assert (done.status, "digits: digits.plan: is not the file that was built" in done.out) == (1, True)


def test_build_gives_the_plan_of_compile(nimblec: CommandLine, file: Path) -> None:
    table = 'dim = { batch = [1, 2, 4] }\nmax-error = 1e-3\nrefittable = true\nstreams = 2\ntiming-cache = "no.json"\n'
    write(file, batch=BATCH + table)
    assert "cannot be used together (the default here; say reproducible = false)" in nimblec.refused("build", file)
    write(file, batch=BATCH + table.replace('timing-cache = "no.json"\n', ""))
    nimblec.prints("build", file)
    given = ["--target", "cpu", "--dim", "batch=1,2,4", "--max-error", "0.001", "--streams", "2"]
    other = file.parent / "other.plan"
    model = file.parent / "batch.onnx"
    nimblec.prints("compile", model, "-o", other, *given, "--refittable", "--reproducible", "--no-plan-cache")
    assert other.read_bytes() == (file.parent / "batch.plan").read_bytes()


def test_build_keeps_an_older_plan(nimblec: CommandLine, file: Path) -> None:
    """A plan over its budget and one that cannot be compiled replace nothing; the others are made."""
    write(file, digits=DIGITS, batch=BATCH + 'dim = { batch = 1 }\nmax-size = "1 kB"')
    done = nimblec("build", file)
    assert done.status == 1
    assert "batch: max-size: 70.0 kB, expected at most 1.0 kB" in done.out
    kept = (file.parent / "digits.plan").read_bytes()
    write(file, digits=DIGITS + "input = { image = [1, 1, 9, 9] }", batch=BATCH + "dim = { batch = 1 }")
    done = nimblec("build", file, "--json")
    assert (done.status, states(done.out)) == (2, {"digits": "failed", "batch": "built"})
    assert "plans.toml: 1 of 2 plans failed: digits: " in done.err
    assert (file.parent / "digits.plan").read_bytes() == kept
    assert {path.suffix for path in file.parent.iterdir()} == {".onnx", ".plan", ".toml", ".lock"}


def test_build_needs_sources_of_code(nimblec: CommandLine, file: Path) -> None:
    write(file, net='model = "net:build"\ntarget = "cpu"')
    (file.parent / "net.plan").write_bytes(b"\0\0\0\0NPLN")
    assert "its model is code: list the files that it depends on as `sources`" in nimblec("build", file, "--check").out
    write(file, net='model = "net:build"\ntarget = "cpu"\nsources = "*.onnx"')
    assert "net.plan: not one of plans.lock" in nimblec("build", file, "--check").out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[plans.d", "plans.toml: not a TOML file: "),
        ("", "plans.toml: plans: expected a table for each plan"),
        ("[plan.d]", "plans.toml: plan: there is no such key: did you mean 'plans'?"),
        ("[plans]\nd = 3", "plans.toml: plans.d: 3, expected a table"),
        ("[plans.d]", "plans.toml: plans.d.model: is missing"),
        ("[plans.d]\nmodel = 3", "plans.toml: plans.d.model: 3, expected a string"),
        ('[plans.d]\nmodel = "no.onnx"', "plans.toml: plans.d.model: no.onnx: no such file"),
        (f"[plans.d]\n{DIGITS}dims = 3", "plans.toml: plans.d.dims: there is no such key: did you mean 'dim'?"),
        (f"[plans.d]\n{DIGITS}verbose = true", "plans.toml: plans.d.verbose: there is no such key"),
        (f"[plans.d]\n{DIGITS}level = 3", "plans.toml: plans.d.level: 3 is not in the range 0<=x<=2"),
        (f"[plans.d]\n{DIGITS}level = 2", "plans.toml: plans.d: --reproducible: -O2 chooses kernels by timing them"),
        (f"[plans.d]\n{DIGITS}refittable = 1", "plans.toml: plans.d.refittable: 1, expected true or false"),
        (f"[plans.d]\n{DIGITS}streams = [1]", "plans.toml: plans.d.streams: [1], expected one value"),
        (f"[plans.d]\n{DIGITS}dim = {{ a = -1 }}", "plans.toml: plans.d.dim: "),
        (f"[plans.d]\n{DIGITS}max-size = '1 MX'", "plans.toml: plans.d.max-size: '1 MX', expected a number of bytes"),
        (f"[plans.d]\n{DIGITS}max-latency = true", "plans.toml: plans.d.max-latency: True, expected seconds"),
        (f"[plans.d]\n{DIGITS}sources = 'no*'", "plans.toml: plans.d.sources: 'no*' matches no file"),
        (f"[plans.d]\n{DIGITS}output = 'batch.onnx'", "plans.toml: plans.d: batch.onnx: exists and is not a plan"),
        (
            f"[plans.d]\n{DIGITS}output = 'a.plan'\n[plans.e]\n{DIGITS}output = './a.plan'",
            "plans.toml: plans.e.output: a.plan is also the output of plans.d",
        ),
    ],
)
def test_build_refuses_file(nimblec: CommandLine, file: Path, text: str, sentence: str) -> None:
    before = {path.name for path in file.parent.iterdir()}
    file.write_text(text)
    assert nimblec.refused("build", file).startswith(sentence)
    assert {path.name for path in file.parent.iterdir()} == {*before, "plans.toml"}


@pytest.mark.parametrize("content", ["", "{}", '{"plans": {"d": 3}}', '{"plans": {"d": {"output": "d.plan"}}}'])
def test_build_refuses_lock(nimblec: CommandLine, file: Path, content: str) -> None:
    write(file, digits=DIGITS)
    file.with_suffix(".lock").write_text(content)
    assert nimblec.refused("build", file).startswith("plans.lock: is not a record of builds: remove it")


def test_every_option_of_compile_is_a_key() -> None:
    from nimblec.cli.build_file import OPTIONS

    printing: set[Any] = {"json", "output", "verbose", "quiet", "debug"}
    assert {"dim", "input", "level", "max-error", "pad-mask", "plan-cache"} <= OPTIONS.keys()
    assert not printing & OPTIONS.keys()
