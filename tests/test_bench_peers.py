"""The benchmark's command line, its tables and its plots, from made-up figures."""

import json
import math
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bench import environment, peers, peers_table
from bench.nimblec_peer import work
from bench.turns import Job, Result
from nimblert import container
from nimblert.plan import Launch


def figures(wall: float, kernels: int = 10) -> dict[str, Any]:
    spread = {"p5": wall - 1, "median": wall, "p95": wall + 1}
    return {"wall_us": spread, "gpu_us": {**spread, "median": wall / 2}, "kernels": kernels}


RESULTS = {
    "models": {
        "bench.models.one:fp16": {
            "eager": figures(3000),
            "compile": figures(600),
            "freeze": figures(500, 100),
            "autotune": {"failed": "took longer than 400 s"},
            "-O0": figures(800),
            "-O1": figures(250, 60),
        },
        "bench.models.two:fp16": {"eager": figures(900), "compile": figures(400), "-O1": figures(100)},
        "other:three": {"eager": {"failed": "no memory"}, "-O1": figures(50)},
    }
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_ratios_to_the_best_that_was_measured_and_their_geometric_means() -> None:
    head, _, one, two, three, mean = map(cells, peers_table.markdown(RESULTS).splitlines())
    assert head[:7] == ["model", "eager", "compile", "freeze", "autotune", "`-O0`", "`-O1`"]
    assert one == ["one:fp16", "3000", "600", "500", "-", "800", "250", "250 / 125", "100 / 60", "2.00", "12.00"]
    assert two == ["two:fp16", "900", "400", "-", "-", "-", "100", "200 / 50", "10 / 10", "4.00", "9.00"]
    assert three == ["other:three", "-", "-", "-", "-", "-", "50", "- / 25", "- / 10", "-", "-"]
    assert mean[0] == "geometric mean"
    assert mean[-2:] == [f"**{math.sqrt(2 * 4):.2f}**", f"**{math.sqrt(12 * 9):.2f}**"]
    assert len(head) == len(one) == len(mean)


def test_the_geometric_mean_of_nothing_is_nothing() -> None:
    assert peers_table.geometric_mean([None]) is None
    assert peers_table.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)


BATCHES = {
    "models": {
        "m:fp16_batch_16": {"compile": figures(40), "-O1": figures(20)},
        "m:fp16": {"compile": figures(30), "freeze": figures(24), "-O1": figures(12)},
        "n:fp16_batch_4": {"-O1": figures(9)},
    }
}


def test_the_table_of_batches_has_a_line_for_each_network_and_a_column_for_each_size() -> None:
    head, _, first, second = map(cells, peers_table.batches(BATCHES).splitlines())
    assert [name.split(":")[0] for name in head] == ["model", "batch 1", "batch 4", "batch 16"]
    assert first == ["m:fp16", "24 / 12 (2.00)", "- / - (-)", "40 / 20 (2.00)"]
    assert second == ["n:fp16", "- / - (-)", "- / 9 (-)", "- / - (-)"]


def planned(*arguments: str) -> list[Job]:
    return list(chain.from_iterable(peers.jobs(peers.parser().parse_args(arguments))))


def test_all_models_run_in_all_modes_those_that_are_tuned_first() -> None:
    jobs = planned("--levels", "0,1")
    assert list(dict.fromkeys(j.model for j in jobs))[: len(peers.TUNED)] == list(peers.TUNED)
    assert [j.model for j in jobs if j.mode == "autotune"] == list(peers.TUNED)
    assert [j.mode for j in jobs if j.model == "bench.models.unet:fp16"] == [
        *("eager", "graph", "compile", "freeze", "-O0", "-O1")
    ]
    assert len({(j.model, j.mode) for j in jobs}) == len(jobs) == len(peers.MODELS) * 6 + len(peers.TUNED)


