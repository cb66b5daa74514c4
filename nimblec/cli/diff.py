"""``nimblec diff``."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import StringIO
from itertools import groupby
from math import isfinite
from pathlib import Path

import click
from rich.table import Table

from nimblec.base.errors import ArgumentError
from nimblec.cli.arguments import Parsed
from nimblec.cli.command import Command
from nimblec.cli.console import echo_json
from nimblec.cli.report import SafeConsole, capped, seconds_text, table
from nimblec.inspect.plan_difference import Change, Figure, PlanDifference, Section, Value, compare
from nimblert.check.verify import read_plan
from nimblert.errors import PlanError

DIFFERENT = 1
"""The exit status where plans differ, or a condition of --fail-on holds."""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>Differences between two plans</title>
<pre style="font-family: ui-monospace, monospace; line-height: 1.25">{code}</pre>
</html>
"""

_GROWTH = re.compile(r"(size|arena|latency)(?:\+(\d{1,6}(?:\.\d{1,6})?)%)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition of --fail-on: a section that changed, or a figure that grew by more than ``percent``."""

    text: str
    name: str
    percent: float = 0.0

    def failures(self, found: PlanDifference) -> Iterator[str]:
        """Yield why the condition holds. Raises PlanError where the plans do not record what it asks for."""
        if self.name in set(Section):
            if self.name == Section.NUMERICS and found.changes and found.not_compared:
                raise PlanError(f"{self.text} cannot be judged: {found.not_compared[0]}")
            changes = [change for change in found.changes if change.section == self.name and not change.within]
            if changes:
                yield f"{len(changes)} changed, the first is {changes[0].what}"
            return
        is_latency = self.name == "latency"
        figures = {"size": {"the file": found.file_nbytes}, "arena": {"the arena": found.arena_nbytes}}
        for what, figure in figures.get(self.name, found.latency_ns).items():
            if is_latency and found.changes and 0 in figure:
                raise PlanError(f"{self.text} cannot be judged: a plan records no times of program {what!r}")
            if figure[1] > figure[0] * (1 + self.percent / 100):
                before, after = (seconds_text(n / 1e9) if is_latency else f"{n:,} bytes" for n in figure)
                yield f"{what} grew from {before} to {after} ({_growth(figure)})"


def _read_condition(text: str) -> Condition:
    if text in set(Section):
        return Condition(text=text, name=text)
    growth = _GROWTH.fullmatch(text)
    if growth is None:
        known = ", ".join(Section)
        raise ArgumentError(f"{text!r} is no condition: name one of {known}, or size+N%, arena+N%, latency+N%")
    return Condition(text=text, name=growth[1], percent=float(growth[2] or 0))


@click.command("diff", cls=Command, short_help="Show what differs between plans A and B.")
@click.argument("before", metavar="A", type=click.Path(path_type=Path))
@click.argument("after", metavar="B", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Write the tables as a page to this file, too.")
@click.option(
    "--fail-on",
    "conditions",
    type=Parsed("CONDITIONS", lambda text: tuple(map(_read_condition, text.split(",")))),
    help="Exit with 1 only where one of these holds, with commas between them: the name of a section (interface, "
    "weights, numerics ...) that differs, size+5%, arena+5% or latency+3%.",
)
def diff_plans(
    before: Path, after: Path, as_json: bool, html: Path | None, conditions: tuple[Condition, ...] | None
) -> None:
    """Show what differs between plans A and B, such as two builds of one model.

    \b
    made       producer, versions, target, device
    interface  entries, sizes, inputs, outputs
    ops        how often each operator is computed
    kernels    added, gone, with another tiling or other code; A and B are numbers of launches
    schedule   streams, events, commands, critical path
    memory     bytes of file, code, weights, state and arena
    weights    those of other values, and the largest difference
    numerics   outputs that the plans record for the same random inputs, beyond the recorded tolerance
    times      measured when the plans were made; a build with --reproducible has none

    Nothing is run, so any machine will do. Exit status: 0 if the plans are equal, 1 if they differ, 2 on an error.
    With --fail-on: 1 if a condition holds, and 2 if the plans do not record what it asks for.

    \b
    Examples:
      nimblec diff old.plan new.plan
      nimblec diff old.plan new.plan --fail-on interface,numerics,size+5%,latency+3%
    """
    found = compare(read_plan(before), read_plan(after))
    failed = [f"{condition.text}: {why}" for condition in conditions or () for why in condition.failures(found)]
    console = SafeConsole(record=html is not None)
    if as_json:
        echo_json(_facts(found, failed))
        console.file = StringIO()
    console.print(_summary(before, after, found), soft_wrap=True)
    for section, changes in groupby(found.changes, key=lambda change: change.section):
        console.print(_table(section, list(changes)))
    for sentence in (*found.not_compared * bool(found.changes), *(f"failed: {reason}" for reason in failed)):
        console.print(sentence, soft_wrap=True)
    if html is not None:
        html.write_text(console.export_html(code_format=_PAGE, inline_styles=True), encoding="utf-8")
    if failed or (found.changes and not conditions):
        click.get_current_context().exit(DIFFERENT)


def _facts(found: PlanDifference, failed: list[str]) -> dict[str, object]:
    facts = asdict(found)
    for change in facts["changes"]:
        if change["largest"] is not None and not isfinite(change["largest"]):
            change["largest"] = "infinite"
    return {"equal": not found.changes, **facts, "failed": failed}


def _summary(before: Path, after: Path, found: PlanDifference) -> str:
    if not found.changes:
        return f"{before} and {after} are equal"
    groups = groupby(found.changes, key=lambda change: change.section)
    return f"{before} and {after} differ: " + ", ".join(f"{len([*of])} in {section}" for section, of in groups)


def _table(section: Section, changes: list[Change]) -> Table:
    first = ("program",) if any(change.program for change in changes) else ()
    made = table(section.capitalize(), *first, "what", "A", "B", "", right=("A", "B"))
    rows = [(c.what, _text(c, c.before), _text(c, c.after), c.note or _change(c)) for c in changes]
    return capped(made, [(c.program, *row) if first else row for c, row in zip(changes, rows, strict=True)])


def _text(change: Change, value: Value) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return seconds_text(value / 1e9) if change.section is Section.TIMES else f"{value:,}"


def _change(change: Change) -> str:
    before, after = change.before, change.after
    if not isinstance(before, int) or not isinstance(after, int):
        return "gone" if after is None else "added" if before is None else ""
    return _growth((before, after)) if change.section in {Section.MEMORY, Section.TIMES} else ""


def _growth(figure: Figure) -> str:
    return f"{figure[1] / figure[0] - 1:+.1%}" if figure[0] else "from nothing"
