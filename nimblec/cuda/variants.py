"""The ways in which a model can run at a level of optimisation; the fastest is kept."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from nimblec.cache.timing_cache import TimingCache
from nimblec.errors import CompileError, TraceError, UnsupportedModelError
from nimblec.frontend.compiled import compiled
from nimblec.frontend.pytorch.model import TorchModel
from nimblec.frontend.rewritten import flattened, fused, in_precision, optimized


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way; ``make`` takes seconds, and raises TraceError or UnsupportedModelError where it is closed."""

    name: str
    make: Callable[[], TorchModel]
    is_original: bool = False


def variants(model: TorchModel, level: int, dtype: torch.dtype | None, times: TimingCache) -> Iterator[Variant]:
    """The ways worth trying at ``level``: one at 0 and at 1, several at 2.

    torch.compile is one where none of our kernels serves: it was slower wherever one does.
    ``dtype`` is the half precision to compute in instead of float32. ``times`` remembers those of our
    own kernels. What the user compiled with torch.compile stays as it is at every level; CompileError
    where it should change its precision.
    """
    if model.is_compiled:
        if dtype is not None:
            raise CompileError("--precision: a model from torch.compile keeps its own: compile the plain module")
        yield as_it_runs(model)
    elif level == 0:
        yield as_it_runs(model) if dtype is None else Variant(name="cast", make=partial(_cast, model, dtype))
    else:
        from nimblec.frontend.own_kernels import (
            has_norms,
            has_triton_kernels,
            with_triton_kernels,
            with_triton_norms,
        )

        rewritten = _Once(lambda: optimized(flattened(model), dtype))
        own = _Once(lambda: with_triton_kernels(rewritten(), times))
        if level > 1:
            yield Variant(name="own kernels", make=lambda: fused(own()))
        if own.is_made and has_norms(own()):
            yield Variant(name="own kernels and norms", make=lambda: fused(with_triton_norms(own(), times)))
        yield Variant(name="fused regions", make=partial(_fused, rewritten, model, level, dtype))
        if level > 1 and dtype is None and not (own.is_made and has_triton_kernels(own())):
            yield Variant(name="torch.compile", make=partial(compiled, model))


class _Once:
    """A model that is made when it is first asked for."""

    def __init__(self, make: Callable[[], TorchModel]) -> None:
        self._make = make
        self._made: TorchModel | None = None

    @property
    def is_made(self) -> bool:
        """Whether it was asked for, and could be made."""
        return self._made is not None

    def __call__(self) -> TorchModel:
        if self._made is None:
            self._made = self._make()
        return self._made


def as_it_runs(model: TorchModel) -> Variant:
    """The model itself."""
    return Variant(name="as it runs", make=lambda: model, is_original=True)


def _cast(model: TorchModel, dtype: torch.dtype) -> TorchModel:
    return in_precision(flattened(model), dtype)


def _fused(rewritten: _Once, model: TorchModel, level: int, dtype: torch.dtype | None) -> TorchModel:
    """By our own rewrites, or where the model cannot be a graph of pure calls by torch.compile alone."""
    try:
        return fused(rewritten(), at_any_cost=level > 1)
    except (TraceError, UnsupportedModelError) as exc:
        if dtype is not None:
            raise
        return replace(compiled(model), notes=(f"fused by torch.compile alone: {exc}",))
