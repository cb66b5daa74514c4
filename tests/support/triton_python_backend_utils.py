"""A fake of Triton's Python backend, after its README, as far as the sample needs it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class TritonModelException(Exception):  # noqa: N818 — Triton's name
    """Why a model cannot be loaded."""


@dataclass(frozen=True)
class TritonError:
    """The error of a response without outputs."""

    INTERNAL = 1
    INVALID_ARG = 3

    text: str
    code: int = INTERNAL

    def message(self) -> str:
        """Return what went wrong."""
        return self.text


class Tensor:
    """A named array in host memory."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        """Return the tensor's name in the model."""
        return self._name

    def as_numpy(self) -> np.ndarray:
        """Return the values."""
        return self._array


class InferenceRequest:
    """One request of a client; without names it wants every output."""

    def __init__(self, inputs: Sequence[Tensor], requested_output_names: Sequence[str]) -> None:
        self._inputs = {tensor.name(): tensor for tensor in inputs}
        self._names = list(requested_output_names)

    def requested_output_names(self) -> list[str]:
        """Return the outputs that the client asks for."""
        return self._names


class InferenceResponse:
    """Outputs, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._outputs = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input of that name, if the client gave it."""
    return request._inputs.get(name)
