"""The benchmark's command line, its tables and its plots, from made-up figures."""

import json
import math
import subprocess
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bench import calls, environment, peers, peers_table, resume, running
from bench.nimblec_peer import work
from bench.turns import Job, Result
from nimblert.check.verify import read_plan
from nimblert.plan import Launch


def spread(median: float) -> dict[str, float]:
    return {"p5": median - 1, "median": median, "p95": median + 1}


def figures(kernels_us: float, launches: int = 10, **more: Any) -> dict[str, Any]:
    """Of a mode of torch whose call takes twice its kernels, from arrays four times; of ours, with `ours`."""
    clocks = {"kernels_us": spread(kernels_us), "replay_us": spread(kernels_us + 8)}
    clocks |= {"call_us": spread(2 * kernels_us), "numpy_us": spread(4 * kernels_us)}
    return {**clocks, "kernels": launches, "error": 2e-3, "commit": "abc", **more}


def eager(call_us: float) -> dict[str, Any]:
    return {"call_us": spread(call_us), "error": 1e-3, "kernels": 30, "commit": "abc"}


def ours(kernels_us: float, launches: int = 10, **more: Any) -> dict[str, Any]:
    made = figures(kernels_us, launches, **more)
    del made["call_us"]
    return made


FAILED = {"failed": "took longer than 400 s", "commit": "abc"}
ENVIRONMENT = {"gpu": "NVIDIA H200, 580.1", "cpu": "x", "torch": "2.11.0"}
RESULTS = {
    "environment": ENVIRONMENT,
    "models": {
        "bench.models.one:fp16": {
            "eager": eager(3024),
            "compile": figures(600),
            "freeze": figures(500, 100),
            "autotune": FAILED,
            "-O0": ours(800),
            "-O2": ours(250, 60),
        },
        "bench.models.two:fp16": {
            "eager": eager(926.4),
            "compile": figures(400, noisy=["call"]),
            "-O2": ours(500, noisy=["kernels"]),
        },
        "other:three": {"eager": FAILED, "-O2": ours(50)},
    },
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_call_is_laid_beside_its_replay_and_what_it_may_take() -> None:
    more = {"other_order_us": spread(450), "launch_us": spread(3.5), "call_us": spread(264)}
    more["page_locked_us"] = spread(516)
    moved = {"moved_nbytes": 2_000_000, "page_locked_gbps": {"up": 50.0, "down": 55.0}}
    theirs = {**figures(400), "launch_us": spread(5.25)}
    own = {**figures(250), **more, **moved}
    results = {**RESULTS, "models": {"bench.models.one:fp16": {"compile": theirs, "-O2": own}}}
    _, _, one, mean, *_ = map(cells, calls.markdown(results).splitlines())
    assert one == ["one:fp16", "258", "1000 (3.88; 335)", "450", "516 (2.00)", "264 (14.0)", "3.5 / 5.2"]
    assert (mean[2], mean[4]) == ("3.88", "2.00")
    assert "800 / 264 (3.03)" in peers_table.markdown(results)


def test_the_table_compares_like_with_like_and_has_geometric_means() -> None:
    head, _, one, two, mean, _, below = map(cells, peers_table.markdown(RESULTS).splitlines())
    assert head == [
        "model",
        *("kernels: torch / ours, us", "call / our replay: torch / ours, us", "call from numpy: torch / ours, us"),
        *("eager's call / our replay: torch / ours, us", "launches: torch / ours", "error: eager / torch / ours"),
    ]
    assert one == [
        *("one:fp16", "500 / 250 (2.00)", "1000 / 258 (3.88)", "2000 / 1000 (2.00)", "3024 / 258 (11.72)"),
        *("100 / 60", "1.0e-03 / 2.0e-03 / 2.0e-03"),
    ]
    assert two[1:4] == ["400 / ~500 (**0.80**)", "~800 / ~508 (1.57)", "1600 / 2000 (**0.80**)"]
    assert mean[:2] == ["geometric mean", f"{math.sqrt(2 * 0.8):.2f}"]
    assert below[0].startswith("Commit abc; NVIDIA H200, 580.1, torch 2.11.0.")
    assert below[0].endswith("Not measured on both sides: other:three.")


def test_max_autotune_has_a_column_where_it_was_measured() -> None:
    models = {"a:b": {"autotune": figures(300), "freeze": figures(200), "-O2": ours(100)}}
    head, _, line, *_ = map(cells, peers_table.markdown({"environment": ENVIRONMENT, "models": models}).splitlines())
    assert dict(zip(head, line, strict=True))["max-autotune: kernels: torch / ours, us"] == "300 / 100 (3.00)"
    assert line[1] == "200 / 100 (2.00)"


def test_rows_of_several_commits_make_no_table() -> None:
    models = {"a:b": {"freeze": figures(200), "-O2": {**ours(100), "commit": "def"}}}
    with pytest.raises(SystemExit, match="rows of several commits: abc, def"):
        peers_table.markdown({"environment": ENVIRONMENT, "models": models})


def test_the_geometric_mean_of_nothing_is_nothing() -> None:
    assert peers_table.geometric_mean([None]) is None
    assert peers_table.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)


