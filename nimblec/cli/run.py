"""``nimblec run``."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np

from nimblec.cli import arguments, report
from nimblec.cli.command import OWN_PROCESS, Command
from nimblec.cli.console import echo
from nimblert import container, golden
from nimblert.errors import InputError
from nimblert.executable import Executable, load
from nimblert.onnx_session import share_thread_pool
from nimblert.plan import Plan, Program, Target

WARM_UPS = 20
"""The most runs before latencies count."""


@click.command("run", cls=Command)
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--entry",
    metavar="NAME",
    help="The entry to run, where PLAN has several.  [default: the only one, or main]",
)
@click.option(
    "--input",
    "files",
    type=arguments.NamedFile(),
    multiple=True,
    help="The array of an input. Inputs not given are drawn from the seed. Repeatable.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write every output to DIR as NAME.npy; characters that suit no file name become _.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measure the latency of N runs, warmed up first.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    metavar="S",
    help="The seed of inputs that are not given.",
)
def run_plan(
    plan: Path,
    entry: str | None,
    files: tuple[tuple[str, Path], ...],
    output_dir: Path | None,
    repeat: int | None,
    seed: int,
) -> None:
    """Run PLAN once and print its outputs.

    Prints the name, type and digest (the first 6 bytes of SHA-256) of every output, and the values
    of small ones. Of an entry for several sizes, the first that the given inputs fit is run.

    \b
    Examples:
      nimblec run digits.plan --input image=samples/digit_7.npy
      nimblec run resnet.plan --repeat 1000
      nimblec run bert.plan --input input_ids=tokens.npy --output-dir out
    """
    given = arguments.read_arrays(files)
    with load(_prepared(plan)) as executable:
        chosen = executable.entry(entry)
        program = _first_fitting(chosen.programs, given)
        tensors = {tensor.name: tensor for tensor in program.inputs}
        if unknown := [name for name in given if name not in tensors]:
            raise InputError(f"input {unknown[0]!r} is not one of the plan's inputs {list(tensors)}")
        restored = {name: arguments.restore_dtype(array, tensors[name]) for name, array in given.items()}
        drawn = golden.draw_inputs(program, seed)
        outputs = chosen.run({**drawn, **restored})
        latencies = measure(executable, repeat) if repeat else []
    console = report.SafeConsole()
    if missing := [name for name in tensors if name not in given]:
        echo(f"drawn from seed {seed}: {', '.join(missing)}")
    digests = {name: golden.digest(array) for name, array in outputs.items()}
    console.print(report.outputs(outputs, digests))
    if latencies:
        echo(report.latency_text(latencies))
    if output_dir is not None:
        for path in arguments.write_arrays(output_dir, outputs):
            echo(f"wrote {path}")


def _prepared(path: Path) -> Plan:
    """The plan in a file. A CPU plan's sessions share one thread pool if the command line is the program.

    ONNX Runtime then refuses sessions with threads of their own, which a calling program may need.
    """
    plan = container.read(path)
    if plan.target is Target.CPU and click.get_current_context().obj == OWN_PROCESS:
        share_thread_pool()
    return plan


def _first_fitting(programs: Sequence[Program], given: Mapping[str, np.ndarray]) -> Program:
    """The first program whose inputs have the shapes of those given; the first one if none has."""
    for program in programs:
        if all(tensor.shape == given[tensor.name].shape for tensor in program.inputs if tensor.name in given):
            return program
    return programs[0]


def measure(executable: Executable, repeat: int) -> list[float]:
    """Seconds of each of ``repeat`` synchronised runs on inputs that are already in place."""
    for _ in range(min(repeat, WARM_UPS)):
        executable.replay()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        executable.replay()
        seconds.append(time.perf_counter() - start)
    return seconds
