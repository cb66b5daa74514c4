"""The tables of `nimblec inspect` by layer of the model and, for a training step, by phase."""

from collections.abc import Iterator
from dataclasses import fields

from rich.table import Table

from nimblec.base.places import Phase
from nimblec.cli.report import ROWS, capped, nbytes_text, seconds_text, table
from nimblec.inspect.inspection import Json
from nimblec.inspect.layers import Layers, Share, at_depth

_SEVERAL, _UNKNOWN, _ALL = "several", "unknown", "all"
_COLUMNS = (*(phase.value for phase in Phase), _SEVERAL, _UNKNOWN)
_NUMBERS = tuple(field.name for field in fields(Share))


def tables(facts: Json) -> Iterator[Table]:
    """Yield a table for each program whose ops name their layers, from `inspection.describe`."""
    for program in facts["programs"]:
        if program["layers"]:
            yield _table(program)


def _table(program: Json) -> Table:
    """Return a row for each layer, or set of fused layers: how many commands it has, and their time, each run alone."""
    finest = {
        (tuple(row["layers"]), tuple(row["phases"])): Share(**{name: row[name] for name in _NUMBERS})
        for row in program["layers"]
    }
    shares, depth = at_depth(finest, ROWS)
    is_timed = any(share.duration_ns for share in shares.values())
    columns = [c for c in _COLUMNS if any(_column(phases) == c for _, phases in shares)]
    columns = [*columns, _ALL] if any(phases for _, phases in shares) else [_ALL]
    cost = "time" if is_timed else "bytes"
    headers = [header for column in columns for header in (column, cost)]
    made = table(f"Program {program['name']!r}: commands by layer", "layer", *headers, right=headers)

    def cells(layers: Layers | None) -> Iterator[str]:
        parts = [(phases, share) for (of, phases), share in shares.items() if layers in (None, of)]
        for column in columns:
            found = [share for phases, share in parts if column in (_ALL, _column(phases))]
            yield from _cells(sum(found, Share()), is_timed=is_timed)

    capped(made, [(_name(layers), *cells(layers)) for layers in dict.fromkeys(of for of, _ in shares)])
    made.add_section()
    made.add_row("in all", *cells(None))
    if depth and not made.caption:
        made.caption = f"... by the first {depth} names of paths (--json lists all)"
        made.caption_justify = "left"
    return made


def _cells(share: Share, *, is_timed: bool) -> tuple[str, str]:
    count = share.launches + share.copies
    if not count:
        return "", ""
    return str(count), seconds_text(share.duration_ns / 1e9) if is_timed else nbytes_text(share.written)


def _column(phases: tuple[str, ...]) -> str:
    if len(phases) > 1:
        return _SEVERAL
    return phases[0] if phases else _UNKNOWN


def _name(layers: Layers) -> str:
    return " + ".join(layer or "(no one layer)" for layer in layers) or "(not known)"
