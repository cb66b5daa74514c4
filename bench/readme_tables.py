"""Fill the tables of README.md, docs/measured.md and docs/optimizer.md from the committed results and the passes.

Usage: ``python -m bench.readme_tables [--check]``. A table is the output of COMMAND, between ``<!-- table: COMMAND
-->`` and ``<!-- end of table -->``; it is left as it is if its results do not exist. With --check nothing is written,
and the exit status is 1 if a table is out of date.
"""

import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from bench.environment import NOT_MEASURED

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = (README, ROOT / "docs" / "measured.md", ROOT / "docs" / "optimizer.md")

_TABLE = re.compile(r"<!-- table: (.*?) -->\n(.*?)<!-- end of table -->", re.DOTALL)


def filled(text: str) -> str:
    """Return ``text`` with the current output of each table's command."""

    def replaced(table: re.Match[str]) -> str:
        return f"<!-- table: {table[1]} -->\n{printed(table[1]) or table[2]}<!-- end of table -->"

    return _TABLE.sub(replaced, text)


def printed(command: str) -> str:
    """Return the output of ``python ARGUMENTS``; empty if its results do not exist."""
    program, *arguments = shlex.split(command)
    assert program == "python", command
    out, error = StringIO(), StringIO()
    status: object = 0
    with redirect_stdout(out), redirect_stderr(error), chdir(ROOT):
        try:
            _run(arguments)
        except SystemExit as exc:
            status = exc.code
    if status == NOT_MEASURED:
        sys.stderr.write(error.getvalue())
        return ""
    if status:
        raise SystemExit(f"{command}: {error.getvalue()}{status}")
    return f"\n{out.getvalue().strip()}\n\n"


def _run(arguments: list[str]) -> None:
    """Do what ``python ARGUMENTS`` does, in this process: most of the commands take less time than starting one."""
    before = sys.argv
    sys.argv = arguments[arguments[0] == "-m" :]
    try:
        if arguments[0] == "-m":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # another imports it
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.argv = before


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
