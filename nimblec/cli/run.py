"""``nimblec run``."""

import time
from pathlib import Path

import click

from nimblec.cli import arguments, loading, report
from nimblec.cli.command import Command
from nimblec.cli.console import echo
from nimblert import golden, stages
from nimblert.executable import Executable
from nimblert.loading import load

WARM_UPS = 20
"""The most runs before latencies count."""


@click.command("run", cls=Command)
@click.argument("plan", type=click.Path(path_type=Path))
@loading.entry_option
@loading.input_option
@loading.dim_option
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write every output to DIR as NAME.npy; characters that are unsafe in a file name become _.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measure the latency of N runs, after a warm-up.",
)
@click.option("--profile-load", is_flag=True, help="Also print where the time of the load and of the first run went.")
@loading.seed_option
@loading.cpu_threads_option
@loading.weights_option
def run_plan(
    plan: Path,
    entry: str | None,
    files: tuple[tuple[str, Path], ...],
    dims: tuple[tuple[str, int], ...],
    output_dir: Path | None,
    repeat: int | None,
    profile_load: bool,
    seed: int,
    cpu_threads: int | tuple[int, ...] | None,
    weights: Path | None,
) -> None:
    """Run PLAN once and print its outputs.

    Prints the name, type and digest (the first 6 bytes of SHA-256) of every output, and the values
    of small ones. A plan for several sizes runs the program for the sizes of the inputs, or of --dim.

    \b
    Examples:
      nimblec run digits.plan --input image=samples/digit_7.npy
      nimblec run resnet.plan --repeat 1000 --dim batch=3
      nimblec run bert.plan --input input_ids=tokens.npy --output-dir out
      nimblec run resnet.plan --profile-load
    """
    given = arguments.read_arrays(files)
    stages.kept = [] if profile_load else None
    with stages.stage("load"):
        opened = load(plan, threads=cpu_threads, weights=weights)
    with opened as executable:
        chosen = executable.entry(entry)
        inputs = loading.inputs(chosen, given, seed, dims)
        with stages.stage("first run"):
            outputs = chosen.run(inputs)
        latencies = measure(executable, repeat) if repeat else []
    if executable.choice:
        echo(executable.choice)
    console = report.SafeConsole()
    if missing := [name for name in inputs if name not in given]:
        echo(f"drawn from seed {seed}: {', '.join(missing)}")
    digests = {name: golden.digest(array) for name, array in outputs.items()}
    console.print(report.outputs(outputs, digests))
    if stages.kept is not None:
        console.print(report.stages(stages.kept))
    if latencies:
        echo(report.latency_text(latencies))
    if output_dir is not None:
        for path in arguments.write_arrays(output_dir, outputs):
            echo(f"wrote {path}")


def measure(executable: Executable, repeat: int) -> list[float]:
    """Return the seconds of each of ``repeat`` synchronised runs on inputs that are already in place."""
    for _ in range(min(repeat, WARM_UPS)):
        executable.replay()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        executable.replay()
        seconds.append(time.perf_counter() - start)
    return seconds
