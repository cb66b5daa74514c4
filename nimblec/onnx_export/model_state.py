"""State in an ONNX model: an input that is what a run finds, and an output that is what it leaves."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """A tensor that outlives a call. ``name`` is for users; ``input`` and ``output`` are values of the model.

    ``output`` is empty where this model only reads the tensor; ``data`` is what it is at first. ``storage``
    is the same number in other models that have the same tensor, and no other's.
    """

    name: str
    input: str
    output: str
    data: np.ndarray
    storage: int