BATCHES = {
    "environment": ENVIRONMENT,
    "models": {
        "m:fp16_batch_16": {"compile": figures(40), "-O2": ours(20)},
        "m:fp16": {"compile": figures(30), "freeze": figures(24), "-O2": ours(12)},
        "m:fp16_batch_4": {"compile": figures(18), "-O2": ours(9)},
    },
}


def test_batch_sizes_of_a_network_stand_in_their_order() -> None:
    _, _, *lines = map(cells, peers_table.markdown(BATCHES).splitlines())
    assert [line[0] for line in lines[:3]] == ["m:fp16", "m:fp16_batch_4", "m:fp16_batch_16"]
    assert [line[1] for line in lines[:3]] == ["24 / 12 (2.00)", "18 / 9 (2.00)", "40 / 20 (2.00)"]


def planned(*arguments: str) -> list[Job]:
    return list(chain.from_iterable(peers.table(peers.parser().parse_args(arguments)).jobs))


def test_all_models_run_in_all_modes_those_that_are_tuned_first() -> None:
    jobs = planned("--levels", "0,1")
    assert list(dict.fromkeys(j.model for j in jobs))[: len(peers.TUNED)] == list(peers.TUNED)
    assert [j.model for j in jobs if j.mode == "autotune"] == list(peers.TUNED)
    modes = ["eager", "graph", "compile", "freeze", "-O0", "-O1"]
    assert [j.mode for j in jobs if j.model == "bench.models.unet:fp16"] == modes
    assert len({(j.model, j.mode) for j in jobs}) == len(jobs) == len(peers.MODELS) * len(modes) + len(peers.TUNED)


@pytest.mark.parametrize(("asked", "tuned"), [("some", peers.TUNED), ("all", peers.MODELS), ("none", ())])
def test_torch_tunes_what_it_is_asked_to(asked: str, tuned: tuple[str, ...]) -> None:
    jobs = planned("--modes", "eager", "--tune", asked)
    assert {j.model for j in jobs if j.mode == "autotune"} == set(tuned)


def test_each_gpu_has_its_cores_and_takes_on_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    options = peers.parser().parse_args(
        ["--gpus", "2", "--jobs", "2", "--modes", "eager", "--levels", "1", "a:a", "b:b"]
    )
    first, second = running.places(iter(peers.table(options).jobs), options)
    assert (first.prefix, second.prefix) == (("taskset", "--cpu-list", "0,1,2,3"), ("taskset", "--cpu-list", "4,5,6,7"))
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in (first, second)] == ["5", "7"]
    assert {place.environment["OMP_NUM_THREADS"] for place in (first, second)} == {"2"}
    one, two = iter(first.jobs), iter(second.jobs)
    assert [(j.model, j.mode) for j in (next(one), next(two), next(one), next(two))] == [
        *(("a:a", "eager"), ("b:b", "eager"), ("a:a", "-O1"), ("b:b", "-O1"))
    ]
    assert not list(one)
    assert not list(two)


def test_more_gpus_than_are_visible_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    options = peers.parser().parse_args(["--gpus", "2"])
    with pytest.raises(SystemExit, match="--gpus 2: CUDA_VISIBLE_DEVICES=5 names 1"):
        list(running.places(iter(()), options))


def test_fp32_is_asked_of_both_sides() -> None:
    jobs = planned("--precision", "fp32")
    assert all(j.model.endswith(":fp32") and "--fp32" in j.command for j in jobs)
    assert {j.mode for j in jobs} == {"eager", "graph", "compile", "freeze", "-O2"}
    assert not [j for j in planned() if "--fp32" in j.command]


