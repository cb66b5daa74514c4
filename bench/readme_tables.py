"""Fill the tables of README.md from the results that are committed.

Usage: ``python -m bench.readme_tables [--check]``. A table stands between ``<!-- table: COMMAND -->`` and
``<!-- end of table -->``, and is what COMMAND prints. Where its results do not exist yet, what stands there stays.
With --check nothing is written; the exit status is 1 where the README is not up to date.
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

_TABLE = re.compile(r"<!-- table: (.*?) -->\n(.*?)<!-- end of table -->", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with every table as its command prints it."""

    def replaced(table: re.Match[str]) -> str:
        return f"<!-- table: {table[1]} -->\n{printed(table[1]) or table[2]}<!-- end of table -->"

    return _TABLE.sub(replaced, text)


def printed(command: str) -> str:
    """What ``python -m bench.NAME --markdown`` prints; nothing where its results are not there."""
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
    """Write the README, or compare."""
    before = README.read_text()
    after = filled(before)
    if "--check" in arguments:
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
