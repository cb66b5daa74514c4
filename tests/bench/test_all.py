"""The table of schedules, and the queue of all tables, from made-up figures."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import bench.all
from bench import decoder, peers, refit, running, schedules, sizes, training, training_bits
from bench.turns import Job

SPREAD = {"p5": 1.0, "median": 500.0, "p95": 501.0}
OURS = {
    "kernels_us": SPREAD,
    "chain_us": {**SPREAD, "median": 900.0},
    "antichain": 6,
    "policy": "8",
    "streams": 8,
    "syncs": 40,
    "arena_nbytes": 3 << 20,
    "arena_lower_bound_nbytes": 2 << 20,
    "commit": "abc",
}
TORCH = {"kernels_us": {**SPREAD, "median": 950.0}, "graph_pool_nbytes": 58 << 20, "multiply_adds": 5_700_000_000}
RESULTS: dict[str, Any] = {
    "environment": {"gpu": "none", "cpu": "x"},
    "models": {
        "bench.models.inception_v3:fp32": {"-O0": OURS, "graph": {**TORCH, "noisy": ["kernels"], "commit": "abc"}},
        "bench.models.darts:fp32": {"-O0": {"failed": "no memory", "commit": "abc"}},
    },
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_schedules_has_the_gain_the_concurrency_and_the_memory() -> None:
    head, _, first, second, mean, _, below = map(cells, schedules.markdown(RESULTS).splitlines())
    assert dict(zip(head, first, strict=True)) == {
        "model": "inception_v3:fp32",
        "multiply-adds, 10^9": "5.70",
        "degree of concurrency": "6",
        "torch's graph of eager, us": "~950",
        "chain, us": "900",
        "auto, us": "500",
        "gain": "1.80",
        "policy": "8",
        "streams / syncs": "8 / 40",
        "arena / bound / torch's pool, MiB": "3.0 / 2.0 / 58.0",
    }
    assert second == ["darts:fp32", "-", "-", "-", "-", "-", "-", "-", "- / -", "- / - / -"]
    assert mean[6] == "1.80"
    assert below[0].startswith("Commit abc; x")


def test_float32_is_without_tf32_on_both_sides() -> None:
    jobs = list(chain.from_iterable(schedules.table(schedules.parser().parse_args([])).jobs))
    assert len(jobs) == 2 * len(schedules.MODELS)
    assert all(("--fp32" in job.command) == job.model.endswith(":fp32") for job in jobs)
    assert all("--chain" in job.command for job in jobs if job.mode == "-O0")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, Job]]:
    """What would have been started, and how many beside each other."""
    began: list[tuple[int, Job]] = []

    def take_turns(places: Any, *, side_by_side: int, done: Any, **_: Any) -> None:
        for job in chain.from_iterable(place.jobs for place in places):
            began.append((side_by_side, job))
            done(job, {"stopped_s": 0.0})

    monkeypatch.setattr(running, "take_turns", take_turns)
    for program in (peers, schedules, training, decoder, training_bits, sizes, refit):
        monkeypatch.setattr(program, "FOLDER", tmp_path)
    monkeypatch.setenv("NIMBLEC_COMMIT", "abc")
    return began


def test_all_tables_are_one_queue_and_what_needs_a_gpu_to_itself_comes_after(
    started: list[tuple[int, Job]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.all.main(["--gpus", "2", "--jobs", "6"])
    names = list(dict.fromkeys(Path(job.table).stem for _, job in started))
    networks = ["peers", "schedules", "batches", "peers_fp32"]
    steps = ["training", "training_bf16", "training_nasnet", "training_batches", "training_bf16_batches"]
    assert names == [*networks, "decoder", *steps, "training_bits", "sizes", "refit", "singles"]
    assert {beside for beside, job in started if job.mode in {"single", "autotune"}} == {1}
    assert {beside for beside, job in started if job.mode not in {"single", "autotune"}} == {6}
    assert len({(job.table, job.model, job.mode) for _, job in started}) == len(started)
    printed = capsys.readouterr().out.splitlines()[-len(bench.all.NAMES) :]
    assert printed[0] == f"peers: {len(peers.MODELS) * 5} of {len(peers.MODELS) * 5} rows"
    assert printed[-2] == f"peers: {len(peers.TUNED)} of {len(peers.TUNED)} rows"
    started.clear()
    path = tmp_path / "schedules.json"
    figures = json.loads(path.read_text())
    del figures["models"]["bench.models.darts:fp16"]
    path.write_text(json.dumps(figures))
    bench.all.main([])
    assert [(job.model, job.mode) for _, job in started] == [("bench.models.darts:fp16", m) for m in ("-O0", "graph")]


def test_what_took_longest_the_last_time_starts_first(started: list[tuple[int, Job]], tmp_path: Path) -> None:
    """The machine is not left with one long process at the end."""
    rows = {
        model: {mode: {"commit": "before", "prepare_s": seconds} for mode in ("-O0", "graph")}
        for model, seconds in (("bench.models.darts:fp16", 3.0), ("bench.models.nasnet_a_large:fp16", 20.0))
    }
    (tmp_path / "schedules.json").write_text(json.dumps({"models": rows}))
    bench.all.main(["--only", "schedules"])
    models = [job.model for _, job in started]
    first = ["bench.models.nasnet_a_large:fp16", "bench.models.darts:fp16"]
    assert list(dict.fromkeys(models)) == [*first, *(model for model in schedules.MODELS if model not in first)]


def test_every_single_program_is_there(started: list[tuple[int, Job]]) -> None:
    bench.all.main(["--only", "singles"])
    assert len(started) == len(bench.all.SINGLES)
    for _, job in started:
        assert (Path(bench.all.__file__).parent / f"{job.command[3]}.py").is_file()


def test_an_unknown_table_is_refused() -> None:
    known = ", ".join(bench.all.NAMES)
    with pytest.raises(SystemExit, match=f"--only networks: expected names from {known}"):
        bench.all.main(["--only", "peers,networks"])
