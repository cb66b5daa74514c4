"""Why a model cannot be compiled."""

from nimblert.errors import NimbleError


class CompileError(NimbleError):
    """The model was understood and cannot be compiled."""


class UnsupportedModelError(CompileError):
    """The model uses an operator, a dtype or a construct that the front end does not take."""


class TraceError(CompileError):
    """Running the model to record its kernels failed."""
