"""``nimblec check-device``."""

from pathlib import Path

import click

from nimblec.cli.command import Command
from nimblec.cli.console import echo, echo_json
from nimblec.inspect import machine
from nimblert.check.verify import read_plan

LACKING = 1
"""The exit status where this machine cannot run the plan."""


@click.command("check-device", cls=Command, short_help="Name what this machine lacks for PLAN.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--device", type=click.IntRange(0), default=0, metavar="N", help="The ordinal of the GPU.  [default: 0]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def check_device(plan: Path, device: int, as_json: bool) -> None:
    """Name what this machine lacks for PLAN, or for each part of a fat plan: packages, driver, GPU, memory.

    Nothing is loaded. Exit status: 0 if PLAN runs here, 1 if it does not, 2 on an error.

    \b
    Examples:
      nimblec check-device model.plan
      nimblec check-device model.plan --json | jq '.parts[].lacks'
    """
    facts = machine.examine(read_plan(plan, fat=True), str(plan), ordinal=device)
    if as_json:
        echo_json(facts)
    else:
        for index, part in enumerate(facts["parts"], 1):
            for sentence in part["lacks"] or ["nothing is missing"]:
                echo(f"part {index}, for {part['for']}: {sentence}" if facts["choice"] else sentence)
        echo(facts["choice"] or f"{plan} {'runs' if facts['runs'] else 'does not run'} here")
    if not facts["runs"]:
        click.get_current_context().exit(LACKING)
