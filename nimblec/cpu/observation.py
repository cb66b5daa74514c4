"""Run a model on two sets of inputs, to see the shapes that ONNX Runtime does not infer.

The model's calls are not yet checked by the rules of plans, and may end the process that makes them.
"""

from collections.abc import Mapping, Sequence
from io import BufferedReader
from typing import Any

import numpy as np

from nimblec.cpu.optimizer_process import RefusedError
from nimblert.arrays.dtypes import numpy_dtype
from nimblert.cpu.onnx_session import (
    NO_PACKED_COPIES,
    initializer_folder,
    open_session,
    ort_value,
    runtime_errors,
    session_options,
)

Described = Mapping[str, tuple[str, Sequence[int]]]
"""Dtype and shape of arrays by name."""


def open_exposed(model: bytes, constants: Mapping[str, np.ndarray]) -> Any:
    """A session of a model and its external initializers. Raises RefusedError."""
    options = session_options()
    options.add_session_config_entry(*NO_PACKED_COPIES)
    data = {name: ort_value(array, array.dtype.name) for name, array in constants.items()}
    with initializer_folder() as folder:
        try:
            return open_session(model, data, folder, options)
        except runtime_errors() as exc:
            raise RefusedError(str(exc)) from exc


def observe_shapes(
    model: bytes, constants: Mapping[str, np.ndarray], inputs: Described, names: Sequence[str]
) -> list[list[list[int]]]:
    """The shapes of the outputs ``names`` in each of two runs.

    ``constants`` are the model's external initializers. Raises RefusedError where a run fails.
    """
    session = open_exposed(model, constants)
    seen = []
    try:
        for seed in range(2):
            drawn = _draw(inputs, seed)
            given = {name: ort_value(array, array.dtype.name) for name, array in drawn.items()}
            results = session.run_with_ort_values(list(names), given)  # numpy gets no bfloat16
            seen.append([result.shape() for result in results])
    except runtime_errors() as exc:
        raise RefusedError(str(exc)) from exc
    return seen


def _draw(inputs: Described, seed: int) -> dict[str, np.ndarray]:
    """Inputs to observe with: normal floats, integers that are all 0 in one run and 1 in the other."""
    random = np.random.default_rng(seed)
    drawn = {}
    for name, (dtype_name, shape) in inputs.items():
        dtype = numpy_dtype(dtype_name)
        values = np.full(shape, seed) if dtype.kind in "biu" else random.standard_normal(shape)
        drawn[name] = np.asarray(values).astype(dtype)
    return drawn


def read_arrays(stream: BufferedReader, described: Described) -> dict[str, np.ndarray]:
    """The arrays whose bytes follow one another in ``stream``."""
    arrays = {name: np.empty(shape, numpy_dtype(dtype)) for name, (dtype, shape) in described.items()}
    for array in arrays.values():
        stream.readinto(array.reshape(-1).view(np.uint8).data)
    return arrays
