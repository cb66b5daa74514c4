"""`nimblec doctor`: what it reports of a good installation, and of one with something missing."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import CommandLine
from subprocesses import ROOT

from nimblec.inspect import doctor


def test_extras_are_those_of_the_packages() -> None:
    ours, theirs = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for folder in (".", "runtime")
    )
    declared = theirs | ours
    for name, extra in doctor.EXTRAS.items():
        assert extra.requirements == tuple(text for text in declared[name] if not text.startswith("nimblec"))


@pytest.mark.parametrize(
    ("found", "satisfies"),
    [("2.10.1", False), ("2.11", True), ("2.11.0+cu130", True), ("2.15.3", True), ("2.16", False), ("unknown", False)],
)
def test_versions_are_compared_with_the_bounds(found: str, satisfies: bool) -> None:
    assert doctor._satisfies(found, "torch>=2.11,<2.16") is satisfies


def test_doctor_reports_this_installation(nimblec: CommandLine) -> None:
    facts = json.loads(nimblec.prints("doctor", "--json"))
    assert list(facts) == ["versions", "cpu", "gpu", "caches", "extras"]
    assert facts["versions"]["onnxruntime"]
    assert (facts["gpu"]["problem"] is None) == bool(facts["gpu"]["devices"])
    shown = nimblec.prints("doctor")
    for word in (facts["versions"]["onnxruntime"], "GPU", "timings", "signing"):
        assert word in shown


def test_doctor_reports_missing_and_outdated_packages(nimblec: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"torch": "2.1.0+cpu", "onnx": "1.17"}.get)
    extras = {extra["name"]: extra for extra in json.loads(nimblec.prints("doctor", "--json"))["extras"]}
    assert extras["cpu"]["missing"] == ["onnxruntime", "scipy"]
    assert extras["compile"]["missing"] == ["onnxscript"]
    assert extras["compile"]["problems"] == [
        "torch 2.1.0+cpu is installed, torch>=2.11,<2.16 is needed",
        "torch 2.1.0+cpu is built without CUDA, and compiles for the CPU alone",
    ]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_doctor_fails_where_the_cpu_target_cannot_work(
    nimblec: CommandLine, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = nimblec("doctor", *form)
    assert done.status == 2
    assert "scipy" in done.out
    assert done.err.startswith("nimblec: the CPU target cannot work: onnxruntime cannot be imported: ")
    assert done.err.count("\n") == 1


def test_doctor_reports_caches(nimblec: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    missing = json.loads(nimblec.prints("doctor", "--json"))["caches"]
    assert [(cache["mode"], cache["problem"]) for cache in missing] == [(None, None)] * 2
    assert not any(tmp_path.iterdir())
    plans = tmp_path / ".cache" / "nimblec" / "plans"
    plans.mkdir(parents=True)
    (plans / "one.plan").write_bytes(bytes(10))
    plans.chmod(0o777)
    kept, _ = json.loads(nimblec.prints("doctor", "--json"))["caches"]
    assert (kept["nbytes"], kept["mode"]) == (10, "drwxrwxrwx")
    assert kept["problem"].startswith(f"others may write {plans}: ")
