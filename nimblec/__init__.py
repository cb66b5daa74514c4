"""nimblec: compile a neural network into one plan file; nimblert replays it without the framework.

>>> import nimblec, nimblert
>>> plan = nimblec.compile(module, (example,))
>>> y = nimblert.load(plan)(x)

Importing this package imports no framework: the compiler's parts are imported when they are used.
"""

import nimblec.isolation  # noqa: F401 - first, since it may take a folder off the path

# isort: split
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from nimblec.errors import CompileError, TraceError, UnsupportedModelError
from nimblec.options import InputSpec, Options, Settings, TargetChoice
from nimblert.errors import (
    CudaError,
    DeviceMismatchError,
    InputError,
    NimbleError,
    PlanError,
    PlanFormatError,
    PlanInvalidError,
)
from nimblert.plan import Plan

if TYPE_CHECKING:
    import numpy as np
    import torch

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "CudaError",
    "DeviceMismatchError",
    "InputError",
    "InputSpec",
    "NimbleError",
    "Plan",
    "PlanError",
    "PlanFormatError",
    "PlanInvalidError",
    "TraceError",
    "UnsupportedModelError",
    "compile",
]


def compile(  # noqa: A001  # the word that users look for; nimblec.compile shadows nothing outside
    model: "str | PathLike[str] | torch.nn.Module",
    example_inputs: Sequence[Any] | None = None,
    *,
    target: TargetChoice = "auto",
    inputs: Sequence[InputSpec] = (),
    dims: "Mapping[str, int] | None" = None,
    examples: "Mapping[str, np.ndarray] | None" = None,
    **settings: Unpack[Settings],
) -> Plan:
    """Compile a PyTorch module, or a model given as `nimblec compile` takes it, to a plan.

    ``model`` is a module, the path of an ``.onnx`` or ``.pt2`` file, or "package.module:callable".
    A module needs ``example_inputs``, the positional arguments of one call. ``inputs`` fix the
    shapes of an ONNX file's inputs, ``dims`` the sizes of its named dimensions, ``examples`` are
    arrays for its inputs by name. The rest are ``level``, ``precision``, ``max_error``, ``streams``,
    ``memory_limit``, ``timing_cache`` and ``plan_cache`` (None: keep no plan), as on the command line
    (see `Options`). The plan can be saved (``plan.save(path)``) or loaded as it is (``nimblert.load(plan)``).

    Raises CompileError where the model cannot be compiled, DeviceMismatchError where the target is
    not here.
    """
    from nimblec.compiler import compile_model  # brings in the frameworks

    options = Options(
        target=target,
        inputs=tuple(inputs),
        dims=tuple((dims or {}).items()),
        examples=tuple((examples or {}).items()),
        **settings,
    )
    if isinstance(model, PathLike):
        model = Path(model)
    return compile_model(model, example_inputs, options=options, observer=_unobserved).plan


def _unobserved(stage: str, seconds: float | None) -> None:
    """Progress that nobody asked for."""
