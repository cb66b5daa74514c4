"""Fill the tables of README.md, docs/measured.md and docs/optimizer.md from the committed results and the passes.

Usage: ``python -m bench.readme_tables [--check]``. A table is the output of COMMAND, between ``<!-- table: COMMAND
-->`` and ``<!-- end of table -->``; it is left as it is if its results do not exist. With --check nothing is written,
and the exit status is 1 if a table is out of date.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.environment import NOT_MEASURED

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = (README, ROOT / "docs" / "measured.md", ROOT / "docs" / "optimizer.md")

_TABLE = re.compile(r"<!-- table: (.*?) -->\n(.*?)<!-- end of table -->", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with the current output of each table's command."""

    def replaced(table: re.Match[str]) -> str:
        return f"<!-- table: {table[1]} -->\n{printed(table[1]) or table[2]}<!-- end of table -->"

    return _TABLE.sub(replaced, text)


def printed(command: str) -> str:
    """The output of ``python ARGUMENTS``; empty if its results do not exist."""
    program, *arguments = shlex.split(command)
    assert program == "python", command
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == NOT_MEASURED:
        sys.stderr.write(done.stderr)
        return ""
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    return f"\n{done.stdout.strip()}\n\n"


def main(arguments: Sequence[str]) -> int:
    """Write the documents, or check them."""
    changed = {}
    for document in DOCUMENTS:
        before = document.read_text()
        if (after := filled(before)) != before:
            changed[document] = after
    if "--check" in arguments:
        return int(bool(changed))
    for document, text in changed.items():
        document.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
