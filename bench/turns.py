"""Processes that prepare concurrently and then measure one at a time, while the others are stopped.

Preparing a measurement is mostly compilation, on a few cores; measuring needs the whole machine. A process writes lines
of JSON objects, which are merged into its result; an empty object as its first asks for the turn. `Turn` is its side of
the protocol. `take_turns` is the other: while one process measures, it stops everything that the others have started
(bench/process_tree.py), so that GPUs and cores do nothing else.

This does not cover kernels that a stopped process has queued before (see `_SETTLE_S`), nor processes from elsewhere.
While jobs prepare, those on a GPU time their kernels one at a time (`nimblec.base.gpu_lock`), but beside the
untimed work of others: warm-ups, captures, checks. Times that this spreads are measured again, up to four times.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from bench import process_tree
from bench.process_tree import Tree

Result: TypeAlias = dict[str, Any]

_LONGEST_LINE = 1 << 20
_ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")
_SETTLE_S = 0.2
"""Long enough for the kernels that stopped processes have queued: processes that time kernels synchronise at least
every 125 ms (warm-up and repeats of Triton's do_bench), processes that run models after each run."""


def peer_parser(description: str | None, *, model: bool = True) -> argparse.ArgumentParser:
    """Return the command line of a measuring process: --turns, and `add_model` unless other arguments precede it."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--turns", action="store_true", help="take turns with other processes at measuring")
    if model:
        add_model(made)
    return made


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and --fp32."""
    parser.add_argument("model", metavar="MODEL", help="package.module:callable")
    parser.add_argument("--fp32", action="store_true", help="without TF32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A prepared measurement: ``measure`` is called while everything else is stopped, ``facts`` after it."""

    measure: Callable[[], Result]
    facts: Callable[[], Result] = dict


def run_peer(
    parser: argparse.ArgumentParser, prepare: Callable[[argparse.Namespace, Path, ExitStack], Scenario]
) -> None:
    """Prepare with the options, a temporary folder and a stack of what to close; measure in turn; print the figures."""
    options = parser.parse_args()
    turn = Turn(wait=options.turns)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        scenario = prepare(options, Path(folder), opened)
        turn.begin()
        turn.report(**scenario.measure())
        turn.report(**scenario.facts())
    turn.end()


class Turn:
    """The figures that a measuring process prints on its standard output; all else goes to standard error."""

    def __init__(self, *, wait: bool) -> None:
        """Take turns with other processes if ``wait``; otherwise print all figures as one object in the end."""
        self._wait = wait
        self._reported: Result = {}
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def begin(self) -> None:
        """Wait until everything else is stopped."""
        if self._wait:
            self.report()
            sys.stdin.readline()

    def report(self, **figures: Any) -> None:
        """Add to the result; the first call after `begin` ends the turn."""
        self._reported |= figures
        if self._wait:
            self._write(figures)

    def end(self) -> None:
        """End the report."""
        if not self._wait:
            self._write(self._reported)

    def _write(self, figures: Result) -> None:
        self._out.write(json.dumps(figures) + "\n")
        self._out.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process to run: the row of its result, its command, and its time limit without waiting."""

    table: str
    model: str
    mode: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A share of the machine: the jobs that run there, their environment, and the prefix of their commands."""

    jobs: Iterable[Job]
    environment: Mapping[str, str]
    prefix: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    """A running process; its clock is held while it is stopped or waits for its turn."""

    process: asyncio.subprocess.Process
    tree: Tree
    clock: asyncio.Timeout
    result: Result = field(default_factory=lambda: {"stopped_s": 0.0})
    left_s: float = 0.0
    holds: int = 0

    def hold(self) -> None:
        """Stop the clock until there were as many calls of `release`; it may be held already, or expired."""
        self.holds += 1
        when = self.clock.when()
        if when is not None and not self.clock.expired():
            self.left_s = when - asyncio.get_running_loop().time()
            self.clock.reschedule(None)

    def release(self) -> None:
        """Let the clock run on, unless it is still held."""
        self.holds -= 1
        if not self.holds and not self.clock.expired():
            self.clock.reschedule(asyncio.get_running_loop().time() + self.left_s)

    async def listen(self) -> Result | None:
        """Merge the next line into the result; None at the end."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            return None
        said: Result = json.loads(line)
        if not isinstance(said, dict):
            raise ValueError(f"{line.decode().strip()}: expected a JSON object")  # noqa: TRY004 - as JSON's own errors
        self.result |= said
        return said


class _Scheduler:
    """The running processes, and the turn to measure."""

    def __init__(self, folder: Path, end: float) -> None:
        """End all processes at the time ``end``, by the clock of the event loop."""
        self._folder = folder
        self._end = end
        self._turn = asyncio.Lock()
        self._running: set[_Child] = set()
        self._working: set[_Child] = set()
        """Processes that neither measure nor wait for their turn."""

    async def run(self, job: Job, place: Place) -> Result:
        """Return the result of a job; "failed" holds the reason if it did not succeed."""
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as name:
            return await self._run(job, place, Path(name))

    async def _run(self, job: Job, place: Place, folder: Path) -> Result:
        errors, tree = folder / "stderr", Tree()
        # A process that starts would disturb the one that measures.
        async with self._turn:
            with errors.open("wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    *place.prefix,
                    *job.command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    env={**place.environment, **_own_folder(folder), **tree.environment},
                    start_new_session=True,
                    limit=_LONGEST_LINE,
                )
        clock = asyncio.timeout(job.limit_s)
        child = _Child(process=process, tree=tree, clock=clock)
        self._running.add(child)
        failed = ""
        try:
            async with asyncio.timeout_at(self._end), clock:
                await self._follow(child)
            if process.returncode:
                failed = _reason(errors) or f"ended with status {process.returncode}"
        except TimeoutError:
            failed = (
                f"took longer than {job.limit_s:.0f} s" if clock.expired() else "had not ended when the time was over"
            )
        except ValueError as exc:
            failed = f"printed a line that is no JSON object: {exc}"
        finally:
            self._working.discard(child)
            self._running.discard(child)
            await tree.end()
            await process.wait()
        return {**child.result, "failed": failed} if failed else child.result

    async def _follow(self, child: _Child) -> None:
        """Follow a child through preparation, its turn, and to the end."""
        self._working.add(child)
        if await child.listen() == {}:
            self._working.discard(child)
            child.hold()
            async with self._turn:
                child.release()
                await self._measure(child)
            self._working.add(child)
        while await child.listen() is not None:
            pass
        await child.process.wait()

    async def _measure(self, child: _Child) -> None:
        """Let a child measure alone."""
        working = frozenset(self._working)
        begin = asyncio.get_running_loop().time()
        stopped = process_tree.stop(spared=child.tree)
        for other in working:
            other.hold()
        try:
            await asyncio.sleep(_SETTLE_S)
            assert child.process.stdin is not None
            # Where the child has ended, `listen` returns None.
            with suppress(ConnectionError):
                child.process.stdin.write(b"\n")
                await child.process.stdin.drain()
            await child.listen()
        finally:
            passed = asyncio.get_running_loop().time() - begin
            process_tree.resume(stopped)
            for other in working & self._running:
                other.release()
                other.result["stopped_s"] += passed


def _own_folder(folder: Path) -> dict[str, str]:
    """Return variables for caches of its own: a process must not profit from those of others."""
    return {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
    }


def _reason(path: Path) -> str:
    """Return the last line that names an error, as a traceback's last part begins; else the last line."""
    lines = [line.rstrip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.match(line)]
    return (named or lines or [""])[-1].strip()


def take_turns(
    places: Iterable[Place],
    *,
    side_by_side: int,
    stop_after_s: float,
    done: Callable[[Job, Result], None],
) -> None:
    """Run the jobs of all places in order, ``side_by_side`` at a time in each.

    ``done`` gets the result of each job that has started. After ``stop_after_s`` seconds no job starts, and all that
    are running are ended.
    """

    async def work(place: Place, waiting: Iterator[Job], scheduler: _Scheduler, end: float) -> None:
        while asyncio.get_running_loop().time() < end and (job := next(waiting, None)) is not None:
            done(job, await scheduler.run(job, place))

    async def work_on_all(folder: Path) -> None:
        end = asyncio.get_running_loop().time() + stop_after_s
        scheduler = _Scheduler(folder, end)
        async with asyncio.TaskGroup() as group:
            for place in places:
                waiting = iter(place.jobs)
                for _ in range(side_by_side):
                    group.create_task(work(place, waiting, scheduler, end))

    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name, process_tree.adopting():
        asyncio.run(work_on_all(Path(name)))


def measured(
    module: str, given: Sequence[str], pairs: Sequence[tuple[str, str]], *, limit_s: float, side_by_side: int = 0
) -> dict[tuple[str, str], Result]:
    """Return the results of ``python -m MODULE GIVEN --one MODEL MODE`` for pairs of model and mode.

    Processes prepare ``side_by_side``, or all of them at once; none is waited for after ``limit_s`` seconds. A failure
    is a result with the key "failed", and is printed.
    """
    command = (sys.executable, "-m", module, *given, "--one")
    jobs = [Job(table="", model=m, mode=mode, command=(*command, m, mode), limit_s=limit_s) for m, mode in pairs]
    results: dict[tuple[str, str], Result] = {}

    def keep(job: Job, result: Result) -> None:
        results[job.model, job.mode] = result
        if "failed" in result:
            print(f"{job.model}, {job.mode}: {result['failed']}", file=sys.stderr)

    places = [Place(jobs=jobs, environment=os.environ)]
    take_turns(places, side_by_side=side_by_side or len(jobs), stop_after_s=limit_s, done=keep)
    return results
