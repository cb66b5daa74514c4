"""Errors of exporters in one sentence: the user's line, what is wrong with it, and a way out."""

import io
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from nimblec.base.errors import TraceError, first_line, root_cause, users_line
from nimblert.errors import NimbleError

BY_VALUE = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""Errors of calls whose result or its size depends on the values of tensors that only have a shape."""

_UNTRANSLATED = re.compile(r"No ONNX function found for <(?:OpOverload\(op='([\w.]+)'|[\w.]+\.(\w+)\.\w+ object at )")
"""Of operators that take functions, torch (2.15) names the class, in a module that is called as the operator."""

_EXPERTS = "transformers.grouped_mm_fallback"
_COMPLEX = "No decompositions registered for the complex-valued input"

FIXED = re.compile(r"You marked (.+?) as dynamic but your code specialized it to be a constant \((\d+)\)")
"""Of a dimension that the code of a model fixes."""


@contextmanager
def exporting(name: str, exporter: str) -> Iterator[None]:
    """Turn what ``exporter`` raises for the model ``name`` into a TraceError, and silence its log.

    An exporter runs the user's code, which may raise anything.
    """
    try:
        with quiet_torch():
            yield
    except NimbleError:
        raise
    except Exception as exc:  # the user's code may raise anything, and the user needs to see it
        first = root_cause(exc)
        line = users_line(first)
        if isinstance(first, BY_VALUE):
            raise TraceError(
                f"{name}: {line or 'its code'} makes control flow or a size depend on the value of a tensor, and a "
                "plan is static: use torch.where or torch.cond there, or move it out of the model"
            ) from exc
        # A translation has raised it.
        if isinstance(first, NimbleError):
            raise TraceError(f"{name}: {first}") from exc
        if found := _UNTRANSLATED.search(str(first)):
            untranslated = found[1] or found[2]
            if untranslated == _EXPERTS:
                raise TraceError(
                    f"{name}: torch.onnx.export has no translation of {_EXPERTS}: call "
                    'model.set_experts_implementation("batched_mm") first'
                ) from exc
            what = f"{untranslated} of complex numbers" if _COMPLEX in str(first) else untranslated
            raise TraceError(
                f"{name}: torch.onnx.export has no translation of {what}: compute it by other operators, or "
                "compile for --target cuda"
            ) from exc
        if fixed := FIXED.search(str(first)):
            dimension, size = fixed.groups()
            raise TraceError(f"{name}: the dimension {dimension} {_why_fixed(int(size))}") from exc
        if "is mutated in the forward method" in str(first):
            raise TraceError(
                f"{name}: a run writes a tensor that is not a buffer: make it one in __init__ with register_buffer; "
                "of a model of transformers with a cache, compile what nimblec.generate returns"
            ) from exc
        where = f"{line} raised {type(first).__name__}: " if line else ""
        raise TraceError(f"{name}: {exporter} refuses it: {where}{_plain(first)}") from exc


def _why_fixed(size: int) -> str:
    if size > 1:
        return f"can only be {size}, since the model's code makes it so: write the code for any size, or give it one"
    return f"is {size} in the example, and torch.export takes 0 and 1 for fixed sizes: give an example of 2 or more"


def _plain(exc: BaseException) -> str:
    """Return the first line of an error without colour codes; for sizes that do not fit, torch's reasons and fixes."""
    said = re.sub(r"\x1b\[\d*m", "", first_line(exc))
    if not said.startswith("Constraints violated"):
        return said
    reasons = (line.strip(" -") for line in str(exc).strip().partition("\n\n")[0].split("\n")[1:])
    return f"{said.partition('!')[0]}: {'; '.join(reasons)}".replace("fixes:;", "fixes:")


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Silence torch's log, warnings and graph listings inside the block, unless TORCH_LOGS is set."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    handlers = _handlers()
    for handler in handlers:
        handler.addFilter(_is_not_torchs)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_not_torchs)


def _handlers() -> list[logging.Handler]:
    """Return every handler that a record of torch may reach: torch gives some of its loggers their own."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    loggers = [logging.root, *map(logging.getLogger, names)]
    last_resort = [logging.lastResort] if logging.lastResort else []
    return list(dict.fromkeys([*last_resort, *(handler for logger in loggers for handler in logger.handlers)]))


def _is_not_torchs(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] not in {"torch", "onnxscript", "onnx_ir"}
