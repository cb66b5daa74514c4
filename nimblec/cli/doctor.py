"""``nimblec doctor``."""

from collections.abc import Iterator

import click
from rich.table import Table

from nimblec.base.errors import MissingPackageError
from nimblec.cli import report
from nimblec.cli.command import Command
from nimblec.cli.console import echo_json
from nimblec.inspect import doctor


@click.command("doctor", cls=Command, short_help="Show what this machine and installation can do.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def examine_installation(as_json: bool) -> None:
    """Show versions, GPUs or why there is none, caches, and which packages are missing for what.

    Writes nothing. The exit status is 2 if not even the CPU target can work.

    \b
    Examples:
      nimblec doctor
      nimblec doctor --json | jq .gpu.problem
    """
    facts = doctor.examine()
    if as_json:
        echo_json(facts)
    else:
        console = report.SafeConsole()
        for table in _tables(facts):
            console.print(table)
    if problem := facts["cpu"]["problem"]:
        raise MissingPackageError(f"the CPU target cannot work: {problem}")


def _tables(facts: doctor.Json) -> Iterator[Table]:
    versions = report.table("Versions", "package", "version")
    for package, version in facts["versions"].items():
        versions.add_row(package, version or "not installed")
    yield versions
    gpu = facts["gpu"]
    machine = report.table("Machine", "", "")
    machine.show_header = False
    machine.add_row("CPU", facts["cpu"]["processor"])
    for device in gpu["devices"]:
        described = f"compute capability {device['compute_capability']}, {device['multiprocessor_count']} SMs"
        machine.add_row("GPU", f"{device['name']}, {described}")
    if gpu["problem"]:
        machine.add_row("GPU", f"none: {gpu['problem']}")
    if gpu["driver"] or gpu["cuda"]:
        machine.add_row("driver", f"{gpu['driver'] or 'of unknown version'}, CUDA {gpu['cuda'] or 'unknown'}")
    yield machine
    caches = report.table("Caches", "cache", "path", "size", "mode", "problem", right=("size",))
    for cache in facts["caches"]:
        size = report.nbytes_text(cache["nbytes"]) if cache["mode"] else "none yet"
        caches.add_row(cache["name"], cache["path"], size, cache["mode"] or "", cache["problem"] or "")
    yield caches
    extras = report.table("Extras", "extra", "for", "state")
    for extra in facts["extras"]:
        lacks = [f"missing: {', '.join(extra['missing'])}"] if extra["missing"] else []
        extras.add_row(extra["name"], extra["for"], "; ".join((*lacks, *extra["problems"])) or "ok")
    yield extras
