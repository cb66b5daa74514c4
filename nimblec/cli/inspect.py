"""``nimblec inspect``."""

import json
from itertools import combinations
from pathlib import Path

import click

from nimblec.cli import layer_tables, picture, report
from nimblec.cli.command import Command, refuse_both
from nimblec.cli.console import echo, echo_json
from nimblec.inspect import dot, inspection, machine, sbom, trace
from nimblec.inspect.report import html_page
from nimblert.check.verify import read_plan
from nimblert.plan import Plan, Target
from nimblert.plan.files import replacing


@click.command("inspect", cls=Command, short_help="Show what PLAN holds.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--sbom", "as_sbom", is_flag=True, help="Print a bill of materials, CycloneDX 1.5 JSON, instead.")
@click.option("--timeline", "as_timeline", is_flag=True, help="Draw the streams in the terminal instead.")
@click.option(
    "--chrome-trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the timeline as JSON for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--dot",
    "dot_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the graph of the commands for Graphviz.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page that shows everything in a browser, without a network.",
)
def inspect_plan(
    plan: Path,
    as_json: bool,
    as_sbom: bool,
    as_timeline: bool,
    trace_file: Path | None,
    dot_file: Path | None,
    html_file: Path | None,
) -> None:
    """Show what PLAN holds: target, inputs, outputs, commands, schedule, kernels, memory, weights, sizes.

    Of a fat plan it shows the parts, and which of them is taken here and why.
    Works on any machine, whatever the plan was made for. The timeline, the trace and the critical
    path are simulated from the durations of single commands, measured when the plan was made.

    \b
    Examples:
      nimblec inspect model.plan
      nimblec inspect model.plan --json | jq .sizes
      nimblec inspect model.plan --sbom > model.cdx.json
      nimblec inspect model.plan --timeline
      nimblec inspect model.plan --chrome-trace trace.json --dot graph.dot
      nimblec inspect model.plan --html report.html
    """
    forms = {"--json": as_json, "--sbom": as_sbom, "--timeline": as_timeline}
    for one, other in combinations(forms, 2):
        refuse_both(one, other, given=forms[one] and forms[other])
    files = [path for path in (trace_file, dot_file, html_file) if path is not None]
    resolved = [path.resolve() for path in (plan, *files)]
    if len(set(resolved)) < len(resolved):
        raise click.UsageError("PLAN and the files to write must be different files.")
    opened = read_plan(plan, fat=True)
    if opened.target is Target.FAT:
        _print_parts(opened, plan, as_json=as_json, is_alone=not (as_sbom or as_timeline or files))
        return
    if as_json:
        echo_json(inspection.describe(opened, file_nbytes=plan.stat().st_size))
    elif as_sbom:
        echo_json(sbom.bill_of_materials(opened, plan.name))
    elif as_timeline or not files:
        _print_tables(opened, file_nbytes=plan.stat().st_size, as_timeline=as_timeline)
    if trace_file is not None:
        _write_text(trace_file, json.dumps(trace.chrome_trace(opened)), quiet=as_json or as_sbom)
    if dot_file is not None:
        _write_text(dot_file, dot.dot(opened), quiet=as_json or as_sbom)
    if html_file is not None:
        page = html_page(opened, name=plan.name, file_nbytes=plan.stat().st_size)
        _write_text(html_file, page, quiet=as_json or as_sbom)


def _print_tables(plan: Plan, *, file_nbytes: int, as_timeline: bool) -> None:
    console = report.SafeConsole()
    if as_timeline:
        for program in plan.programs:
            console.print(*picture.picture(program, width=console.width), sep="\n")
        return
    facts = inspection.describe(plan, file_nbytes=file_nbytes)
    for table in (*report.inspected(facts), *layer_tables.tables(facts)):
        console.print(table)


def _print_parts(fat: Plan, path: Path, *, as_json: bool, is_alone: bool) -> None:
    if not is_alone:
        raise click.UsageError(f"{path}: is a fat plan, of which only the parts are shown: inspect the plans it is of.")
    facts = machine.examine(fat, str(path))
    if as_json:
        echo_json(facts)
        return
    table = report.table("Parts", "part", "for", "size", "here", right=("size",))
    for index, part in enumerate(facts["parts"], 1):
        here = "; ".join(part["lacks"]) or "runs"
        table.add_row(str(index), part["for"], report.nbytes_text(part["file_nbytes"]), here)
    table.add_row("", "weights that parts share", report.nbytes_text(facts["shared_nbytes"]), "")
    report.SafeConsole().print(table)
    echo(facts["choice"])


def _write_text(path: Path, text: str, *, quiet: bool) -> None:
    """Write a file, and say so unless that would mix with printed data."""
    with replacing(path) as file:
        file.write(text.encode())
    if not quiet:
        echo(f"wrote {path}")
