"""The ways in which a model can run at a level of optimisation; the fastest is kept."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from nimblec.errors import CompileError, TraceError, UnsupportedModelError
from nimblec.frontend.compiled import compiled
from nimblec.frontend.pytorch import TorchModel
from nimblec.frontend.rewritten import flattened, fused, in_precision, with_own_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way; ``make`` takes seconds, and raises TraceError or UnsupportedModelError where it is closed."""

    name: str
    make: Callable[[], TorchModel]
    is_original: bool = False


def variants(model: TorchModel, level: int, dtype: torch.dtype | None) -> tuple[Variant, ...]:
    """The ways worth trying at ``level``: one at 0 and at 1, several at 2.

    ``dtype`` is the half precision to compute in instead of float32. What the user compiled with
    torch.compile stays as it is at every level; CompileError where it should change its precision.
    """
    if model.is_compiled:
        if dtype is not None:
            raise CompileError("--precision: a model from torch.compile keeps its own: compile the plain module")
        return (_as_it_runs(model),)
    if level == 0:
        return (_as_it_runs(model) if dtype is None else Variant(name="cast", make=partial(_cast, model, dtype)),)
    if level == 1:
        return (Variant(name="fused regions", make=partial(_fused, model, dtype)),)
    ways = [
        Variant(name="own kernels", make=lambda: with_own_kernels(flattened(model), dtype)),
        Variant(name="fused regions", make=partial(_fused, model, dtype)),
    ]
    if dtype is None:
        ways.append(Variant(name="torch.compile", make=partial(compiled, model)))
    return tuple(ways)


def _as_it_runs(model: TorchModel) -> Variant:
    return Variant(name="as it runs", make=lambda: model, is_original=True)


def _cast(model: TorchModel, dtype: torch.dtype) -> TorchModel:
    return in_precision(flattened(model), dtype)


def _fused(model: TorchModel, dtype: torch.dtype | None) -> TorchModel:
    """By our own rewrites, or where the model cannot be a graph of pure calls by torch.compile alone."""
    try:
        return fused(flattened(model), dtype)
    except (TraceError, UnsupportedModelError) as exc:
        if dtype is not None:
            raise
        return replace(compiled(model), notes=(f"fused by torch.compile alone: {exc}",))
