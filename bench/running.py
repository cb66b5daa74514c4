"""Measure the missing rows of files of figures, in many processes, on the GPUs of one machine.

A file holds figures by model and mode, each with its commit. Processes prepare concurrently and measure alone
(bench/turns.py), on one of --gpus with its share of the cores; all modes of a model in a table run on the same GPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from bench import environment
from bench.turns import Job, Place, Result, take_turns
from nimblec.base import installation
from nimblert.plan.files import replacing

FOLDER = Path(__file__).parent / "results" / "gpu"

Programs: TypeAlias = Mapping[str, Mapping[str, Sequence[str]]]
"""The measuring module of bench and its arguments, by model and mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A file of figures, and the jobs that measure them, by model, in the order in which they start."""

    path: Path
    jobs: tuple[tuple[Job, ...], ...]


def table(name: str, programs: Programs, options: argparse.Namespace) -> Table:
    """Return the table of ``programs``, whose file is --output, or ``name`` in `FOLDER`."""
    path = options.output or FOLDER / name

    def job(model: str, mode: str, program: Sequence[str]) -> Job:
        command = (sys.executable, "-m", *program, "--turns")
        return Job(table=str(path), model=model, mode=mode, command=command, limit_s=options.limit)

    jobs = (tuple(job(model, *each) for each in modes.items()) for model, modes in programs.items())
    return Table(path=path, jobs=tuple(jobs))


def table_parser(description: str | None, models: str, limit_s: float) -> argparse.ArgumentParser:
    """Return the common command line of programs for one table; ``models`` is the metavar of its arguments."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="*", metavar=models)
    made.add_argument("--limit", type=float, default=limit_s, help="seconds that a process may take")
    made.add_argument("--output", type=Path, help="path of the results")
    made.add_argument("--markdown", action="store_true")
    add_options(made)
    return made


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `measure`."""
    parser.add_argument("--jobs", type=int, default=8, help="processes that prepare side by side on each GPU")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs (CUDA_VISIBLE_DEVICES may name them)")
    parser.add_argument("--stop-after", type=float, default=3600, help="seconds after which everything ends")
    parser.add_argument("--add", action="store_true", help="measure only the rows that files lack of this commit")
    parser.add_argument("--ours", action="store_true", help="measure no other frameworks (--add keeps their rows)")


def measure(tables: Sequence[Table], options: argparse.Namespace) -> None:
    """Run the jobs of all tables in order: in each table those never measured, then those that took longest.

    The figures of each job are written when it ends.
    """
    commit = environment.commit()
    files = {str(table.path): _File(table.path, commit, options) for table in tables}
    waiting = chain.from_iterable(files[str(table.path)].missing(table.jobs) for table in tables)

    def done(job: Job, result: Result) -> None:
        files[job.table].record(job, result)
        clocks = (name for name in ("kernels_us", "call_us", "numpy_us") if name in result)
        said = [f"{name} {result[name]['median']:.0f}" for name in clocks]
        noisy = [f"noisy: {', '.join(result['noisy'])}"] if result.get("noisy") else []
        print(Path(job.table).stem, job.model, job.mode, *said, *noisy, result.get("failed", ""), flush=True)

    take_turns(places(waiting, options), side_by_side=options.jobs, stop_after_s=options.stop_after, done=done)


class _File:
    """A file of figures, written whenever some are added."""

    def __init__(self, path: Path, commit: str, options: argparse.Namespace) -> None:
        self._path = path
        self._commit = commit
        self._jobs = options.jobs
        self._is_asked = environment.is_ours if options.ours else lambda _: True
        kept = json.loads(path.read_text())["models"] if options.add and path.exists() else {}
        described = environment.describe()
        self._gpu = environment.gpu_name(described)
        self._content = {
            "environment": described,
            "settings": {"gpus": options.gpus, "jobs": options.jobs},
            "models": kept,
        }
        path.parent.mkdir(parents=True, exist_ok=True)

    def missing(self, models: Iterable[Sequence[Job]]) -> list[list[Job]]:
        """Return jobs without figures of this commit and kind of GPU, those never measured first, then the longest."""
        left = [[job for job in jobs if not self._has(job) and self._is_asked(job.mode)] for jobs in models]
        return sorted(filter(None, left), key=lambda jobs: -sum(self._kept(job).get("prepare_s", 1e9) for job in jobs))

    def _kept(self, job: Job) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._content["models"].get(job.model, {}).get(job.mode, {})
        return found

    def _has(self, job: Job) -> bool:
        figures = self._kept(job)
        origin = figures.get("commit"), figures.get("gpu")
        return origin == (self._commit, self._gpu) and environment.is_exact(self._commit) and "failed" not in figures

    def record(self, job: Job, result: Result) -> None:
        """Add the figures of a job, and write the file."""
        row = {**result, "commit": self._commit, "gpu": self._gpu, "jobs": self._jobs}
        self._content["models"].setdefault(job.model, {})[job.mode] = row
        with replacing(self._path) as file:
            file.write((json.dumps(self._content, indent=1, sort_keys=True) + "\n").encode())


def places(waiting: Iterator[Sequence[Job]], options: argparse.Namespace) -> Iterator[Place]:
    """Return the GPUs, each with its share of the cores; each takes the next model when it has finished one.

    End the process where CUDA_VISIBLE_DEVICES names fewer GPUs than --gpus.
    """
    cores = sorted(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(options.gpus)]
    if len(names) < options.gpus:
        raise SystemExit(f"--gpus {options.gpus}: CUDA_VISIBLE_DEVICES={visible} names {len(names)}")
    for gpu in range(options.gpus):
        own = cores[gpu * len(cores) // options.gpus : (gpu + 1) * len(cores) // options.gpus]
        yield Place(
            jobs=chain.from_iterable(waiting),
            environment=surroundings(len(own) // options.jobs) | {"CUDA_VISIBLE_DEVICES": names[gpu]},
            prefix=("taskset", "--cpu-list", ",".join(map(str, own))),
        )


def surroundings(cores: int) -> dict[str, str]:
    """Return the environment of a measuring process, which compiles with ``cores`` cores."""
    share = str(max(1, cores))
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": share, "OMP_NUM_THREADS": share}
    return {**installation.environment(), **threads, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}


def summary(table: Table) -> str:
    """Return a sentence on the rows that a table has, and those that failed or are noisy."""
    rows = json.loads(table.path.read_text())["models"] if table.path.exists() else {}
    asked = [job for jobs in table.jobs for job in jobs]
    found = {f"{short(job.model)} {job.mode}": rows.get(job.model, {}).get(job.mode) for job in asked}
    there = sum(row is not None and "failed" not in row for row in found.values())
    lines = [f"{table.path.stem}: {there} of {len(found)} rows"]
    lines += [f"  {name}: {row['failed'][:200]}" for name, row in found.items() if row and "failed" in row]
    noisy = [name for name, row in found.items() if row and row.get("noisy")]
    return "\n".join([*lines, *([f"  noisy: {', '.join(noisy)}"] if noisy else [])])


def short(spec: str) -> str:
    """Return a model's name without the package of all models."""
    return spec.removeprefix("bench.models.")


def main(
    arguments: Sequence[str],
    parser: argparse.ArgumentParser,
    table: Callable[[argparse.Namespace], Table],
    printed: Callable[[Any], str],
) -> None:
    """Measure the table of a command line, unless --markdown asks for the results of the file, and print it."""
    options = parser.parse_args(arguments)
    asked = table(options)
    if not options.markdown:
        measure([asked], options)
    print(printed(environment.read(asked.path)))
