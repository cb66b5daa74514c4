"""Tables in Markdown."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MISSING = "-"
"""The cell of a figure that was not measured."""


def table(names: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table; a column may have an empty name."""
    return [row(names).replace("|  |", "| |"), "|---" * len(names) + "|", *map(row, rows)]


def by_columns(columns: Mapping[str, Callable[..., str]], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return the lines of a table whose cells are the results of each column's function of each row."""
    return table([*columns], [[cell(*each) for cell in columns.values()] for each in rows])


def row(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int) -> str:
    """Return a figure with ``digits`` decimals; `MISSING` if it is None or infinite."""
    return MISSING if value is None or math.isinf(value) else f"{value:.{digits}f}"


def mib(nbytes: int | None) -> str:
    """Return bytes in MiB."""
    return number(nbytes and nbytes / 2**20, 1)
