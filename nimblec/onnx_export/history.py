"""What torch.export notes for each call of a graph about where it comes from, and no ONNX file needs."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.fx import config
from torch.fx.traceback import NodeSource


@contextmanager
def short_histories() -> Iterator[None]:
    """Let calls share the notes of those that they were made from, and note no Python stack.

    Each pass over a graph copies all earlier notes of a call.
    """
    before = getattr(config, "do_not_emit_stack_traces", None)
    if before is not None:  # torch 2.11 has no such setting
        config.do_not_emit_stack_traces = True
    NodeSource.__deepcopy__ = _itself  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with suppress(AttributeError):  # another thread's export has ended in the meantime
            del NodeSource.__deepcopy__  # type: ignore[attr-defined]
        if before is not None:
            config.do_not_emit_stack_traces = before


def _itself(source: Any, _copied: dict[int, Any]) -> Any:
    return source
