"""The stages of a compilation, shown as they go by."""

import sys
from types import TracebackType
from typing import Self

from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from nimblec.cli.console import echo
from nimblec.cli.report import SafeConsole, seconds_text


class StageProgress:
    """An Observer of a compilation, and a context manager.

    Shows the running stage on a terminal; with ``verbose``, also prints a line as each stage ends, even to
    a pipe. Everything goes to standard error.
    """

    def __init__(self, *, verbose: bool, quiet: bool) -> None:
        self._verbose = verbose
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=SafeConsole(stderr=True),
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, stage: str, seconds: float | None) -> None:
        """Note that a stage starts (``seconds`` is None) or has ended."""
        if seconds is None:
            self._tasks[stage] = self._progress.add_task(stage, total=1)
            return
        self._progress.update(self._tasks[stage], completed=1)
        if self._verbose:
            echo(f"{stage}: {seconds_text(seconds)}", err=True)
