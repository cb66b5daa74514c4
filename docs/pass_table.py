"""The table of optimizer.md: every pass of -O2 in its order, from the passes themselves.

``python -m bench.readme_tables`` writes it into the document.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

from nimblec.optimize.o2 import TRITON
from nimblec.optimize.pipeline import Pass

ROOT = Path(__file__).parent.parent


def rows() -> Iterator[str]:
    """A line for each pass of each phase; passes that half precision runs twice are listed once."""
    yield "| phase | pass | what it does | why it stands there |"
    yield "|---|---|---|---|"
    shown = set()
    for phase in (phase for pipeline in TRITON for phase in pipeline.phases):
        for each in phase.passes:
            cells = (phase.name, f"[`{each.name}`](../{_file(each)})", each.summary.replace("``", "`"), each.reason)
            row = f"| {' | '.join(cells)} |"
            if row not in shown:
                yield row
            shown.add(row)


def _file(each: Pass) -> str:
    """The file of the pass in the repository, even if the installed package is running."""
    path = Path(*inspect.unwrap(each.run).__module__.split("."))
    return f"{path}.py" if (ROOT / f"{path}.py").exists() else f"{path}/__init__.py"


if __name__ == "__main__":
    print("\n".join(rows()))
