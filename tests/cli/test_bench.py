"""nimblec bench: what it prints and refuses, and how Ctrl-C ends it."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CommandLine
from cpu_plans import bent_sum

from nimblec.base.installation import environment
from nimblert.context import Context

QUICK = ("--warm-up", "0", "--duration", "0.05")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tanh(x) + tanh(x) as a plan."""
    return bent_sum(tmp_path_factory.mktemp("bench"))


def test_the_table_has_every_percentile(nimblec: CommandLine, path: Path) -> None:
    done = nimblec("bench", path, *QUICK)
    assert (done.status, done.err) == (0, "")
    names = [line.split()[0] for line in done.out.splitlines() if line.split()]
    assert names == ["runs", "throughput", "min", "p50", "p90", "p95", "p99", "p99.9", "max"]


@pytest.mark.parametrize(("contexts", "count"), [([], 3), (["--contexts", "1"], 1), (["--contexts", "2"], 2)])
@pytest.mark.parametrize("replay", [[], ["--replay"]])
def test_the_figures_as_json(
    nimblec: CommandLine,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    contexts: list[str],
    count: int,
    replay: list[str],
) -> None:
    taken: set[int] = set()
    name = "replay" if replay else "run"
    method = getattr(Context, name)

    def noted(context: Context, *args: Any, **kwargs: Any) -> Any:
        taken.add(id(context))
        return method(context, *args, **kwargs)

    monkeypatch.setattr(Context, name, noted)
    done = nimblec("bench", path, *QUICK, "--json", "--threads", "3", *contexts, *replay)
    facts = json.loads(done.out)
    assert len(taken) == count
    assert (facts["mode"], facts["threads"], facts["contexts"]) == (name, 3, count)
    assert facts["runs"] >= 3
    assert facts["throughput"] == pytest.approx(facts["runs"] / facts["seconds"])
    assert list(facts["latency"]) == ["min", "p50", "p90", "p95", "p99", "p99.9", "max"]
    assert list(facts["latency"].values()) == sorted(facts["latency"].values())
    assert facts["commands"] == []


@pytest.mark.parametrize(
    ("joins", "ops"), [(False, {("Tanh", "bend"), ("Add", "sum")}), (True, {("Tanh to Add (2 ops)", "bend + sum")})]
)
def test_the_profile_lists_the_commands_with_their_ops(
    nimblec: CommandLine, tmp_path: Path, joins: bool, ops: set[tuple[str, str]]
) -> None:
    path = bent_sum(tmp_path, joins=joins)
    commands = json.loads(nimblec("bench", path, *QUICK, "--profile", "--json").out)["commands"]
    assert {(c["kind"], c["op"], c["source"]) for c in commands} == {("launch", *op) for op in ops}
    times = [c["nanoseconds"] for c in commands]
    assert times == sorted(times, reverse=True)
    out = nimblec("bench", path, *QUICK, "--profile").out
    assert f"Commands, each run alone: {len(ops)}, " in out
    assert sum(" launch " in line for line in out.splitlines()) == len(ops)


def test_bench_runs_given_inputs(
    nimblec: CommandLine, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.arange(4, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    seen: list[np.ndarray] = []
    run = Context.run

    def noted(context: Context, arrays: dict[str, np.ndarray], **kwargs: Any) -> Any:
        seen.append(arrays["x"])
        return run(context, arrays, **kwargs)

    monkeypatch.setattr(Context, "run", noted)
    assert nimblec("bench", path, *QUICK, "--entry", "main", "--input", f"x={tmp_path / 'x.npy'}").status == 0
    assert all(np.array_equal(array, x) for array in seen)
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--threads", "0"], "'--threads': 0 is not in the range"),
        (["--threads", "2.5"], "'--threads': '2.5' is not a valid integer"),
        (["--duration", "-1"], "'--duration': -1.0 is not in the range"),
        (["--duration", "0"], "'--duration': 0.0 is not in the range"),
        (["--duration", "nan"], "duration: nan seconds"),
        (["--warm-up", "-1"], "'--warm-up': -1.0 is not in the range"),
        (["--contexts", "0"], "'--contexts': 0 is not in the range"),
        (["--contexts", "3", "--threads", "2"], "--contexts: 3 for 2 threads, expected at most one for each"),
        (["--entry", "other"], "entry 'other': not found"),
        (["--input", "z=none.npy"], "none.npy: No such file"),
    ],
)
def test_wrong_arguments_are_refused(nimblec: CommandLine, path: Path, arguments: list[str], words: str) -> None:
    assert words in nimblec.refused("bench", path, *arguments)


STUCK = """
import itertools, os, signal, sys, time
from nimblec.cli import main
from nimblert.context import Context
counter, run = itertools.count(), Context.run
def stuck(*args, **kwargs):
    if next(counter) == 20:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
    return run(*args, **kwargs)
Context.run = stuck
main()
"""


def test_ctrl_c_waits_for_no_run_that_does_not_end(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK, "bench", path, "--warm-up", "0", "--duration", "600", "--json"],
        env=environment(), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")
