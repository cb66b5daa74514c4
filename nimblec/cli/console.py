r"""Text for the terminal: lines are printed through here, tables through `SafeConsole`.

Names in a plan or a model may hold escape sequences or bidirectional controls. Characters that do not print are
escaped as in JSON: \u001b.
"""

import io
import json
import os
import sys


def printable(text: str, *, keep: str = "") -> str:
    """Escape the characters of ``text`` that do not print, except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


def echo(line: str, *, err: bool = False) -> None:
    """Print one line. Line breaks in it are escaped too, so that a name cannot pose as a line of output."""
    _write(printable(line), err=err)


def echo_lines(text: str, *, err: bool = False) -> None:
    """Print text of several lines."""
    _write(printable(text, keep="\n"), err=err)


def echo_json(facts: object) -> None:
    """Print facts as JSON."""
    echo_lines(json.dumps(facts, indent=2, ensure_ascii=False))


def _write(text: str, *, err: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


def discard_what_is_closed() -> None:
    """Let what is written to a closed stream (``>&-``) go nowhere, as print does, rather than to a file opened next."""
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def escape_what_has_no_encoding() -> None:
    """Let both streams escape what the locale's encoding lacks instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
