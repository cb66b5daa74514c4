"""Processes that prepare concurrently and then measure one at a time, while the others are stopped.

Getting ready to measure a network is mostly compiling, on a few cores; measuring wants the machine to
itself. A process writes lines of JSON objects, which are merged into its result; an empty one, as its
first, asks for the turn. `Turn` is its side of the talk. `take_turns` is the other side: for the time that
one process measures it stops everything that the others have started (bench/process_tree.py), so neither
the GPUs nor the cores do anything else then.

What is not guarded: the GPU time of a stopped process's kernels that are queued already (`_SETTLE_S`), and
what does not come from here. While jobs get ready, those of a GPU time their kernels one at a time
(`nimblec.gpu_turn`), but beside what the others run untimed: warm-ups, captures, checks.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from bench import process_tree
from bench.process_tree import Tree

Result: TypeAlias = dict[str, Any]

_LONGEST_LINE = 1 << 20
_SETTLE_S = 0.2
"""What stopped processes have launched before is done by then: those that time kernels wait for them at least each
125 ms (the warm-up and the repeats of Triton's do_bench), those that run models after each run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of a process that measures a model: MODEL, --fp32 and --turns."""
    parser.add_argument("model", metavar="MODEL", help="package.module:callable")
    parser.add_argument("--fp32", action="store_true", help="without TF32")
    add_turns(parser)


def add_turns(parser: argparse.ArgumentParser) -> None:
    """The option of a process that `take_turns` runs."""
    parser.add_argument("--turns", action="store_true", help="take turns with other processes at measuring")


class Turn:
    """What a measuring process says. All that anything else in it prints goes to standard error."""

    def __init__(self, *, wait: bool) -> None:
        """``wait``: for a turn among other processes; else all said is one object, in the end."""
        self._wait = wait
        self._said: Result = {}
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def begin(self) -> None:
        """Wait until everything else is stopped, ready to measure."""
        if self._wait:
            self.say()
            sys.stdin.readline()

    def say(self, **figures: Any) -> None:
        """Add to the result; the first time after `begin`, this ends the turn."""
        self._said |= figures
        if self._wait:
            self._write(figures)

    def end(self) -> None:
        """All was said."""
        if not self._wait:
            self._write(self._said)

    def _write(self, figures: Result) -> None:
        self._out.write(json.dumps(figures) + "\n")
        self._out.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process to run: what its result is for, its command, and the seconds that it may work."""

    table: str
    model: str
    mode: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A share of the machine: the jobs that run there, their environment, and what their commands begin with."""

    jobs: Iterable[Job]
    environment: Mapping[str, str]
    prefix: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    """A process at work; its clock stands still whenever it does, or waits for its turn."""

    process: asyncio.subprocess.Process
    tree: Tree
    clock: asyncio.Timeout
    result: Result = field(default_factory=lambda: {"stopped_s": 0.0})
    left_s: float = 0.0
    holds: int = 0

    def hold(self) -> None:
        """Stop the clock until as many `go_on` have come; it may be held already, or have run out."""
        self.holds += 1
        when = self.clock.when()
        if when is not None and not self.clock.expired():
            self.left_s = when - asyncio.get_running_loop().time()
            self.clock.reschedule(None)

    def go_on(self) -> None:
        """Let the clock go on, if nothing else holds it."""
        self.holds -= 1
        if not self.holds and not self.clock.expired():
            self.clock.reschedule(asyncio.get_running_loop().time() + self.left_s)

    async def listen(self) -> Result | None:
        """Take in the next line; None where there is none any more."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            return None
        said: Result = json.loads(line)
        if not isinstance(said, dict):
            raise ValueError(f"{line.decode().strip()}: expected a JSON object")  # noqa: TRY004 - as JSON's own errors
        self.result |= said
        return said


class _Table:
    """The processes at work, and whose turn it is."""

    def __init__(self, folder: Path, end: float) -> None:
        """``end``: when all processes end, by the clock of the event loop."""
        self._folder = folder
        self._end = end
        self._turn = asyncio.Lock()
        self._running: set[_Child] = set()
        self._working: set[_Child] = set()
        """Those that neither measure nor wait for it."""

    async def run(self, job: Job, place: Place) -> Result:
        """The result of a job, with "failed" in it where it did not end well."""
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as name:
            return await self._run(job, place, Path(name))

    async def _run(self, job: Job, place: Place, folder: Path) -> Result:
        errors, tree = folder / "stderr", Tree()
        async with self._turn:  # a process that starts would disturb the one that measures
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
                failed = _last_line(errors) or f"ended with status {process.returncode}"
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
        """Get ready, have the turn, and go on to the end."""
        self._working.add(child)
        if await child.listen() == {}:
            self._working.discard(child)
            child.hold()
            async with self._turn:
                child.go_on()
                await self._measure(child)
            self._working.add(child)
        while await child.listen() is not None:
            pass
        await child.process.wait()

    async def _measure(self, child: _Child) -> None:
        """Have a child measure alone."""
        working = frozenset(self._working)
        begin = asyncio.get_running_loop().time()
        stopped = process_tree.stop(spared=child.tree)
        for other in working:
            other.hold()
        try:
            await asyncio.sleep(_SETTLE_S)
            assert child.process.stdin is not None
            with suppress(ConnectionError):  # it ended: what follows sees that
                child.process.stdin.write(b"\n")
                await child.process.stdin.drain()
            await child.listen()
        finally:
            passed = asyncio.get_running_loop().time() - begin
            process_tree.go_on(stopped)
            for other in working & self._running:
                other.go_on()
                other.result["stopped_s"] += passed


def _own_folder(folder: Path) -> dict[str, str]:
    """Where a process keeps what it compiles and tunes: nobody else's is taken, and what it costs is seen."""
    return {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
    }


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def take_turns(
    places: Iterable[Place],
    *,
    side_by_side: int,
    stop_after_s: float,
    done: Callable[[Job, Result], None],
) -> None:
    """Run the jobs of all places, ``side_by_side`` at a time in each, started in their order.

    ``done`` is told the result of each that has started. After ``stop_after_s`` seconds nothing starts, and what
    works or waits then is ended.
    """
    asyncio.run(_all(places, side_by_side, stop_after_s, done))


async def _all(
    places: Iterable[Place], side_by_side: int, stop_after_s: float, done: Callable[[Job, Result], None]
) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + stop_after_s
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder, process_tree.adopting():
        table = _Table(Path(folder), end)

        async def work(place: Place, waiting: Iterator[Job]) -> None:
            while loop.time() < end and (job := next(waiting, None)) is not None:
                done(job, await table.run(job, place))

        async with asyncio.TaskGroup() as group:
            for place in places:
                waiting = iter(place.jobs)
                for _ in range(side_by_side):
                    group.create_task(work(place, waiting))
