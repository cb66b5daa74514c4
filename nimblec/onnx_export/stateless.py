"""Stop an export to ONNX as soon as it is known that runs of the model write state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.onnx._internal.exporter import _core

from nimblec.pytorch.model import state_written


class StateFoundError(BaseException):
    """Runs write the parameters and buffers ``names``. An Exception would become the exporter's own error."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(*names)
        self.names = names


@contextmanager
def stateless() -> Iterator[None]:
    """Make torch.onnx.export raise StateFoundError for a model whose runs write any, before it converts a call."""
    before = _core._exported_program_to_onnx_program

    def convert(program: Any, **options: Any) -> Any:
        if names := state_written(program.graph_signature):
            raise StateFoundError(names)
        return before(program, **options)

    _core._exported_program_to_onnx_program = convert  # type: ignore[assignment]
    try:
        yield
    finally:
        _core._exported_program_to_onnx_program = before
