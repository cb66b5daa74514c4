"""What the fuzzers found stays refused, and the fuzzers themselves find what there is to find."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import decoder, plans
from fuzz.campaign import Fuzzer, main
from nimblert import container
from nimblert.errors import PlanError, PlanInvalidError

ROOT = Path(__file__).resolve().parents[1]
CORPUS = sorted((ROOT / "fuzz" / "corpus").glob("*.plan"))


@pytest.mark.parametrize("path", [p for p in CORPUS if p.name.startswith("crash-")], ids=lambda path: path.stem)
def test_what_crashed_onnx_runtime_is_refused(path: Path) -> None:
    with pytest.raises(PlanInvalidError):
        container.parse(memoryview(path.read_bytes()), str(path))


def test_kept_files_neither_crash_nor_hang_in_memory_that_ends_where_a_tensor_does() -> None:
    names = [str(path) for path in CORPUS]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fuzz.corpus", *names],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seeds = sum(path.name.startswith("seed-") for path in CORPUS)
    assert f"'runs': {seeds}" in done.stdout
    assert f"'refused': {len(CORPUS) - seeds}" in done.stdout


def campaign(build: Callable[..., bytes], judge: Callable[[bytes], str], folder: Path, runs: int) -> int:
    fuzzer = Fuzzer(name="test", build=build, judge=judge)
    return main(fuzzer, ["--runs", str(runs), "--jobs", "2", "--seconds", "200", "--corpus", str(folder)])


def test_a_short_campaign_of_damaged_bytes_finds_nothing(tmp_path: Path) -> None:
    assert campaign(decoder.build, decoder.judge, tmp_path / "found", 400) == 0
    assert not (tmp_path / "found").exists()


def test_cases_follow_from_seed_and_number() -> None:
    for fuzzer in (decoder, plans):
        first, again, other = (fuzzer.build(seed, 7, len) for seed in (1, 1, 2))
        assert first == again != other


def test_damaged_plans_are_refused_or_read() -> None:
    outcomes = set()
    for number in range(150):
        file = plans.build(3, number, len)
        try:
            container.parse(memoryview(file), "file")
            outcomes.add("read")
        except PlanError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def crash(file: bytes) -> str:
    """Die as a broken kernel would, on one case of ten."""
    if file[0] == 3:
        import os

        os.abort()
    return "fine"


def escape(file: bytes) -> str:
    if file[0] == 4:
        raise KeyError(file[0])
    return "fine"


def number_of(_seed: int, number: int, _note: Callable[[bytes], object]) -> bytes:
    return bytes([number % 10])


@pytest.mark.parametrize(("judge", "number", "text"), [(crash, 3, "ends with status 6"), (escape, 4, "KeyError: 4")])
def test_a_crash_and_an_escape_are_found_and_kept(
    judge: Callable[[bytes], str], number: int, text: str, tmp_path: Path
) -> None:
    assert campaign(number_of, judge, tmp_path, 10) == 1
    assert (tmp_path / f"test-0-{number}.plan").read_bytes() == bytes([number])
    assert text in (tmp_path / f"test-0-{number}.txt").read_text()
