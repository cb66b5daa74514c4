# ruff: noqa: T201 (a program that prints)
"""Run numbered cases in child processes of bounded memory and time, and keep what goes wrong."""

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

MEMORY_NBYTES = 3 << 30
"""Address space that a child may have beyond what it starts with."""
CASE_CPU_S = 20
"""A case that computes for longer hangs."""
CASE_S = 120.0
"""So does one that takes longer, though it computes less; machines may be busy."""
CHILD_CASES = 5000
"""A child is replaced after so many cases, so that leaks do not add up."""

_COUNTER = struct.Struct("<q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzzer:
    """``build`` makes the file of case ``number`` of a seed; ``judge`` says in a word what became of it.

    ``judge`` raises where something else happens than may. A ``build`` that may crash itself hands what
    it has to its last argument before. ``start`` prepares a child.
    """

    name: str
    build: Callable[[int, int, Callable[[bytes], object]], bytes]
    judge: Callable[[bytes], str]
    start: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Child:
    """A running child: it notes the number of the case it is at, and sends outcomes as lines."""

    pid: int
    pipe: int
    note: mmap.mmap
    case: Path
    next_number: int
    seen: int = -1
    since: float = field(default_factory=time.monotonic)
    text: bytes = b""

    def number(self) -> int:
        """The case that the child is at."""
        return int(_COUNTER.unpack_from(self.note)[0])


def main(fuzzer: Fuzzer, arguments: Sequence[str] | None = None) -> int:
    """Run a campaign as the command line says; the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m fuzz.{fuzzer.name}")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--runs", type=int, default=1 << 62, help="stop after so many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="children at a time")
    parser.add_argument("--corpus", type=Path, default=Path("fuzz-found"), help="where what is found is kept")
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
        """Run until time, cases or patience are spent; 1 where anything was found."""
        options = self._options
        begin = time.monotonic()
        children = [self._spawn(options.first + job) for job in range(options.jobs)]
        while children and time.monotonic() - begin < options.seconds:
            ready, _, _ = select.select([child.pipe for child in children], [], [], 0.5)
            for child in list(children):
                ended = self._receive(child) if child.pipe in ready else False
                if ended or self._is_stuck(child):
                    children.remove(child)
                    following = self._bury(child, hung=not ended)
                    if (following is not None) and (not self._found or options.keep_going):
                        children.append(self._spawn(following))
            if self._found and not options.keep_going:
                break
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            self._receive(child)
            os.waitpid(child.pid, 0)
        shutil.rmtree(self._scratch)
        seconds = time.monotonic() - begin
        total = sum(self._outcomes.values())
        print(f"{self._fuzzer.name}: {total:,} cases in {seconds:.0f} s, {dict(self._outcomes)}, {self._found} found")
        return 1 if self._found else 0

    def _spawn(self, number: int) -> _Child:
        note = mmap.mmap(-1, _COUNTER.size)
        case = self._scratch / str(number)
        _COUNTER.pack_into(note, 0, number)
        reader, writer = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            status = 1
            try:
                self._work(number, note, case, writer)
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        return _Child(pid=pid, pipe=reader, note=note, case=case, next_number=number)

    def _work(self, number: int, note: mmap.mmap, case: Path, writer: int) -> None:
        """The child: one case after the other, an outcome each."""
        options = self._options
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_NBYTES, used + MEMORY_NBYTES))
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what ONNX Runtime says of bad models
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
            except Exception:  # noqa: BLE001 - whatever it is, it is what the campaign looks for
                self._keep(number, traceback.format_exc(), case)
                outcome = "!escape"
            os.write(writer, outcome.encode(errors="replace") + b"\n")
            number += options.jobs
        _COUNTER.pack_into(note, 0, number)

    def _receive(self, child: _Child) -> bool:
        """Count the outcomes that have come; whether the child has ended."""
        data = os.read(child.pipe, 1 << 16)
        *lines, child.text = (child.text + data).split(b"\n")
        for line in map(bytes.decode, lines):
            if line == "!escape":
                self._found += 1
            elif not line.startswith("!"):
                self._outcomes[line] += 1
            if line == "!done":
                child.next_number = -1
        return not data

    def _is_stuck(self, child: _Child) -> bool:
        if child.number() != child.seen:
            child.seen, child.since = child.number(), time.monotonic()
        return time.monotonic() - child.since > CASE_S

    def _bury(self, child: _Child, *, hung: bool) -> int | None:
        """Note how a child ended; the case to go on with, None where there are no more."""
        if hung:
            os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        hung = hung or os.WTERMSIG(status) == signal.SIGXCPU
        os.close(child.pipe)
        number = child.number()
        if status == 0:
            return None if child.next_number < 0 else number
        self._found += 1
        self._keep(number, "hangs" if hung else f"ends with status {status} (a signal if below 256)", child.case)
        jobs: int = self._options.jobs
        return number + jobs

    def _keep(self, number: int, text: str, case: Path) -> None:
        """Copy the file of a case to the corpus, with what happened beside it."""
        folder = self._options.corpus
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._fuzzer.name}-{self._options.seed}-{number}.plan"
        path.write_bytes(case.read_bytes() if case.exists() else b"")
        path.with_suffix(".txt").write_text(text)
        print(f"found: {path}: {text[-300:]}", flush=True)
