"""Errors of the compiler, and messages made from those of others."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nimblert.errors import InputError, NimbleError

EXTRAS = {
    "onnx": "cpu",
    "onnxruntime": "cpu",
    "scipy": "cpu",
    "torch": "compile",
    "onnxscript": "compile",
    "onnx_ir": "compile",
    "cuda": "cuda",
    "cryptography": "signing",
}
"""Packages that a plain installation lacks, and the extra that installs each."""


class ArgumentError(InputError, TypeError):
    """An argument of `nimblec.compile` or an option of the command line is invalid."""


class CompileError(NimbleError):
    """The model was understood and cannot be compiled."""


class UnsupportedModelError(CompileError):
    """The model uses an operator, a dtype or a construct that the front end does not take."""


class TraceError(CompileError):
    """Running the model to record its kernels failed."""


class MissingPackageError(CompileError):
    """A part of the compiler needs a package that is not installed."""


@contextmanager
def user_code(what: str, *also: type[BaseException]) -> Iterator[None]:
    """Turn whatever the user's code raises inside the block into a TraceError that begins with ``what``.

    A CompileError is of our own code, and stays.
    """
    caught: tuple[type[BaseException], ...] = (Exception, *also)
    try:
        yield
    except CompileError:
        raise
    except caught as exc:
        # The user's code may raise anything, and its message must reach the user.
        first = root_cause(exc)
        where = f"{line} raised " if (line := users_line(first)) else ""
        said = f": {line}" if (line := first_line(first)) else ""
        raise TraceError(f"{what}: {where}{type(first).__name__}{said}") from exc


def users_line(exc: BaseException) -> str:
    """Return the innermost line of the user's own code in a traceback, as "line 7 of model.py"; "" if there is none."""
    frames = traceback.extract_tb(exc.__traceback__)
    places = [(frame.lineno, frame.filename) for frame in frames if not _is_frameworks(frame.filename)]
    return f"line {places[-1][0]} of {places[-1][1]}" if places else ""


def _is_frameworks(file: str) -> bool:
    """Return whether a file belongs to nimblec, a framework or Python."""
    modules = (sys.modules.get(name) for name in ("nimblec", "torch", "onnx", "onnx_ir", "onnxscript", "sympy"))
    roots = tuple(f"{Path(module.__file__).parent}{os.sep}" for module in modules if module and module.__file__)
    in_python = file.startswith(_PYTHON) and "site-packages" not in file
    return in_python or file.startswith(("<", *roots))


_PYTHON = f"{Path(os.__file__).parent}{os.sep}"


@contextmanager
def unforeseen() -> Iterator[None]:
    """Turn errors that a model provokes in nimblec's own code into a TraceError."""
    try:
        yield
    except NimbleError:
        raise
    except Exception as exc:
        raise TraceError(described(exc)) from exc


def described(exc: BaseException) -> str:
    """Return an unexpected error in one sentence: the last line of its traceback, and where it was raised."""
    (*_, frame) = traceback.extract_tb(exc.__traceback__)
    said = f": {first_line(exc)}" if str(exc) else ""
    return f"{type(exc).__name__}{said} ({Path(frame.filename).name}, line {frame.lineno})"


def root_cause(exc: BaseException) -> BaseException:
    """Return the first error of a chain of causes."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def forget_locals(exc: BaseException) -> None:
    """Free what the local variables in the tracebacks of an error and its causes keep alive; the tracebacks stay."""
    for each in _chain(exc):
        traceback.clear_frames(each.__traceback__)


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from or while handling."""
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def data_dependent(operator: str) -> str:
    """Return the refusal of an operator whose result, or its size, decides what runs next."""
    return (
        f"{operator}: its result decides what runs next, and a plan is static: "
        "take data-dependent sizes and .item() out of the model"
    )


def first_line(exc: BaseException) -> str:
    """Return the first line of an error's message: frameworks append advice and stacks."""
    return str(exc).strip().split("\n", 1)[0]


def missing_package(exc: ModuleNotFoundError) -> MissingPackageError | None:
    """Return the error for a failed import; None if no extra of nimblec installs that module."""
    name = (exc.name or "").partition(".")[0]
    if name not in EXTRAS:
        return None
    return MissingPackageError(f"{name} is not installed, and this needs it: pip install 'nimblec[{EXTRAS[name]}]'")
