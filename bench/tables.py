"""Tables in Markdown."""

import math
from collections.abc import Iterable, Sequence

MISSING = "-"
"""The cell of a figure that was not measured."""


def header(names: Sequence[str]) -> list[str]:
    """The first two lines of a table; a column may have an empty name."""
    return [row(names).replace("|  |", "| |"), "|---" * len(names) + "|"]


def row(cells: Iterable[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int) -> str:
    """A figure with ``digits`` decimals; `MISSING` if it is None or infinite."""
    return MISSING if value is None or math.isinf(value) else f"{value:.{digits}f}"


def mib(nbytes: int | None) -> str:
    """Bytes in MiB."""
    return number(nbytes and nbytes / 2**20, 1)
