"""Observe code made by torch.compile: its Triton kernels, and the ATen calls between them.

A dispatch mode around a compiled callable makes Dynamo fall back to eager, so the mode is entered
inside the code that Inductor generated. Launches of Triton kernels bypass the dispatcher and are
observed at Inductor's launcher. Parameter names tell the accesses: ``out_ptr*`` is written,
``in_out_ptr*`` read and written, the rest read; a kernel also lists the names that it mutates. For the
user's own Triton kernels Inductor keeps no such names: their launches are recorded as opaque.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol
from unittest.mock import patch

import torch


class CallRecorder(Protocol):
    """Records calls that launch nodes; as a context manager, those that reach the dispatcher."""

    def __enter__(self) -> Any:
        """Start recording what reaches the dispatcher."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        """Stop recording."""

    def record(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], call: Callable[[], Any]
    ) -> Any:
        """Make the call and record what it launched, on these tensors."""


@contextmanager
def seeing_compiled_code(recorder: CallRecorder) -> Iterator[None]:
    """Have ``recorder`` record what generated code launches inside the block."""
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.hints import HeuristicType
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    call_graph: Callable[..., Any] = CompiledFxGraph.__call__
    launch: Callable[..., Any] = CachingAutotuner.run

    def seen_call(graph: Any, inputs: Any) -> Any:
        with recorder:
            return call_graph(graph, inputs)

    def seen_launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if kernel.heuristic_type is HeuristicType.USER_AUTOTUNE:
            return launch(kernel, *args, **kwargs)
        reads, writes = _accesses(kernel.fn.arg_names, set(kernel.mutated_arg_names), args)
        return recorder.record(kernel.fn.__name__, reads, writes, lambda: launch(kernel, *args, **kwargs))

    with patch.object(CompiledFxGraph, "__call__", seen_call), patch.object(CachingAutotuner, "run", seen_launch):
        yield


def _accesses(
    names: Sequence[str], mutated: set[str], args: Sequence[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a kernel reads and writes, from the names of its parameters."""
    reads, writes = [], []
    for name, value in zip(names, args, strict=False):  # constants of the kernel are not among the arguments
        if isinstance(value, torch.Tensor):
            if not name.startswith("out_ptr"):
                reads.append(value)
            if name in mutated or name.startswith(("out_ptr", "in_out_ptr")):
                writes.append(value)
    return reads, writes
