r"""Text for the terminal: every line that the command line prints goes through here, its tables through `SafeConsole`.

A plan or a model may be called "\x1b]0;...\x07", or turn the text around it with bidirectional controls.
Characters that do not print are shown as JSON writes them, \u001b.
"""

import io
import json
import sys


def printable(text: str, *, keep: str = "") -> str:
    """``text`` with every character escaped that does not print, but for those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


def echo(line: str, *, err: bool = False) -> None:
    """Print one line; a line break in it, by which a name could pose as a line of ours, is escaped, too."""
    _write(printable(line), err=err)


def echo_lines(text: str, *, err: bool = False) -> None:
    """Print text of several lines."""
    _write(printable(text, keep="\n"), err=err)


def _write(text: str, *, err: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


def escape_what_has_no_encoding() -> None:
    """Let both streams escape what the locale's encoding lacks, which would else be an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
