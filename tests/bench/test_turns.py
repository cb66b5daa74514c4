"""Measuring processes take turns, and a failure affects only its own process."""

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from bench.turns import Job, Place, Result, take_turns

READY = "import json, sys, time\nprint('{}', flush=True)\nsys.stdin.readline()\nbegin = time.monotonic()\n"
MEASURED = "print(json.dumps({'begin': begin, 'end': time.monotonic()}), flush=True)\n"


def measuring(seconds: float) -> str:
    """Get ready at once, have the turn for some time, and say when it was."""
    return f"{READY}time.sleep({seconds})\n{MEASURED}"


def job(mode: str, code: str, limit_s: float = 30.0) -> Job:
    return Job(table="t", model="m", mode=mode, command=(sys.executable, "-c", code), limit_s=limit_s)


def run(*jobs: Job, side_by_side: int = 4, stop_after_s: float = 100.0) -> dict[str, Result]:
    results: dict[str, Result] = {}
    take_turns(
        [Place(jobs=jobs, environment=os.environ)],
        side_by_side=side_by_side,
        stop_after_s=stop_after_s,
        done=lambda job, result: results.update({job.mode: result}),
    )
    return results


def test_job_without_a_turn_stops_no_other() -> None:
    results = run(job("single", "print('{\"printed\": 1}')"), job("beside", "import time; time.sleep(0.5)"))
    assert results["single"] == {"stopped_s": 0.0, "printed": 1}
    assert results["beside"] == {"stopped_s": 0.0}


def test_jobs_measure_one_at_a_time() -> None:
    results = run(*(job(str(i), measuring(0.1)) for i in range(6)))
    spans = sorted((r["begin"], r["end"]) for r in results.values())
    assert len(spans) == 6
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_places_prepare_side_by_side_and_measure_alone(tmp_path: Path) -> None:
    meet = (
        "import os, pathlib, time\nfolder = pathlib.Path(os.environ['FOLDER'])\n(folder / os.environ['OWN']).touch()\n"
    )
    meet += "while len(list(folder.iterdir())) < 2: time.sleep(0.01)\n"
    results: dict[str, Result] = {}
    places = [
        Place(
            jobs=[job(own, meet + measuring(0.2))],
            environment={**os.environ, "FOLDER": str(tmp_path)},
            prefix=("env", f"OWN={own}"),
        )
        for own in "ab"
    ]
    take_turns(places, side_by_side=1, stop_after_s=30.0, done=lambda job, result: results.update({job.mode: result}))
    first, second = sorted((result["begin"], result["end"]) for result in results.values())
    assert first[1] <= second[0]


def test_preparing_job_is_stopped_while_another_measures(tmp_path: Path) -> None:
    working, measured = tmp_path / "working", tmp_path / "measured"
    busy = f"""
import json, pathlib, time
times = [time.monotonic()]
while not pathlib.Path({str(measured)!r}).exists():
    times.append(time.monotonic())
    pathlib.Path({str(working)!r}).touch()
    time.sleep(0.005)
print(json.dumps({{"times": times}}))
"""
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(working)!r}).exists(): time.sleep(0.01)\n"
    measure = wait + measuring(0.3) + f"pathlib.Path({str(measured)!r}).touch()\n"
    results = run(job("busy", busy), job("measure", measure))
    span = results["measure"]
    assert not [t for t in results["busy"]["times"] if span["begin"] < t < span["end"]]
    assert results["busy"]["stopped_s"] >= 0.3


def test_failed_job_has_its_reason_and_the_others_go_on() -> None:
    results = run(
        job("advises", r"raise OSError('out of memory\nSearch for it.\n\nCompile with this')"),
        job("says", "import sys; sys.exit('no such file\\nor another')"),
        job("raises", "raise ValueError('no such model')"),
        job("exits", "raise SystemExit(3)"),
        job("babbles", "print('hello')"),
        job("counts", "print(5)"),
        job("measured, then raises", measuring(0) + "raise RuntimeError('no profiler')"),
        job("well", measuring(0)),
    )
    assert results["raises"]["failed"] == "ValueError: no such model"
    assert results["advises"]["failed"] == "OSError: out of memory"
    assert results["says"]["failed"] == "or another"
    assert results["exits"]["failed"] == "ended with status 3"
    assert results["babbles"]["failed"].startswith("printed a line that is no JSON object: Expecting value")
    assert results["counts"]["failed"] == "printed a line that is no JSON object: 5: expected a JSON object"
    assert results["measured, then raises"]["failed"] == "RuntimeError: no profiler"
    assert results["measured, then raises"]["end"] >= results["measured, then raises"]["begin"]
    assert "failed" not in results["well"]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in its session", "in a session of its own"])
