"""Why a model cannot be compiled."""

from nimblert.errors import NimbleError

EXTRAS = {
    "onnx": "cpu",
    "onnxruntime": "cpu",
    "scipy": "cpu",
    "torch": "compile",
    "onnxscript": "compile",
    "cuda": "cuda",
}
"""Packages that a plain installation lacks, and the extra that brings each."""


class CompileError(NimbleError):
    """The model was understood and cannot be compiled."""


class UnsupportedModelError(CompileError):
    """The model uses an operator, a dtype or a construct that the front end does not take."""


class TraceError(CompileError):
    """Running the model to record its kernels failed."""


class MissingPackageError(CompileError):
    """A part of the compiler needs a package that is not installed."""


def root_cause(exc: BaseException) -> BaseException:
    """What was raised first, of errors that were raised from one another."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def first_line(exc: BaseException) -> str:
    """What an error says first: frameworks go on with advice and stacks."""
    return str(exc).strip().split("\n", 1)[0]


def missing_package(exc: ModuleNotFoundError) -> MissingPackageError | None:
    """What to tell where an import failed: None if the module is not one of ours to bring."""
    name = (exc.name or "").partition(".")[0]
    if name not in EXTRAS:
        return None
    return MissingPackageError(f"{name} is not installed, and this needs it: pip install 'nimblec[{EXTRAS[name]}]'")
