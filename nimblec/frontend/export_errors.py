"""What an exporter refuses, in one sentence: the user's line, what is wrong with it, and a way out."""

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from nimblec.errors import NimbleError, TraceError, first_line, root_cause, users_line

_LOGGERS = ("torch", "onnxscript", "onnx_ir")


@contextmanager
def exporting(name: str, exporter: str) -> Iterator[None]:
    """Around a call of ``exporter`` on the model ``name``: what it raises is a TraceError, what it logs is nothing.

    An exporter runs the user's code, which may raise anything.
    """
    try:
        with _quiet():
            yield
    except NimbleError:
        raise
    except Exception as exc:  # nobody knows what a user's code may raise, and all of it is to be told
        first = root_cause(exc)
        line = users_line(first)
        if isinstance(first, GuardOnDataDependentSymNode):
            raise TraceError(
                f"{name}: {line or 'its code'} lets the value of a tensor decide what runs next, or a size, and a plan "
                "is static: use torch.where or torch.cond there, or take it out of the model"
            ) from exc
        where = f"{line} raised {type(first).__name__}: " if line else ""
        raise TraceError(f"{name}: {exporter} refuses it: {where}{_plain(first)}") from exc


def _plain(exc: BaseException) -> str:
    """The first line of an error without colours."""
    return re.sub(r"\x1b\[\d*m", "", first_line(exc))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters tell their own developers: deprecations, graphs that fail, packages they do without."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # torch.export prints the graph that fails
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
