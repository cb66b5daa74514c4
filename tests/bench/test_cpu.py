"""The benchmarks of the CPU target: tables from made-up figures, and measurements of small models."""

import argparse
import json
import os
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nimblert
from bench import cpu_overhead, cpu_service, environment
from bench.cpu_overhead import CASES, SETTINGS
from nimblec.plan import encoder
from nimblert.cpu import onnx_session, onnx_threads

pytestmark = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs onnxruntime")


def results(**changes: str) -> dict[str, Any]:
    times = {"one core": (4.0, 2.0), "all cores": (3.0, 2.0)}
    settings = {
        name: {
            case: {
                "launches": 7,
                "plan_ms": {"median": ours},
                "session_ms": {"median": theirs},
                "ratio": {"median": ours / theirs, "interval": [ours / theirs - 0.6, ours / theirs]},
                "least_ms": [ours, theirs * 2],
                "bit_exact": True,
            }
            for case in CASES
        }
        for name, (ours, theirs) in times.items()
    }
    commits = dict.fromkeys(SETTINGS, "abc") | changes
    return {"environment": {"gpu": "none", "cpu": "x"}, "settings": settings, "commits": commits}


def test_a_row_has_both_medians_and_both_ratios() -> None:
    _, _, first, *_, below = cpu_overhead.markdown(results()).splitlines()
    assert first == "| resnet18 64 px | 7 | 4.00 / 2.00 (2.00, 1.00) | 3.00 / 2.00 (1.50, 0.75) |"
    assert (
        "All results are equal bit for bit. At most 1.03 times the session's call: missed by resnet18 64 px, " in below
    )
    assert "undecided by resnet18 64 px, all cores; " in below
    assert below.endswith(" Commit abc; x.")


def test_an_interval_holds_the_median_and_narrows_with_more_values() -> None:
    few, many = (cpu_overhead.median_interval(np.linspace(0, 2, count)) for count in (25, 2501))
    assert few[0] < many[0] < 1 < many[1] < few[1]
    assert cpu_overhead.median_interval([3.0]) == [3.0, 3.0]


def test_settings_of_several_commits_make_no_table() -> None:
    with pytest.raises(SystemExit, match="rows of several commits: abc, def"):
        cpu_overhead.markdown(results(**{"one core": "def"}))


def test_calls_of_the_plan_and_of_the_session_are_timed(tmp_path: Path) -> None:
    paths = cpu_overhead.prepared("bert, 2 layers, 16 tokens", tmp_path)
    assert cpu_overhead.prepared("bert, 2 layers, 16 tokens", tmp_path) == paths
    row = cpu_overhead.measure(*paths, 0.1, threads=1)
    assert row["bit_exact"]
    assert row["launches"] > 10
    assert 0 < row["plan_ms"]["p5"] <= row["plan_ms"]["p95"]
    assert row["session_ms"]["p5"] > 0
    assert row["ratio"]["interval"][0] <= row["ratio"]["median"] <= row["ratio"]["interval"][1]


