"""Findings of the fuzzers stay refused, and the fuzzers find crashes, hangs and escapes."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fuzz import decoder, plans
from nimblert.check.verify import parse_plan, read_plan
from nimblert.errors import PlanError, PlanInvalidError
from nimblert.plan import container

ROOT = Path(__file__).resolve().parents[2]
CORPUS = sorted((ROOT / "fuzz" / "corpus").glob("*.plan"))


@pytest.mark.parametrize("path", [p for p in CORPUS if p.name.startswith("crash-")], ids=lambda path: path.stem)
def test_what_crashed_onnx_runtime_is_refused(path: Path) -> None:
    with pytest.raises(PlanInvalidError):
        read_plan(path)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_kept_files_get_past_the_digest(path: Path) -> None:
    container.verify_digest(memoryview(path.read_bytes()), str(path))


def run(*arguments: str) -> tuple[int, str]:
    """Run a campaign in a process of its own, which forks; return its status and what it prints."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_kept_files_neither_crash_nor_hang_in_memory_that_ends_where_a_tensor_does() -> None:
    status, said = run("-m", "fuzz.corpus", *map(str, CORPUS))
    assert status == 0, said
    kinds = Counter(path.name.partition("-")[0] for path in CORPUS)
    other = "'another CPU': 1" in said  # of the layouts nchwc8 and nchwc16 a CPU has one
    assert f"'runs': {kinds['seed'] - other}" in said
    assert f"'loops on': {kinds['endless']}" in said
    assert f"'refused': {len(CORPUS) - kinds['seed'] - kinds['endless']}" in said


def test_a_short_campaign_of_damaged_bytes_finds_nothing(tmp_path: Path) -> None:
    found = tmp_path / "found"
    status, said = run("-m", "fuzz.decoder", "--runs", "400", "--jobs", "2", "--corpus", str(found))
    assert (status, found.exists()) == (0, False), said


def test_cases_follow_from_seed_and_number() -> None:
    for fuzzer in (decoder, plans):
        first, again, other = (fuzzer.build(seed, 7, len) for seed in (1, 1, 2))
        assert first == again != other


def test_damaged_bytes_get_past_the_digest() -> None:
    for number in range(20):
        container.verify_digest(memoryview(decoder.build(0, number, len)), f"case {number}")


def test_damaged_plans_are_refused_or_read() -> None:
    outcomes = set()
    for number in range(150):
        file = plans.build(3, number, len)
        try:
            parse_plan(memoryview(file), "file")
            outcomes.add("read")
        except PlanError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


MADE_UP = """
import os, sys
from fuzz import campaign
from fuzz.campaign import Fuzzer, main
campaign.CASE_CPU_S = 1

def judge(file):
    if file[0] == 3:
        WHAT
    return "fine"

fuzzer = Fuzzer(name="test", build=lambda seed, number, note: bytes([number % 10]), judge=judge)
sys.exit(main(fuzzer, ["--runs", "10", "--jobs", "2", "--corpus", sys.argv[1]]))
"""


def test_an_interrupt_ends_the_children_and_leaves_nothing(tmp_path: Path) -> None:
    waiting = MADE_UP.replace("WHAT", "os.write(1, b'pid %d\\n' % os.getpid()); __import__('time').sleep(600)")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", waiting, str(tmp_path / "found")],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process.stdout as out:
        child = int(out.readline().split()[1])
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert not Path(f"/proc/{child}").exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("os.kill(os.getpid(), 11)", "ends with status 11"),
        ("while True: pass", "hangs"),
        ("raise KeyError('x')", "KeyError: 'x'"),
    ],
)
def test_a_crash_a_hang_and_an_escape_are_found_and_kept(what: str, text: str, tmp_path: Path) -> None:
    status, said = run("-c", MADE_UP.replace("WHAT", what), str(tmp_path))
    assert status == 1, said
    assert "1 found" in said
    assert (tmp_path / "test-0-3.plan").read_bytes() == bytes([3])
    assert text in (tmp_path / "test-0-3.txt").read_text()
