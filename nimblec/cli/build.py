"""``nimblec build``."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
from rich.table import Table

from nimblec.base.errors import CompileError
from nimblec.base.installation import VERSION, environment, module_command, processor_count
from nimblec.cli import report
from nimblec.cli.build_file import PlanBuild, read_build_file
from nimblec.cli.command import Command
from nimblec.cli.console import echo, echo_json
from nimblec.cli.progress import StageProgress
from nimblec.plan.plan_key import digest_of, find_inputs, find_key
from nimblert.check.verify import read_plan
from nimblert.errors import InputError, NimbleError, PlanError
from nimblert.plan.files import destination, replacing, scratch_folder

_COLD_START = """
import sys, nimblert
from nimblert import golden
with nimblert.load(sys.argv[1]) as executable:
    entry = executable.entry()
    entry.run(golden.draw_inputs(entry.programs[0], 0))
"""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a plan; sizes in bytes, times in seconds, None where they are not known or not measured."""

    name: str
    output: str
    state: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    size: int | None = None
    arena: int | None = None
    latency: float | None = None
    cold_start: float | None = None
    seconds: float | None = None


@click.command("build", cls=Command, short_help="Build the plans of a build file.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="plans.toml", metavar="[PLANS.TOML]")
@click.option("--check", is_flag=True, help="Build nothing; exit with 1 if a plan is missing or out of date.")
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1, 256),
    default=lambda: min(4, processor_count()),
    metavar="N",
    help="How many plans are built at a time.  [default: the number of processors, at most 4]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def build_plans(file: Path, check: bool, jobs: int, as_json: bool) -> int:
    """Build the plans that PLANS.TOML describes, by default plans.toml, and verify them.

    Each [plans.NAME] has a model and the options of `nimblec compile` under their names, with
    --reproducible unless it says `reproducible = false`. Paths are relative to the file's folder.

    A plan whose model, options, software and machine are those it was built with is not built again:
    PLANS.lock, beside the file, says so. A plan that is over its budget or fails a check is not kept;
    an older one stays. Models may be code, which runs with your rights: build only what you trust.

    \b
    Examples:
      nimblec build
      nimblec build release/plans.toml --jobs 4 --json
      nimblec build --check

    Exit status: 0 if all plans are there; 1 if --check finds one missing or out of date, or one is
    over its budget; 2 on an error.
    """
    with chdir(file.parent):
        name = Path(file.name)
        outcomes = _Build(name, check=check).outcomes(jobs)
    if as_json:
        echo_json({"file": str(file), "plans": [asdict(outcome) for outcome in outcomes]})
    else:
        report.SafeConsole().print(_table(outcomes))
        for outcome in outcomes:
            for label, sentences in (("", outcome.problems), ("note: ", outcome.notes)):
                for sentence in sentences:
                    echo(f"{label}{outcome.name}: {sentence}")
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if failed:
        first = f"{failed[0].name}: {failed[0].problems[0]}"
        raise CompileError(f"{file}: {len(failed)} of {len(outcomes)} plans failed: {first}")
    return int(any(outcome.problems for outcome in outcomes))


