"""The benchmarks of the CPU target, on small models."""

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nimblert
from bench import cpu_overhead, cpu_service, cpu_streams, environment
from bench.cpu_overhead import SETTINGS
from nimblec.plan import encoder
from nimblert.cpu import onnx_session, streams

pytestmark = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs onnxruntime")


def test_median_interval_narrows_with_more_values() -> None:
    few, many = (cpu_overhead.median_interval(np.linspace(0, 2, count)) for count in (25, 2501))
    assert few[0] < many[0] < 1 < many[1] < few[1]
    assert cpu_overhead.median_interval([3.0]) == [3.0, 3.0]


def test_measure_times_plan_and_session(tmp_path: Path) -> None:
    paths = cpu_overhead.prepared("bert, 2 layers, 16 tokens", tmp_path)
    assert cpu_overhead.prepared("bert, 2 layers, 16 tokens", tmp_path) == paths
    row = cpu_overhead.measure(*paths, 0.1, threads=1)
    assert row["bit_exact"]
    assert row["launches"] == 1
    assert 0 < row["plan_ms"]["p5"] <= row["plan_ms"]["p95"]
    assert row["session_ms"]["p5"] > 0
    assert row["ratio"]["interval"][0] <= row["ratio"]["median"] <= row["ratio"]["interval"][1]


@pytest.mark.parametrize("setting", SETTINGS)
def test_plan_and_session_have_default_options(
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

    def choosing(pool: streams.Pool | None = None) -> Any:
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
        cores = streams.cores()
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


def test_throughput_counts_all_threads() -> None:
    calls: list[float] = []
    begin = time.perf_counter()
    rate = cpu_service.throughput([lambda: calls.append(time.sleep(0.01) or 1.0)] * 2, 0.2)
    assert len(calls) / (time.perf_counter() - begin) <= rate <= len(calls) / 0.2
    assert len(calls) <= 42


def test_verdict_names_missed_and_undecided() -> None:
    intervals = {"a": [0.9, 1.0], "b": [1.0, 1.1], "c": [1.04, 1.1]}
    assert cpu_overhead.verdict(intervals, most=1.03) == "missed by c, undecided by b."
    assert cpu_overhead.verdict(intervals, least=0.95) == "undecided by a."
    assert cpu_overhead.verdict(intervals) == "met by all."


@pytest.mark.parametrize("program", [cpu_overhead, cpu_service])
def test_command_measures_a_model(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = "bert, 2 layers, 16 tokens"
    monkeypatch.setattr(program, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr("sys.argv", ["", "--model", case, "--seconds", "0.1", "--folder", str(tmp_path)])
    monkeypatch.setenv("NIMBLEC_COMMIT", "abc")
    program.main()
    found = environment.read(program.RESULTS)
    assert [*(found["models"] if "models" in found else found["settings"]["one core"])] == [case]
    assert {*found["commits"].values()} == {"abc"}


def test_streams_alternate_between_policies(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    row = cpu_streams.measure(lambda: cpu_streams.towers(8, 4), tmp_path, repeats=12)
    assert row["bit_exact"]
    assert row["streams"]["1"] == 1
    assert min(spread["median"] for spread in row["ms"].values()) > 0
