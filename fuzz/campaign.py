# ruff: noqa: T201 (a program that prints)
"""Run numbered cases in child processes of limited memory and time, and keep those that fail."""

import argparse
import mmap
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MEMORY_NBYTES = 1 << 30
"""Address space that a child may add to that of its start."""
CASE_CPU_S = 10
"""Limit of the CPU time of a case: beyond, it hangs."""
CASE_S = 120.0
"""Limit of its wall-clock time, with allowance for a busy machine."""
CHILD_CASES = 5000
"""Cases after which a child is replaced, so that leaks do not add up."""

_COUNTER = struct.Struct("<q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzzer:
    """``build`` makes the file of case ``number`` of a seed; ``judge`` runs it and returns its outcome in a word.

    ``judge`` raises on any outcome that is not allowed. A ``build`` that may crash passes its unfinished file to its
    last argument first. ``start`` prepares a child. ``excuse`` returns the outcome of a case that may end its child or
    outlast it, "" for any other. ``keep`` writes a finding to a path, to which it may add a suffix.
    """

    name: str
    build: Callable[[int, int, Callable[[bytes], object]], bytes]
    judge: Callable[[bytes], str]
    start: Callable[[], None] = lambda: None
    excuse: Callable[[bytes, bool], str] = lambda _file, _hung: ""
    keep: Callable[[bytes, Path], object] = lambda file, path: path.with_suffix(".plan").write_bytes(file)


@dataclass(slots=True)
class _Child:
    """A running child: it writes the number of its current case to ``note``, and its outcomes to ``pipe`` as lines."""

    pid: int
    pipe: int
    note: mmap.mmap
    case: Path
    is_done: bool = False
    seen: int = -1
    since: float = field(default_factory=time.monotonic)
    text: bytes = b""

    def number(self) -> int:
        """Return the current case of the child."""
        return int(_COUNTER.unpack_from(self.note)[0])


def main(fuzzer: Fuzzer, arguments: Sequence[str] | None = None) -> int:
    """Run the campaign of a command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m fuzz.{fuzzer.name}")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the campaign")
    parser.add_argument("--runs", "--count", type=int, default=1 << 62, help="number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="children at a time")
    parser.add_argument(
        "--corpus", "--save", type=Path, default=Path("fuzz-found"), help="folder for the cases that are found"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first finding")
    return _Campaign(fuzzer, parser.parse_args(arguments)).run()


class _Campaign:
    """Children over interleaved numbers: child j of n runs cases j, j + n, j + 2n ..."""

    def __init__(self, fuzzer: Fuzzer, options: argparse.Namespace) -> None:
        self._fuzzer = fuzzer
        self._options = options
        self._outcomes: Counter[str] = Counter()
        self._found = 0
        self._scratch = Path(tempfile.mkdtemp(prefix="nimblec-fuzz-"))

    def run(self) -> int:
        """Run until the time or the cases are spent, or something is found; 1 if anything was found."""
        begin = time.monotonic()
        children: list[_Child] = []
        try:
            self._follow(children, begin + self._options.seconds)
        finally:
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
                self._receive(child)
                os.waitpid(child.pid, 0)
            shutil.rmtree(self._scratch)
        seconds = time.monotonic() - begin
        total = sum(self._outcomes.values())
        print(f"{self._fuzzer.name}: {total:,} cases in {seconds:.0f} s, {dict(self._outcomes)}, {self._found} found")
        return 1 if self._found else 0

    def _follow(self, children: list[_Child], end: float) -> None:
        """Start children and replace those that end, until ``end``; the list holds those that run."""
        options = self._options
        for job in range(options.jobs):
            self._start(children, options.first + job)
        while children and time.monotonic() < end:
            ready, _, _ = select.select([child.pipe for child in children], [], [], 0.5)
            for child in list(children):
                ended = self._receive(child) if child.pipe in ready else False
                if ended or self._is_stuck(child):
                    children.remove(child)
                    following = self._bury(child, hung=not ended)
                    if (following is not None) and (not self._found or options.keep_going):
                        self._start(children, following)
            if self._found and not options.keep_going:
                return

    def _start(self, children: list[_Child], number: int) -> None:
        """Add a child to the list; Ctrl-C comes before or after that, so that none is left."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            children.append(self._spawn(number))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _spawn(self, number: int) -> _Child:
        note = mmap.mmap(-1, _COUNTER.size)
        case = self._scratch / str(number)
        _COUNTER.pack_into(note, 0, number)
        reader, writer = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            status = 1
            try:
                self._work(number, note, case, writer)
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        return _Child(pid=pid, pipe=reader, note=note, case=case)

    def _work(self, number: int, note: mmap.mmap, case: Path, writer: int) -> None:
        """Run cases in the child, in a loop, and send their outcomes."""
        options = self._options
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_NBYTES, used + MEMORY_NBYTES))
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # messages of ONNX Runtime about bad models
        self._fuzzer.start()
        for _ in range(CHILD_CASES):
            if number >= options.first + options.runs:
                os.write(writer, b"!done\n")
                return
            _COUNTER.pack_into(note, 0, number)
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CASE_CPU_S, most))
            try:
                file = self._fuzzer.build(options.seed, number, case.write_bytes)
                case.write_bytes(file)
                outcome = self._fuzzer.judge(file)
            except Exception:  # noqa: BLE001 - any exception is a finding
                self._keep(number, traceback.format_exc(), case)
                outcome = "!escape"
            os.write(writer, outcome.encode(errors="replace") + b"\n")
            number += options.jobs
        _COUNTER.pack_into(note, 0, number)

    def _receive(self, child: _Child) -> bool:
        """Count the outcomes received; returns whether the child has ended."""
        data = os.read(child.pipe, 1 << 16)
        *lines, child.text = (child.text + data).split(b"\n")
        for line in map(bytes.decode, lines):
            if line == "!escape":
                self._found += 1
            elif not line.startswith("!"):
                self._outcomes[line] += 1
            if line == "!done":
                child.is_done = True
        return not data

    def _is_stuck(self, child: _Child) -> bool:
        if child.number() != child.seen:
            child.seen, child.since = child.number(), time.monotonic()
        return time.monotonic() - child.since > CASE_S

    def _bury(self, child: _Child, *, hung: bool) -> int | None:
        """Record how a child ended; returns the case to continue with, None if there are no more."""
        if hung:
            os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        hung = hung or os.WTERMSIG(status) == signal.SIGXCPU
        os.close(child.pipe)
        number = child.number()
        if status == 0:
            return None if child.is_done else number
        outcome = self._fuzzer.excuse(child.case.read_bytes() if child.case.exists() else b"", hung)
        if outcome:
            self._outcomes[outcome] += 1
        else:
            self._found += 1
            self._keep(number, "hangs" if hung else f"ends with status {status} (a signal if below 256)", child.case)
        jobs: int = self._options.jobs
        return number + jobs

    def _keep(self, number: int, text: str, case: Path) -> None:
        """Copy the file of a case to the corpus, with its report in a .txt file."""
        folder = self._options.corpus
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._fuzzer.name}-{self._options.seed}-{number}"
        self._fuzzer.keep(case.read_bytes() if case.exists() else b"", path)
        path.with_suffix(".txt").write_text(text)
        print(f"found: {path}: {text[-300:]}", flush=True)