class _Build:
    """A build of the plans of one file in the current folder."""

    def __init__(self, file: Path, *, check: bool) -> None:
        self._check = check
        self._builds = read_build_file(file)
        self._lock = file.with_suffix(".lock")
        self._known = _read_lock(self._lock)
        self._running: set[subprocess.Popen[str]] = set()

    def outcomes(self, jobs: int) -> list[Outcome]:
        """Build what is out of date, unless that is only checked; return the outcome of each plan."""
        outcomes = {build.name: Outcome(name=build.name, output=str(build.output), state="") for build in self._builds}
        records: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            progress = stack.enter_context(StageProgress(verbose=False, quiet=False))
            pool = stack.enter_context(self._pool(jobs))
            futures: dict[Future[Path], PlanBuild] = {}
            for build in self._builds:
                outcome = outcomes[build.name]
                with _failing(outcome):
                    records[build.name] = self._record(build)
                    problems = list(self._differences(build, records[build.name]))
                    if not problems:
                        outcome.state = "up to date"
                    elif self._check:
                        outcome.state = "out of date" if build.output.exists() else "missing"
                        outcome.problems += problems
                    else:
                        build.output.parent.mkdir(parents=True, exist_ok=True)
                        folder = stack.enter_context(scratch_folder(destination(build.output).parent))
                        futures[pool.submit(self._make, build, folder, outcome)] = build
                        progress(build.name, None)
            made: dict[str, Path] = {}
            for future in as_completed(futures):
                build = futures[future]
                with _failing(outcomes[build.name]):
                    made[build.name] = future.result()
                progress(build.name, outcomes[build.name].seconds or 0.0)
            # Times are measured once nothing else runs.
            for build in self._builds:
                outcome = outcomes[build.name]
                with _failing(outcome):
                    if not outcome.problems:
                        self._finish(build, outcome, made.get(build.name), records[build.name])
        return list(outcomes.values())

    @contextmanager
    def _pool(self, jobs: int) -> Iterator[ThreadPoolExecutor]:
        """Provide threads that wait for processes, which are interrupted where the block fails."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    process.send_signal(signal.SIGINT)
                raise

    def _record(self, build: PlanBuild) -> dict[str, Any]:
        """Return what a plan depends on; an empty record if that is not known.

        Only a build needs the ``key``, which also holds the software and the machine.
        """
        if build.source.kind == "callable" and not build.sources:
            return {}
        given = {"target": build.options.target, "nimblec": VERSION}
        if self._check:
            return {"inputs": given | find_inputs(build.source, build.options, build.sources)}
        from nimblec.compiler import choose_target

        target, _ = choose_target(build.options.target)
        key = find_key(build.source, target, build.options, build.sources)
        if key is None:
            raise CompileError(
                f"{build.model}: its files cannot be read, or packages were replaced while this command ran: try again"
            )
        return {"inputs": given | key.inputs, "key": key.digest}

    def _differences(self, build: PlanBuild, record: Mapping[str, Any]) -> Iterator[str]:
        """Yield why the plan in the folder is not up to date."""
        known = self._known.get(build.name)
        if not build.output.exists():
            yield f"{build.output}: missing"
        elif not record:
            yield f"{build.output}: its model is code: list the files that it depends on as `sources`"
        elif known is None:
            yield f"{build.output}: not one of {self._lock}"
        elif known["sha256"] != digest_of(build.output):
            yield f"{build.output}: is not the file that was built"
        elif changed := [part for part, value in record["inputs"].items() if known["inputs"].get(part) != value]:
            yield f"{build.output}: out of date: changed since it was built: {', '.join(changed)}"
        elif not self._check and known["key"] != record["key"]:
            yield f"{build.output}: out of date: built with other software, or on another machine"

    def _make(self, build: PlanBuild, folder: Path, outcome: Outcome) -> Path:
        """Compile and verify a plan in a folder; returns its file."""
        begin = perf_counter()
        plan = folder / build.output.name
        compiled = self._run("compile", *build.compile_arguments, "--json", "-o", str(plan), "--", build.model)
        outcome.notes += compiled["notes"]
        self._run("verify", str(plan), "--json")
        outcome.seconds = perf_counter() - begin
        return plan

    def _finish(self, build: PlanBuild, outcome: Outcome, made: Path | None, record: Mapping[str, Any]) -> None:
        """Compare a plan with its budgets; one that was made and is within them takes its place."""
        plan = made or build.output
        outcome.size, outcome.arena = plan.stat().st_size, read_plan(plan).arena_nbytes
        if "max-latency" in build.budgets and not self._check:
            bench = self._run("bench", str(plan), "--json", "--duration", "1", "--warm-up", "0.5")
            outcome.latency = bench["latency"]["p50"]
        if "max-cold-start" in build.budgets and not self._check:
            outcome.cold_start = median(_cold_start(plan) for _ in range(3))
        for key, most in build.budgets.items():
            name, text = _BUDGETS[key]
            found = getattr(outcome, name)
            if found is not None and found > most:
                outcome.problems.append(f"{key}: {text(found)}, expected at most {text(most)}")
        if outcome.problems:
            outcome.state = "over budget"
        elif made:
            outcome.state = "built"
            made.replace(destination(build.output))
            self._write_record(build, record)

    def _write_record(self, build: PlanBuild, record: Mapping[str, Any]) -> None:
        """Write that the output of a plan is up to date, unless its inputs changed meanwhile or are not known."""
        if record and self._record(build) == record:
            self._known[build.name] = {"output": str(build.output), "sha256": digest_of(build.output), **record}
        else:
            self._known.pop(build.name, None)
        names = [build.name for build in self._builds if build.name in self._known]
        with replacing(self._lock) as file:
            file.write(json.dumps({"plans": {name: self._known[name] for name in names}}, indent=2).encode() + b"\n")

    def _run(self, *command: str) -> Any:
        """Run a command of nimblec in a process of its own; returns its JSON. Raises CompileError with its sentence."""
        process = subprocess.Popen(
            module_command("nimblec", *command),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.add(process)
        try:
            out, err = process.communicate()
        finally:
            self._running.discard(process)
        if process.returncode:
            said = [line for line in err.splitlines() if line.startswith("nimblec: ")]
            ended = f"nimblec {command[0]} ended with status {process.returncode}"
            raise CompileError(said[-1].removeprefix("nimblec: ") if said else ended)
        return json.loads(out)


@contextmanager
def _failing(outcome: Outcome) -> Iterator[None]:
    """Let an error in the block be that of one plan, not of the build."""
    try:
        yield
    except (NimbleError, OSError) as exc:
        outcome.state = "failed"
        outcome.problems.append(str(exc))


def _read_lock(lock: Path) -> dict[str, Any]:
    """Return the records of an earlier build by plan; InputError for a file that is something else."""
    if not lock.exists():
        return {}
    try:
        match json.loads(lock.read_text()):
            case {"plans": dict(known)} if all(map(_is_record, known.values())):
                return known
    except (ValueError, RecursionError):
        pass
    raise InputError(f"{lock}: is not a record of builds: remove it, or rename the build file")


def _is_record(record: Any) -> bool:
    match record:
        case {"output": str(), "sha256": str(), "inputs": dict(), "key": str()}:
            return True
    return False


def _cold_start(plan: Path) -> float:
    """Return the seconds from the start of a process with nimblert alone to its end after a run."""
    # Without bytecode on disk, Python would compile nimblert each time.
    env = {name: value for name, value in environment().items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-c", _COLD_START, str(plan)], env=env, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise PlanError(f"max-cold-start: the plan cannot be run here: {done.stderr.strip().rpartition(os.linesep)[2]}")
    return perf_counter() - begin


_BUDGETS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "max-size": ("size", report.nbytes_text),
    "max-arena": ("arena", report.nbytes_text),
    "max-latency": ("latency", report.seconds_text),
    "max-cold-start": ("cold_start", report.seconds_text),
}
"""The fact that each budget limits, and how both are written."""


def _table(outcomes: list[Outcome]) -> Table:
    columns = [name.replace("_", " ") for name, _ in _BUDGETS.values()]
    made = report.table("", "plan", "state", *columns, "built in", "output", right=(*columns, "built in"))
    shown = [*_BUDGETS.values(), ("seconds", report.seconds_text)]
    for outcome in outcomes:
        facts = [(getattr(outcome, name), text) for name, text in shown]
        texts = ["" if fact is None else text(fact) for fact, text in facts]
        made.add_row(outcome.name, outcome.state, *texts, outcome.output)
    return made