def test_batches_are_four_networks_at_four_sizes() -> None:
    specs = {j.model for j in planned("--batches")}
    assert len(specs) == 16
    assert {"bench.models.bert_base:fp16", "bench.models.bert_base:fp16_batch_64"} <= specs


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What would have been started, in the place of which stand made-up figures."""
    began: list[tuple[str, str]] = []

    def take_turns(places: Any, *, done: Any, **_: Any) -> None:
        for job in chain.from_iterable(place.jobs for place in places):
            began.append((job.model, job.mode))
            result: Result = figures(100.0) if job.mode != "graph" else {"failed": "no memory"}
            result.pop("commit", None)
            done(job, result)

    monkeypatch.setattr(running, "take_turns", take_turns)
    monkeypatch.setenv("NIMBLEC_COMMIT", "abc")
    return began


def test_measured_figures_are_written_with_what_they_were_measured_on(
    tmp_path: Path, started: list[tuple[str, str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "peers.json"
    command = ["--output", str(path), "a:b"]
    peers.main(["--modes", "compile", *command])
    written = json.loads(path.read_text())
    assert written["environment"]["gpu"]
    assert {mode: row["commit"] for mode, row in written["models"]["a:b"].items()} == {"compile": "abc", "-O2": "abc"}
    printed = capsys.readouterr().out
    assert "a:b compile kernels_us 100 call_us 200 numpy_us 400" in printed
    assert "| geometric mean |" in printed
    started.clear()
    peers.main(["--modes", "compile,freeze", "--add", *command])
    assert started == [("a:b", "freeze")]
    assert set(json.loads(path.read_text())["models"]["a:b"]) == {"compile", "freeze", "-O2"}
    started.clear()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(environment, "_gpu", lambda: "NVIDIA H100, 580.1")
        with pytest.raises(SystemExit, match="rows of several GPUs: NVIDIA H100, none"):
            peers.main(["--modes", "compile", "--add", *command])
    assert started == [("a:b", "compile"), ("a:b", "-O2")]
    monkeypatch.setenv("NIMBLEC_COMMIT", "def")
    with pytest.raises(SystemExit, match="rows of several commits"):
        peers.main(["--modes", "compile", "--add", *command])
    peers.main(["--modes", "compile", *command])
    assert set(json.loads(path.read_text())["models"]["a:b"]) == {"compile", "-O2"}


@pytest.mark.parametrize("commit", ["unknown", "abc dirty"])
def test_figures_of_a_state_that_nobody_can_name_are_measured_again(
    tmp_path: Path, started: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    monkeypatch.setenv("NIMBLEC_COMMIT", commit)
    command = ["--modes", "", "--output", str(tmp_path / "peers.json"), "--add", "a:b"]
    peers.main(command)
    peers.main(command)
    assert started == [("a:b", "-O2")] * 2


def test_what_failed_is_said_and_tried_again(tmp_path: Path, started: list[tuple[str, str]]) -> None:
    path = tmp_path / "peers.json"
    options = peers.parser().parse_args(["--output", str(path), "--modes", "graph", "--add", "a:b"])
    table = peers.table(options)
    running.measure([table], options)
    assert running.summary(table) == "peers: 1 of 2 rows\n  a:b graph: no memory"
    started.clear()
    running.measure([table], options)
    assert started == [("a:b", "graph")]


def test_the_state_of_the_code_is_the_commit_that_is_checked_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NIMBLEC_COMMIT", raising=False)
    (tmp_path / "bench").mkdir()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "bench" / "environment.py"))
    assert environment.commit() == "unknown"
    (tmp_path / "bench" / "a.py").touch()
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    named = environment.commit()
    assert len(named) == 12
    (tmp_path / "bench" / "results").mkdir()
    (tmp_path / "bench" / "results" / "peers.json").touch()
    assert environment.commit() == named
    (tmp_path / "bench" / "a.py").write_text("1")
    assert environment.commit() == f"{named} dirty"
    assert environment.is_exact(named)
    assert not environment.is_exact(f"{named} dirty")


def test_tables_are_printed_from_a_file_of_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(RESULTS))
    peers.main(["--markdown", "--output", str(path)])
    assert capsys.readouterr().out == peers_table.markdown(RESULTS) + "\n"


def test_a_file_that_is_not_there_is_said_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.json"
    for program in (peers, resume):
        with pytest.raises(SystemExit) as caught:
            program.main(["--markdown", "--output", str(path)])
        assert caught.value.code == environment.NOT_MEASURED
        assert capsys.readouterr().err == f"{path}: not measured yet\n"


def test_tables_that_nobody_has_measured_yet_leave_the_readme_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "FOLDER", peers.FOLDER / tmp_path.name)
    for flags in ([], ["--batches"], ["--precision", "fp32"]):
        with pytest.raises(SystemExit) as caught:
            peers.main(["--markdown", *flags])
        assert caught.value.code == environment.NOT_MEASURED


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize(("results", "flags"), [(RESULTS, []), (BATCHES, ["--batches"])])
def test_plots_are_drawn_the_same_each_time(tmp_path: Path, results: dict[str, Any], flags: list[str]) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(results))
    drawn = []
    for name in ("first.svg", "second.svg"):
        peers.main(["--plot", str(tmp_path / name), "--output", str(path), *flags])
        drawn.append((tmp_path / name).read_text())
    assert "<svg" in drawn[0]
    assert drawn[0] == drawn[1]


def test_the_work_of_a_plan_is_told_by_kernel() -> None:
    plan = read_plan(Path(__file__).parents[1] / "data" / "triton_block.plan")
    told = work(plan)
    launches = [command for command in plan.programs[0].commands if isinstance(command, Launch)]
    assert sum(row["count"] for row in told.values()) >= len(launches) > 0
    assert {plan.kernels[launch.kernel].symbol for launch in launches} <= set(" ".join(told).split())
    assert all(row["mbytes"] > 0 for name, row in told.items() if " " in name)