def test_slow_job_is_killed_with_its_children(tmp_path: Path, *, elsewhere: bool) -> None:
    pids = tmp_path / "pids"
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    code = (
        "import os, pathlib, subprocess, sys\n"
        f"child = subprocess.Popen({sleep}, start_new_session={elsewhere})\n"
        f"pathlib.Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "child.wait()\n"
    )
    for limit_s in (2, 10, 50):  # on a machine at work, Python may take longer to start than the first
        results = run(job("slow", code, limit_s=limit_s), job("well", measuring(0)))
        assert results["slow"]["failed"] == f"took longer than {limit_s} s"
        assert "failed" not in results["well"]
        if pids.exists() and pids.stat().st_size:
            break
    assert all(ended(pid) for pid in map(int, pids.read_text().split()))


def test_job_that_hangs_in_its_turn_gives_it_back() -> None:
    results = run(job("hangs", measuring(60), limit_s=1.5), job("well", measuring(0)))
    assert "failed" in results["hangs"]
    assert "failed" not in results["well"]


def test_limit_excludes_time_spent_waiting_or_stopped(tmp_path: Path) -> None:
    """The last of six waits for longer than the limit, and what gets ready meanwhile stands still for longer."""
    for limit_s in (2.5, 10.0):  # on a machine at work, Python may take longer to start than the first
        own = tmp_path / str(limit_s)
        own.mkdir()
        folder = f"import pathlib\nfolder = pathlib.Path({str(own)!r})\n"
        ready = f"{folder}import time\nwhile len(list(folder.iterdir())) < 6: time.sleep(0.01)\n"
        measured = (f"{measuring(limit_s / 5)}{folder}(folder / '{i}').touch()\n" for i in range(6))
        jobs = [job("gets ready", ready, limit_s), *(job(str(i), code, limit_s) for i, code in enumerate(measured))]
        results = run(*jobs, side_by_side=7)
        assert len(results) == 7
        failed = [r["failed"] for r in results.values() if "failed" in r]
        if not failed:
            break
    assert not failed


def test_no_job_starts_when_the_time_is_over() -> None:
    jobs = [job(str(i), measuring(0.6)) for i in range(3)]
    results = run(*jobs, side_by_side=1, stop_after_s=0.4)
    assert results == {"0": {"stopped_s": 0.0, "failed": "had not ended when the time was over"}}


def test_waiting_job_is_ended_when_the_time_is_over() -> None:
    begin = time.monotonic()
    results = run(*(job(str(i), measuring(1.0)) for i in range(4)), stop_after_s=1.8)
    assert time.monotonic() - begin < 60
    assert len(results) == 4
    assert sum(result.get("failed") == "had not ended when the time was over" for result in results.values()) >= 2


@pytest.mark.parametrize("turns", [True, False])
def test_turn_keeps_other_output_apart_from_figures(*, turns: bool) -> None:
    code = f"""
import os
from bench.turns import Turn
turn = Turn(wait={turns})
print("loading")
os.system("echo compiling")
turn.begin()
turn.report(wall_us=1.5)
turn.report(kernels=7)
turn.end()
"""
    if turns:
        result = run(job("one", code))["one"]
        assert result == {"stopped_s": 0.0, "wall_us": 1.5, "kernels": 7}
    else:
        from subprocesses import python

        assert python(code) == '{"wall_us": 1.5, "kernels": 7}\n'


ELSEWHERE = """
import pathlib, subprocess, sys
folder = pathlib.Path({folder!r})
code = '''
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
times = []
while not (folder / "measured").exists():
    times.append(time.monotonic())
    (folder / "working").touch()
    time.sleep(0.005)
times.append(time.monotonic())
(folder / "times").write_text(" ".join(map(str, times)))
'''
"""
"""Where a process that counts on and on is started, apart from the one that a job is."""

STARTS = {
    "in a session of its own": "subprocess.run([sys.executable, '-c', code, str(folder)], start_new_session=True)\n",
    "by a process that has ended": """
start = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True)"
subprocess.run([sys.executable, "-c", start, "-c", code, str(folder)], check=True)
while not (folder / "times").exists(): time.sleep(0.01)
""",
    "in a session and an environment of its own, by a process that has ended": """
start = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True, env={})"
subprocess.run([sys.executable, "-c", start, "-c", code, str(folder)], check=True)
while not (folder / "times").exists(): time.sleep(0.01)
""",
}


@pytest.mark.parametrize("where", STARTS)
def test_children_are_stopped_wherever_they_run(tmp_path: Path, where: str) -> None:
    busy = ELSEWHERE.format(folder=str(tmp_path)) + "import time\n" + STARTS[where]
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'working')!r}).exists(): time.sleep(0.01)\n"
    measure = wait + measuring(0.3) + f"pathlib.Path({str(tmp_path / 'measured')!r}).touch()\n"
    results = run(job("busy", busy), job("measure", measure))
    assert not [r["failed"] for r in results.values() if "failed" in r]
    span, times = results["measure"], list(map(float, (tmp_path / "times").read_text().split()))
    assert times[0] < span["begin"] < span["end"] < times[-1]
    assert not [t for t in times if span["begin"] < t < span["end"]]


def ended(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
