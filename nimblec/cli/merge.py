"""``nimblec merge``."""

from pathlib import Path

import click

from nimblec.cli.command import Command
from nimblec.cli.console import echo
from nimblec.cli.report import nbytes_text
from nimblec.plan.merging import merge
from nimblert.plan.parts import describe


@click.command("merge", cls=Command, short_help="Merge plans for several machines into one file.")
@click.argument("plans", metavar="PLAN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FAT.plan",
    help="The file to write.",
)
def merge_plans(plans: tuple[Path, ...], output: Path) -> None:
    """Merge plans of one model, for GPUs of several kinds and the CPU, into one file, a fat plan.

    Weights of several of them are in it once. The plans must agree in entries, sizes, inputs, outputs and state; on
    an error nothing is written. `run`, `bench` and nimblert.load(path) take the first part that runs on the machine, a
    GPU's before the CPU's; `inspect`, `check-device`, `verify` and `sign` take a fat plan, too.

    \b
    Examples:
      nimblec merge h100.plan l40.plan cpu.plan -o model.plan
      nimblec inspect model.plan
    """
    if output.resolve() in [plan.resolve() for plan in plans]:
        raise click.UsageError(f"{output}: is one of the plans: name another file.")
    fat = merge(plans, output)
    for index, (path, part) in enumerate(zip(plans, fat.parts, strict=True), 1):
        echo(f"part {index}: {path}, for {describe(part.target, part.device)}, {nbytes_text(part.file.nbytes)}")
    echo(f"wrote {output}, {nbytes_text(output.stat().st_size)}: {nbytes_text(fat.weights_nbytes)} are shared weights")
