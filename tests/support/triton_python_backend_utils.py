"""What Triton's Python backend gives its models, as its README describes it, and no more than the sample needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class TritonModelException(Exception):  # noqa: N818 — Triton's name
    """Why a model cannot be loaded."""


@dataclass(frozen=True)
class TritonError:
    """What a response says in place of outputs."""

    INTERNAL = 1
    INVALID_ARG = 3

    text: str
    code: int = INTERNAL

    def message(self) -> str:
        """What went wrong."""
        return self.text


class Tensor:
    """A named array in host memory."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        """As the model calls it."""
        return self._name

    def as_numpy(self) -> np.ndarray:
        """The values."""
        return self._array


class InferenceRequest:
    """One request of a client; without names it wants every output."""

    def __init__(self, inputs: Sequence[Tensor], requested_output_names: Sequence[str]) -> None:
        self._inputs = {tensor.name(): tensor for tensor in inputs}
        self._names = list(requested_output_names)

    def requested_output_names(self) -> list[str]:
        """What the client wants back."""
        return self._names


class InferenceResponse:
    """Outputs, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._outputs = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        """What the client gets."""
        return self._outputs

    def error(self) -> TritonError | None:
        """In place of them, or none."""
        return self._error


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """The input of that name, if the client gave it."""
    return request._inputs.get(name)