@pytest.mark.parametrize(("asked", "tuned"), [("some", peers.TUNED), ("all", peers.MODELS), ("none", ())])
def test_torch_tunes_what_it_is_asked_to(asked: str, tuned: tuple[str, ...]) -> None:
    jobs = planned("--modes", "eager", "--tune", asked)
    assert {j.model for j in jobs if j.mode == "autotune"} == set(tuned)


def test_each_gpu_has_its_cores_and_takes_on_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    options = peers.parser().parse_args(
        ["--gpus", "2", "--jobs", "2", "--modes", "eager", "--levels", "1", "a:a", "b:b"]
    )
    first, second = peers.places(options)
    assert (first.prefix, second.prefix) == (("taskset", "--cpu-list", "0,1,2,3"), ("taskset", "--cpu-list", "4,5,6,7"))
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in (first, second)] == ["5", "7"]
    assert {place.environment["OMP_NUM_THREADS"] for place in (first, second)} == {"2"}
    one, two = iter(first.jobs), iter(second.jobs)
    assert [(j.model, j.mode) for j in (next(one), next(two), next(one), next(two))] == [
        *(("a:a", "eager"), ("b:b", "eager"), ("a:a", "-O1"), ("b:b", "-O1"))
    ]
    assert not list(one)
    assert not list(two)


def test_fp32_is_asked_of_both_sides() -> None:
    jobs = planned("--precision", "fp32", "--modes", "eager")
    assert all(j.model.endswith(":fp32") and "--fp32" in j.command for j in jobs)
    assert {j.mode for j in jobs} == {"eager", "-O0", "-O1", "-O2"}
    assert not [j for j in planned() if "--fp32" in j.command]


def test_batches_are_four_networks_at_four_sizes() -> None:
    specs = {j.model for j in planned("--batches")}
    assert len(specs) == 16
    assert {"bench.models.bert_base:fp16", "bench.models.bert_base:fp16_batch_64"} <= specs


@pytest.fixture
def fake_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_turns(places: Any, *, done: Any, **_: Any) -> None:
        for job in chain.from_iterable(place.jobs for place in places):
            result: Result = figures(100.0) if job.mode != "graph" else {"failed": "no memory"}
            done(job, result)

    monkeypatch.setattr(peers, "take_turns", take_turns)


@pytest.mark.usefixtures("fake_turns")
def test_measured_figures_are_written_with_what_they_were_measured_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "peers.json"
    command = ["--output", str(path), "--levels", "1", "a:b"]
    peers.main(["--modes", "eager,graph", *command])
    written = json.loads(path.read_text())
    assert written["environment"]["gpu"]
    assert set(written["models"]["a:b"]) == {"eager", "graph", "-O1"}
    assert written["models"]["a:b"]["graph"] == {"failed": "no memory", "jobs": 8}
    printed = capsys.readouterr().out
    assert "a:b graph  no memory" in printed
    assert "| geometric mean |" in printed
    peers.main(["--modes", "compile", "--add", *command])
    assert set(json.loads(path.read_text())["models"]["a:b"]) == {"eager", "graph", "compile", "-O1"}
    peers.main(["--modes", "compile", *command])
    assert set(json.loads(path.read_text())["models"]["a:b"]) == {"compile", "-O1"}


def test_tables_are_printed_from_a_file_of_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(RESULTS))
    peers.main(["--markdown", "--output", str(path)])
    assert capsys.readouterr().out == peers_table.markdown(RESULTS) + "\n"


def test_a_file_that_is_not_there_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none\.json: there is no such file"):
        peers.main(["--markdown", "--output", str(tmp_path / "none.json")])


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
    plan = container.read(Path(__file__).parent / "data" / "triton_block.plan")
    told = work(plan)
    launches = [command for command in plan.programs[0].commands if isinstance(command, Launch)]
    assert sum(row["count"] for row in told.values()) >= len(launches) > 0
    assert {plan.kernels[launch.kernel].symbol for launch in launches} <= set(" ".join(told).split())
    assert all(row["mbytes"] > 0 for name, row in told.items() if " " in name)
