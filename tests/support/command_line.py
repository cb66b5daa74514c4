"""The command line, run in the process of the test."""

from dataclasses import dataclass

import pytest

from nimblec import cli

OLD_PLAN = b"\0\0\0\0NPLN and the rest"
"""What the command line takes for a plan that it may replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Exit status, standard output and standard error of one invocation."""

    status: int
    out: str
    err: str


class CommandLine:
    """Runs ``nimblec ARGS``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> Done:
        """Run it, whatever it returns."""
        with pytest.raises(SystemExit) as exit_info:
            cli.main([str(arg) for arg in args])
        captured = self._capsys.readouterr()
        return Done(status=int(exit_info.value.code or 0), out=captured.out, err=captured.err)

    def prints(self, *args: object) -> str:
        """Run it, expect success, and give back its standard output."""
        done = self(*args)
        assert done.status == 0, done
        return done.out

    def refused(self, *args: object) -> str:
        """Run it, expect a refusal, and give back its one sentence."""
        done = self(*args)
        assert done.status == 2, done
        (line,) = done.err.splitlines()
        assert line.startswith("nimblec: ")
        return line.removeprefix("nimblec: ")
