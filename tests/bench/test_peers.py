"""The queue of `bench.all` and `bench.peers`: jobs, files of figures and statistics, without running a model."""

import json
import math
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import bench.all
from bench import environment, headline, others, peers, peers_table, running
from bench.nimblec_peer import work
from bench.turns import Job, Result
from nimblert.check.verify import read_plan
from nimblert.plan import Launch


def timed(kernels_us: float) -> dict[str, Any]:
    return {"kernels_us": {"median": kernels_us}}


def test_geometric_mean_skips_missing_values() -> None:
    assert peers_table.geometric_mean([None]) is None
    assert peers_table.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)


def test_ratio_is_of_the_fastest_modes() -> None:
    figures = {"compile": timed(100), "freeze": timed(80), "eager": timed(1), "-O1": timed(50), "-O2": timed(40)}
    assert peers_table.ratio(figures, peers_table.COMPARISONS[0]) == 2.0
    assert peers_table.ratio({"compile": timed(100)}, peers_table.COMPARISONS[0]) is None
    assert peers_table.microseconds(figures, "-O2", "call_us") == math.inf


def test_headline_is_of_networks_at_batch_1_with_both_sides() -> None:
    models = {
        "a:fp16": {"compile": timed(100), "freeze": timed(80), "-O2": timed(40)},
        "a:fp16_batch_4": {"compile": timed(1000), "-O2": timed(1)},
        "b:fp16": {"compile": timed(80), "-O2": timed(10)},
        "c:fp16": {"compile": timed(80)},
    }
    assert headline.speedup({"models": models}) == (pytest.approx(4), 2)


def planned(*arguments: str) -> list[Job]:
    return list(chain.from_iterable(peers.table(peers.parser().parse_args(arguments)).jobs))


def test_peers_run_tuned_models_first_in_all_modes() -> None:
    jobs = planned("--levels", "0,1")
    assert list(dict.fromkeys(j.model for j in jobs))[: len(peers.TUNED)] == list(peers.TUNED)
    assert [j.model for j in jobs if j.mode == "autotune"] == list(peers.TUNED)
    assert {j.limit_s for j in jobs if j.mode == "autotune"} == {480}
    modes = ["eager", "graph", "compile", "freeze", "-O0", "-O1"]
    assert [j.mode for j in jobs if j.model == "bench.models.unet:fp16"] == modes
    assert len({(j.model, j.mode) for j in jobs}) == len(jobs) == len(peers.MODELS) * len(modes) + len(peers.TUNED)
    assert all("--fp32" in j.command for j in planned("--precision", "fp32"))
    assert len({j.model for j in planned("--batches")}) == 16


def test_others_measure_tuned_networks_in_aotinductor() -> None:
    jobs = [job for jobs in others.table(others.parser().parse_args([])).jobs for job in jobs]
    assert {job.model for job in jobs if job.mode == "AOTInductor"} == set(peers.TUNED)
    assert {job.mode for job in jobs} == {"AOTInductor", "ONNX Runtime CUDA", "JAX", "JAX, cuDNN attention", "IREE"}


def test_places_share_cores_and_take_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    asked = ["--gpus", "2", "--jobs", "2", "--modes", "eager", "--levels", "1", "a:a", "b:b"]
    options = peers.parser().parse_args(asked)
    first, second = running.places(iter(peers.table(options).jobs), options)
    assert (first.prefix, second.prefix) == (("taskset", "--cpu-list", "0,1,2,3"), ("taskset", "--cpu-list", "4,5,6,7"))
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in (first, second)] == ["5", "7"]
    assert {place.environment["OMP_NUM_THREADS"] for place in (first, second)} == {"2"}
    one, two = iter(first.jobs), iter(second.jobs)
    taken = [(job.model, job.mode) for job in (next(one), next(two), next(one), next(two))]
    assert taken == [("a:a", "eager"), ("b:b", "eager"), ("a:a", "-O1"), ("b:b", "-O1")]
    assert not [*one, *two]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(SystemExit, match="--gpus 2: CUDA_VISIBLE_DEVICES=5 names 1"):
        list(running.places(iter(()), options))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, Job]]:
    """Return the jobs that would have been started, each with the number of those beside it; "graph" fails."""
    began: list[tuple[int, Job]] = []

    def take_turns(places: Any, *, side_by_side: int, done: Any, **_: Any) -> None:
        for job in chain.from_iterable(place.jobs for place in places):
            began.append((side_by_side, job))
            result: Result = {"failed": "no memory"} if job.mode == "graph" else {"prepare_s": 1.0}
            done(job, result)

    monkeypatch.setattr(running, "take_turns", take_turns)
    monkeypatch.setattr(running, "FOLDER", tmp_path)
    monkeypatch.setenv("NIMBLEC_COMMIT", "abc")
    return began


