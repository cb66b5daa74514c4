"""Keep torch's diagnostics off the user's terminal while it exports a model."""

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


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
    """Every handler that a record of torch may reach: torch gives some of its loggers their own."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    loggers = [logging.root, *map(logging.getLogger, names)]
    last_resort = [logging.lastResort] if logging.lastResort else []
    return list(dict.fromkeys([*last_resort, *(handler for logger in loggers for handler in logger.handlers)]))


def _is_not_torchs(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] not in {"torch", "onnxscript", "onnx_ir"}
