"""The benchmarks that run a plan for a long time, run briefly."""

import json
import time
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
from nimblert.errors import PlanError
from nimblert.executable import Executable


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tanh(x) as a plan."""
    folder = tmp_path_factory.mktemp("soak")
    nodes = [helper.make_node("Tanh", ["x"], ["y"])]
    model = write_model(folder / "m.onnx", nodes, [floats("x", 4)], [floats("y", 4)])
    encoder.write(plan_file(model), folder / "m.plan")
    return folder / "m.plan"


def measured(benchmark: ModuleType, path: Path, file: Path, *arguments: str) -> dict[str, Any]:
    """What a benchmark that must end with 0 finds, in a process where no other test's memory comes or goes."""
    code = f"import sys; from {benchmark.__name__} import main; sys.exit(main(sys.argv[1:]))"
    printed = python(code, path, "--json", file, *arguments)
    facts: dict[str, Any] = json.loads(file.read_text())
    assert json.loads(printed) == facts
    return facts


@pytest.mark.parametrize(("mode", "arguments"), [("call", []), ("replay", ["--replay"])])
def test_nothing_changes_while_a_plan_runs_on(path: Path, tmp_path: Path, mode: str, arguments: list[str]) -> None:
    facts = measured(soak, path, tmp_path / "soak.json", "--count", "2000", *arguments)
    assert (facts["mode"], facts["count"], facts["wrong"], facts["target"]) == (mode, 2000, 0, "cpu")
    assert facts["grown"].keys() == {"anonymous", "threads", "files"}


def test_a_changed_byte_is_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_growth_is_seen(path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(1, 1000))

    def growing(*_: object) -> memory.Held:
        return {"anonymous": 0, "threads": 1, "files": 1, what: next(looks) << 20}

    monkeypatch.setattr(soak, "held", growing)
    assert soak.main([str(path), "--count", "200"]) == 1


def test_threads_on_contexts_beside_processes(path: Path, tmp_path: Path) -> None:
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
def test_memory_grows_by_latencies_alone(grown: dict[str, int], flat: bool) -> None:
    assert contexts.is_flat({"runs": 100, "memory": {"grown": grown}}) is flat


def test_memory_is_that_of_the_device_that_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: set[int] = set()

    def held(_: object, device: int) -> memory.Held:
        looked_at.add(device)
        return {"anonymous": 0}

    monkeypatch.setattr(contexts, "held", held)
    monkeypatch.setattr(contexts, "LOOK_S", 0.001)
    with contexts.Watch(path, device=3) as watch:
        while not watch.looks:
            time.sleep(0.001)
    assert looked_at == {3}


def test_memory_that_grows_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "is_flat", lambda _: False)
    assert contexts.main([str(path), "--threads", "1", "--contexts", "1", "--seconds", "0.1", "--processes", "0"]) == 1


def test_a_process_that_cannot_load_the_plan_keeps_nobody_waiting(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such file"):
        contexts.processes(tmp_path / "none.plan", [0, 0], 0.1)


@pytest.mark.slow
def test_devices_in_one_process_and_in_one_each(path: Path, tmp_path: Path) -> None:
    arguments = ["--threads", "3", "--contexts", "2", "--seconds", "0.6", "--processes", "0", "--devices", "0,0"]
    for way in measured(contexts, path, tmp_path / "contexts.json", *arguments)["devices"].values():
        one, both = way["runs"]
        assert [one["devices"], both["devices"]] == [[0], [0, 0]]
        assert (both["threads"], both["contexts"], both["wrong"]) == (3, 2, 0)
        assert way["of_one_device"] == pytest.approx(both["throughput"] / one["throughput"], abs=1e-3)


def test_a_wrong_output_of_any_thread_is_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call: Callable[..., Any] = contexts.Checked.call

    def spoiling(check: contexts.Checked, context: Context) -> None:
        call(check, context)
        check._expected[0]["y"][:] += 1

    monkeypatch.setattr(contexts.Checked, "call", spoiling)
    assert contexts.main([str(path), "--threads", "2", "--contexts", "1", "--seconds", "0.3", "--processes", "0"]) == 1
