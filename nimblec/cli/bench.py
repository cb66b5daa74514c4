"""``nimblec bench``."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
import numpy as np

from nimblec.cli import arguments, interrupts, loading, measure, report
from nimblec.cli.command import OWN_PROCESS, Command
from nimblec.cli.console import echo_json
from nimblec.cli.progress import StageProgress
from nimblert.context import Context
from nimblert.executable import Executable
from nimblert.loading import load

LONGEST_S = 86_400
MOST_THREADS = 256
PROFILES = 11
"""Runs of the profile, whose median is a command's time."""


@click.command("bench", cls=Command)
@click.argument("plan", type=click.Path(path_type=Path))
@loading.entry_option
@loading.input_option
@loading.dim_option
@loading.seed_option
@loading.cpu_threads_option
@loading.weights_option
@click.option(
    "--warm-up",
    type=click.FloatRange(0, LONGEST_S),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to run before measuring.",
)
@click.option(
    "--duration",
    type=click.FloatRange(0, LONGEST_S, min_open=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to measure.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, MOST_THREADS),
    default=1,
    show_default=True,
    metavar="N",
    help="How many threads run it at the same time.",
)
@click.option(
    "--contexts",
    type=click.IntRange(1, MOST_THREADS),
    metavar="N",
    help="How many contexts the threads share by turns; by default each has its own.",
)
@click.option("--replay", is_flag=True, help="Leave out the copies in and out: run on inputs already in place.")
@click.option("--profile", "as_profile", is_flag=True, help="Also list the slowest commands, each run alone.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print everything as JSON: latencies in seconds, commands in nanoseconds."
)
def bench_plan(
    plan: Path,
    entry: str | None,
    files: tuple[tuple[str, Path], ...],
    dims: tuple[tuple[str, int], ...],
    seed: int,
    cpu_threads: int | tuple[int, ...] | None,
    weights: Path | None,
    warm_up: float,
    duration: float,
    threads: int,
    contexts: int | None,
    replay: bool,
    as_profile: bool,
    as_json: bool,
) -> None:
    """Measure the latency and throughput of PLAN.

    A run is a call from numpy arrays to numpy arrays, in each thread one after the other.

    \b
    Examples:
      nimblec bench resnet.plan
      nimblec bench resnet.plan --dim batch=8 --threads 32 --contexts 8 --duration 30 --json
      nimblec bench resnet.plan --replay --profile
    """
    contexts = threads if contexts is None else contexts
    if contexts > threads:
        what = f"{contexts} for {threads} threads, expected at most one for each"
        raise click.BadParameter(what, param_hint="--contexts")
    given = arguments.read_arrays(files)
    with load(plan, threads=cpu_threads, weights=weights) as executable:
        chosen = executable.entry(entry)
        inputs = loading.inputs(chosen, given, seed, dims)
        calls = _calls(executable, inputs, chosen.name, contexts=contexts, threads=threads, replay=replay)
        with StageProgress(verbose=False, quiet=False) as progress:
            progress(f"measure for {duration:g} s", None)
            try:
                measured = measure.measure(calls, warm_up=warm_up, duration=duration)
            except KeyboardInterrupt:
                # Closing the executable would wait for runs, which may never end.
                if click.get_current_context().obj == OWN_PROCESS:
                    interrupts.abandon()
                raise
        profiles = [executable.profile(inputs, entry=chosen.name) for _ in range(PROFILES if as_profile else 0)]
        commands = measure.slowest(profiles) if profiles else []
        if as_json:
            setting: dict[str, object] = {"entry": chosen.name, "mode": "replay" if replay else "run"}
            setting |= {"threads": threads, "contexts": contexts, "warm_up": warm_up}
            echo_json(setting | measured.facts() | {"commands": [asdict(command) for command in commands]})
        else:
            console = report.SafeConsole()
            console.print(report.measured(measured))
            if commands:
                console.print(report.profiled(commands))


def _calls(
    executable: Executable,
    inputs: Mapping[str, np.ndarray],
    entry: str,
    *,
    contexts: int,
    threads: int,
    replay: bool,
) -> list[Callable[[], object]]:
    """Return the call of each thread. Raises InputError for inputs that do not fit."""
    taken: list[Context] = [executable, *(executable.context() for _ in range(contexts - 1))]
    for context in taken:
        # The first run also leaves the inputs in place for replays.
        context.run(inputs, entry=entry)

    def once(context: Context) -> None:
        if replay:
            context.replay()
        else:
            context.run(inputs, entry=entry)

    if contexts == threads:
        return [partial(once, context) for context in taken]
    return [measure.taking_turns(taken, once)] * threads
