"""The common parts of all commands: errors of one sentence, and the order of commands in the help."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from nimblec.base.errors import missing_package
from nimblec.cli.console import echo_lines
from nimblert.errors import NimbleError

DEBUG = "nimblec.debug"

OWN_PROCESS = "own process"
"""The context's object if the command line is the whole process, not a function that a program calls."""


class Command(click.Command):
    """A command whose errors are one sentence, after a traceback with --debug."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--debug"],
                is_flag=True,
                expose_value=False,
                callback=lambda ctx, _, value: ctx.meta.update({DEBUG: value}),
                help="Print the traceback of an error.",
            )
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn its errors into a message for the terminal."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `Group` handles it
        except (NimbleError, OSError, ModuleNotFoundError) as exc:
            sentence = _sentence(exc)
            if sentence is None:
                raise
            if ctx.meta[DEBUG]:
                echo_lines(traceback.format_exc().rstrip(), err=True)
            raise click.ClickException(sentence) from exc


def _sentence(exc: NimbleError | OSError | ModuleNotFoundError) -> str | None:
    """Return the message for the user; None if a module is missing that no extra of nimblec installs."""
    if isinstance(exc, ModuleNotFoundError):
        missing = missing_package(exc)
        return str(missing) if missing else None
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
    return " ".join(str(exc).split())


class ReaderGoneError(Exception):
    """The reader of standard output has gone, as in ``nimblec inspect model.plan | head``."""


class Group(click.Group):
    """Lists commands in order of use, and raises ReaderGoneError when the reader of its output has gone."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments; click prints --help here, and would exit with 1 on a broken pipe."""
        with _printing():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; raise ReaderGoneError on a broken pipe."""
        with _printing():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order in which they were added."""
        del ctx
        return list(self.commands)


@contextmanager
def _printing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as exc:
        raise ReaderGoneError from exc
    # click fails to print --help or --version; `Command` handles its own errors.
    except OSError as exc:
        raise click.ClickException(exc.strerror or str(exc)) from exc


def refuse_both(one: str, other: str, *, given: bool) -> None:
    """Raise UsageError if two options that exclude each other are both ``given``."""
    if given:
        raise click.UsageError(f"{one} and {other} cannot be used together.")