@pytest.mark.parametrize("setting", SETTINGS)
def test_plan_and_session_are_what_a_user_of_each_gets(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option but the number of threads, which is the same: one in a process of one core, else one for each core."""
    import onnxruntime
    from cpu_plans import floats, plan_file, write_model
    from onnx import helper

    path, asked, pools, sessions = tmp_path / "m.plan", [], [], []
    weight = np.ones((256, 256), np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    shape = [floats(name, 256, 256) for name in "xy"]
    model = write_model(tmp_path / "m.onnx", [node], shape[:1], shape[1:], constants={"w": weight})
    encoder.write(plan_file(model, streams=1), path)
    load, options_of, open_session = nimblert.load, onnx_session.session_options, onnxruntime.InferenceSession

    def loading(*given: Any, **options: Any) -> Any:
        asked.append((given, options))
        return load(*given, **options)

    def choosing(pool: onnx_threads.Pool | None = None) -> Any:
        pools.append(pool)
        return options_of(pool)

    def opening(source: Any, options: Any, **how: Any) -> Any:
        if source == str(model):
            sessions.append(options)
        return open_session(source, options, **how)

    monkeypatch.setattr(nimblert, "load", loading)
    monkeypatch.setattr(onnx_session, "session_options", choosing)
    monkeypatch.setattr(onnxruntime, "InferenceSession", opening)
    monkeypatch.setattr(cpu_overhead, "prepared", lambda *_: (model, path))
    allowed = os.sched_getaffinity(0)
    try:
        rows = cpu_overhead.measure_setting(setting, ["m"], tmp_path, 0.01)
        cores = onnx_threads.cores()
    finally:
        os.sched_setaffinity(0, allowed)
    assert rows["m"]["bit_exact"]
    assert asked == [((path,), {})]
    wanted = SETTINGS[setting] or 0
    assert [pool.count for pool in pools if pool] == [wanted or cores]
    (session,) = sessions
    default = onnxruntime.SessionOptions()
    assert session.intra_op_num_threads == wanted
    for option in ("graph_optimization_level", "execution_mode", "inter_op_num_threads", "enable_cpu_mem_arena"):
        assert getattr(session, option) == getattr(default, option)
    with pytest.raises(RuntimeError, match="allow_spinning"):
        session.get_session_config_entry("session.intra_op.allow_spinning")


def test_the_table_of_service_has_rates_and_memory() -> None:
    rates = {"contexts": {"median": 30.0}, "executable": {"median": 20.0}, "session": {"median": 25.0}}
    ratio = {
        "contexts": {"median": 1.2, "interval": [1.1, 1.3]},
        "executable": {"median": 0.8, "interval": [0.7, 0.9]},
    }
    row = {"concurrent": {"calls_per_s": rates, "ratio": ratio}}
    memory = {"plan": 60.0, "session": 346.0, "one plan": 57.0, "one session": 148.0}
    results = {"environment": {"gpu": "none", "cpu": "x", "commit": "abc"}, "models": {"m": row | memory}}
    _, _, first, _, below = cpu_service.markdown(results).splitlines()
    assert first == "| m | 30.0 / 25.0 (1.20) | 20.0 (0.80) | 60 / 346 | 57 / 148 |"
    throughput = "At least the session's throughput: missed by m, executable."
    assert below == f"{throughput} Four loads below four sessions: met by all. Commit abc; x."


def test_threads_that_call_are_counted_together() -> None:
    calls: list[float] = []
    begin = time.perf_counter()
    rate = cpu_service.throughput([lambda: calls.append(time.sleep(0.01) or 1.0)] * 2, 0.2)
    assert len(calls) / (time.perf_counter() - begin) <= rate <= len(calls) / 0.2
    assert len(calls) <= 42


@pytest.mark.parametrize("program", [cpu_overhead, cpu_service])
def test_a_row_keeps_the_commit_that_it_was_measured_on(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(command: list[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        found = {case: {"launches": 7} for case in asked} if "--print" in command else 1.0
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(found))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(environment, "describe", lambda: {"commit": environment.commit()})
    monkeypatch.setattr(program, "prepared", lambda *_: (tmp_path, tmp_path))
    monkeypatch.setattr(program, "RESULTS", tmp_path / "results.json")
    first, second, *_ = CASES
    for commit, cases, model, commits in (
        ("abc", [first, second], "", {"abc"}),
        ("def", [first], first, {"abc", "def"}),
        ("def", [second], second, {"def"}),
    ):
        monkeypatch.setenv("NIMBLEC_COMMIT", commit)
        asked[:] = cases
        program._measure_all(cases, argparse.Namespace(model=model, setting=None, seconds=0.1), tmp_path)
        assert set(environment.read(program.RESULTS)["commits"].values()) == commits
