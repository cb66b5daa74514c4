"""The benchmarks that run a plan for a long time, run briefly."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import helper
from subprocesses import python

from bench import contexts, memory, soak
from nimblec.plan import encoder
from nimblert.context import Context
from nimblert.executable import Executable


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tanh(x) as a plan."""
    folder = tmp_path_factory.mktemp("soak")
    nodes = [helper.make_node("Tanh", ["x"], ["y"])]
    model = write_model(folder / "m.onnx", nodes, [floats("x", 4)], [floats("y", 4)])
    encoder.write(plan_file(model), folder / "m.plan")
    return folder / "m.plan"


def measured(benchmark: ModuleType, path: Path, file: Path, *arguments: str) -> dict[str, Any]:
    """Run a benchmark, which must end with 0, in a process where no other test's memory comes or goes."""
    code = f"import sys; from {benchmark.__name__} import main; sys.exit(main(sys.argv[1:]))"
    printed = python(code, path, "--json", file, *arguments)
    facts: dict[str, Any] = json.loads(file.read_text())
    assert json.loads(printed) == facts
    return facts


@pytest.mark.parametrize(("mode", "arguments"), [("call", []), ("replay", ["--replay"])])
def test_soak_finds_no_change(path: Path, tmp_path: Path, mode: str, arguments: list[str]) -> None:
    facts = measured(soak, path, tmp_path / "soak.json", "--count", "2000", *arguments)
    assert (facts["mode"], facts["count"], facts["wrong"], facts["target"]) == (mode, 2000, 0, "cpu")
    assert facts["grown"].keys() == {"anonymous", "threads", "files"}


def test_soak_detects_a_changed_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Iterator[int] = iter(range(10_000))
    run = Executable.run

    def changing(model: Executable, arrays: Mapping[str, np.ndarray], **more: Any) -> dict[str, np.ndarray]:
        outputs = run(model, arrays, **more)
        if next(calls) == 500:
            outputs["y"][0] += 1
        return outputs

    monkeypatch.setattr(Executable, "run", changing)
    assert soak.soak(path, 600, replay=False)["wrong"] == 1
    read = Executable.read
    monkeypatch.setattr(Executable, "read", lambda *args: read(*args) + np.uint8(next(calls) % 7 == 0))
    assert soak.main([str(path), "--count", "300", "--replay"]) == 1


@pytest.mark.parametrize("what", ["anonymous", "threads", "files"])
def test_soak_detects_growth(path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(1, 1000))

    def growing(*_: object) -> memory.Held:
        return {"anonymous": 0, "threads": 1, "files": 1, what: next(looks) << 20}

    monkeypatch.setattr(soak, "held", growing)
    assert soak.main([str(path), "--count", "200"]) == 1


def test_contexts_compares_threads_with_processes(path: Path, tmp_path: Path) -> None:
    arguments = ["--threads", "6", "--contexts", "2", "--seconds", "1.2", "--processes", "1,2"]
    facts = measured(contexts, path, tmp_path / "contexts.json", *arguments)
    one = facts["contexts"]
    assert (one["threads"], one["contexts"], one["wrong"]) == (6, 2, 0)
    assert one["runs"] > 100
    assert one["memory"]["grown"]["threads"] == 0
    assert [other["processes"] for other in facts["processes"]] == [1, 2]
    assert [other["devices"] for other in facts["processes"]] == [[0], [0, 0]]
    best = max(other["throughput"] for other in facts["processes"])
    assert facts["of_the_best_processes"] == pytest.approx(one["throughput"] / best, abs=1e-3)
    assert facts["flat"]
    assert facts["environment"]["commit"]


@pytest.mark.parametrize(
    ("grown", "flat"),
    [
        ({"anonymous": (4 << 20) + 1600, "threads": 0, "files": 0, "device": 4 << 20}, True),
        ({"anonymous": (4 << 20) + 1601, "threads": 0, "files": 0}, False),
        ({"anonymous": 0, "threads": 0, "files": 0, "device": (4 << 20) + 1}, False),
        ({"anonymous": 0, "threads": 1, "files": 0}, False),
        ({"anonymous": 0, "threads": 0, "files": 1}, False),
    ],
)
def test_is_flat_allows_recorded_latencies(grown: dict[str, int], flat: bool) -> None:
    assert contexts.is_flat({"runs": 100, "memory": {"grown": grown}}) is flat


@pytest.mark.slow
def test_contexts_compares_devices(path: Path, tmp_path: Path) -> None:
    arguments = ["--threads", "3", "--contexts", "2", "--seconds", "0.6", "--processes", "0", "--devices", "0,0"]
    for way in measured(contexts, path, tmp_path / "contexts.json", *arguments)["devices"].values():
        one, both = way["runs"]
        assert [one["devices"], both["devices"]] == [[0], [0, 0]]
        assert (both["threads"], both["contexts"], both["wrong"]) == (3, 2, 0)
        assert way["of_one_device"] == pytest.approx(both["throughput"] / one["throughput"], abs=1e-3)


def test_contexts_detects_a_wrong_output(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call: Callable[..., Any] = contexts.Checked.call

    def spoiling(check: contexts.Checked, context: Context) -> None:
        call(check, context)
        check._expected[0]["y"][:] += 1

    monkeypatch.setattr(contexts.Checked, "call", spoiling)
    assert contexts.main([str(path), "--threads", "2", "--contexts", "1", "--seconds", "0.3", "--processes", "0"]) == 1