def test_all_tables_are_one_queue_before_tuning(
    started: list[tuple[int, Job]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.all.main(["--gpus", "2", "--jobs", "6"])
    names = list(dict.fromkeys(Path(job.table).stem for _, job in started))
    assert names == list(dict.fromkeys(file for _, file, _ in bench.all.COMMANDS.values()))
    assert {beside for beside, job in started if job.mode == "autotune"} == {1}
    assert {beside for beside, job in started if job.mode != "autotune"} == {6}
    assert len({(job.table, job.model, job.mode) for _, job in started}) == len(started)
    assert f"peers: {len(peers.TUNED)} of {len(peers.TUNED)} rows" in capsys.readouterr().out
    started.clear()
    path = tmp_path / "sizes.json"
    figures = json.loads(path.read_text())
    del figures["models"]["bench.models.sized:resnet50"]
    path.write_text(json.dumps(figures))
    bench.all.main(["--only", "peers,sizes"])
    assert {job.mode for _, job in started[:-1]} == {"graph"}, "failed rows are tried again"
    assert started[-1][1].model == "bench.models.sized:resnet50"
    with pytest.raises(SystemExit, match="--only networks: expected names from zoo, peers, schedules"):
        bench.all.main(["--only", "peers,networks"])


def test_measure_starts_with_the_slowest_model(started: list[tuple[int, Job]], tmp_path: Path) -> None:
    rows = {m: {"-O2": {"commit": "before", "prepare_s": seconds}} for m, seconds in (("a:a", 3.0), ("b:b", 20.0))}
    (tmp_path / "peers.json").write_text(json.dumps({"models": rows}))
    options = peers.parser().parse_args(["--modes", "", "--add", "a:a", "b:b"])
    running.measure([peers.table(options)], options)
    assert [job.model for _, job in started] == ["b:b", "a:a"]


def test_add_keeps_rows_of_this_commit_and_gpu(
    tmp_path: Path, started: list[tuple[int, Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "peers.json"

    def run(modes: str, *flags: str) -> list[str]:
        started.clear()
        options = peers.parser().parse_args(["--modes", modes, *flags, "--output", str(path), "a:b"])
        running.measure([peers.table(options)], options)
        return [job.mode for _, job in started]

    run("compile")
    written = json.loads(path.read_text())
    assert {mode: row["commit"] for mode, row in written["models"]["a:b"].items()} == {"compile": "abc", "-O2": "abc"}
    assert run("compile,freeze", "--add") == ["freeze"]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(environment, "_gpu", lambda: "NVIDIA H100, 580.1")
        assert run("compile", "--add") == ["compile", "-O2"]
        with pytest.raises(SystemExit, match="rows of several GPUs: NVIDIA H100, none"):
            environment.provenance(environment.read(path))
    for commit in ("abc dirty", "abc dirty", "unknown"):
        monkeypatch.setenv("NIMBLEC_COMMIT", commit)
        assert run("compile", "--add") == ["compile", "-O2"]
    assert run("compile", "--add", "--ours") == ["-O2"]
    results = environment.read(path)
    assert "Commit unknown (other frameworks' rows: abc); " in environment.provenance(results)
    results["models"]["c:d"] = {"-O2": {"commit": "abc"}}
    with pytest.raises(SystemExit, match="rows of several commits: abc, unknown"):
        environment.provenance(results)


def test_commit_names_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NIMBLEC_COMMIT", raising=False)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "bench" / "environment.py"))
    assert environment.commit() == "unknown"
    (tmp_path / "bench" / "a.py").touch()
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    named = environment.commit()
    (tmp_path / "bench" / "results" / "peers.json").touch()
    assert environment.commit() == named
    assert len(named) == 12
    (tmp_path / "bench" / "a.py").write_text("1")
    assert environment.commit() == f"{named} dirty"


def test_read_ends_where_nothing_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(SystemExit) as caught:
        peers.main(["--markdown", "--output", str(path)])
    assert caught.value.code == environment.NOT_MEASURED
    assert capsys.readouterr().err == f"{path}: not measured yet\n"


@pytest.mark.parametrize("name", ["peers", "batches"])
def test_plots_are_reproducible(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: not installed")
    flags = ["--batches"] if name == "batches" else []
    drawn = []
    for file in ("first.svg", "second.svg"):
        peers.main(["--plot", str(tmp_path / file), *flags])
        drawn.append((tmp_path / file).read_text())
    assert "<svg" in drawn[0]
    assert drawn[0] == drawn[1]


def test_work_lists_each_kernel() -> None:
    plan = read_plan(Path(__file__).parents[1] / "data" / "triton_block.plan")
    told = work(plan)
    launches = [command for command in plan.programs[0].commands if isinstance(command, Launch)]
    assert sum(row["count"] for row in told.values()) >= len(launches) > 0
    assert {plan.kernels[launch.kernel].symbol for launch in launches} <= set(" ".join(told).split())
    assert all(row["mbytes"] > 0 for name, row in told.items() if " " in name)
