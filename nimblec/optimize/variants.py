"""The variants of a model at a level of optimisation; the fastest is kept."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from nimblec.base.errors import CompileError, TraceError, UnsupportedModelError
from nimblec.graph import control
from nimblec.optimize.passes.cast import cast
from nimblec.optimize.passes.generate import generate_counters
from nimblec.optimize.passes.recurrent import pack_recurrent_weights
from nimblec.optimize.passes.state import write_state
from nimblec.optimize.pipeline import Pass, Phase, Pipeline, Report, Runs, Setting
from nimblec.optimize.rewrites import FUSED_REGIONS, REWRITES, is_half
from nimblec.optimize.torch_compile import compiled
from nimblec.plan.timing_cache import TimingCache
from nimblec.pytorch.control import has_control
from nimblec.pytorch.flat import device_of
from nimblec.pytorch.model import TorchModel
from nimblec.pytorch.recurrent import has_lengths

AS_WRITTEN = Pipeline(
    Phase(
        name="precision",
        when=is_half,
        passes=(
            Pass(run=cast, takes=("dtype",), reason="the graph is cast as the model's author wrote it"),
            Pass(
                run=pack_recurrent_weights,
                needs=(cast,),
                reason="casting makes new weights, outside of the buffer that cuDNN reads them from",
            ),
        ),
    ),
    Phase(
        name="state",
        passes=(
            Pass(run=generate_counters, needs=(cast,), reason="a kernel that counts writes its count in place"),
            Pass(run=write_state, needs=(generate_counters,), reason="every other pass takes a call to be pure"),
        ),
    ),
)
"""-O0 of a graph: the model's calls in its own or in half precision. State is written in place, and loops count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a model.

    ``make`` takes seconds, and raises TraceError or UnsupportedModelError where the model cannot run that way. A
    fallback is tried where none before it was possible.
    """

    name: str
    make: Callable[[], TorchModel]
    is_original: bool = False
    is_fallback: bool = False


def variants(
    model: TorchModel,
    level: int,
    dtype: torch.dtype | None,
    times: TimingCache,
    report: Report | None = None,
    *,
    fp8: bool = False,
) -> Iterator[Variant]:
    """Yield the variants worth trying at ``level``: one at 0 and at 1, several at 2.

    Level 2 falls back on level 1, and also tries a model whose state no other entry writes as at level 0. ``dtype`` is
    the half precision to compute in instead of float32, ``fp8`` lets kernels of level 2 multiply e4m3, ``times`` keeps
    the times of Triton kernels, and ``report`` is called for each pass that has run. A model that the user compiled
    with torch.compile stays as it is at every level; with ``dtype`` it is refused by a CompileError.
    """
    if model.is_compiled:
        if dtype is not None:
            raise CompileError("--precision: a model from torch.compile keeps its own: compile the plain module")
        yield as_it_runs(model)
    elif level == 0:
        is_possible = dtype is None and not _has_bodies(model)
        if is_possible:
            yield as_it_runs(model)
        if not (is_possible and model.is_flat):
            runs = Runs(model, Setting(device=device_of(model), dtype=dtype), report)
            yield replace(_as_written(runs, dtype), is_fallback=True)
    elif level == 1:
        runs = Runs(model, Setting(device=device_of(model), dtype=dtype, at_any_cost=False), report)
        yield Variant(name="fused regions", make=partial(_fused, runs, model, dtype))
    else:
        yield from _of_level_2(model, dtype, times, report, fp8=fp8)


def in_float16(model: TorchModel) -> TorchModel:
    """Return the model in float16, to compare with: state is returned, not written."""
    return Runs(model, Setting(device=device_of(model), dtype=torch.float16))(REWRITES)


def as_it_runs(model: TorchModel) -> Variant:
    """Return the model itself."""
    return Variant(name="as it runs", make=lambda: model, is_original=True)


def _of_level_2(
    model: TorchModel, dtype: torch.dtype | None, times: TimingCache, report: Report | None, *, fp8: bool
) -> Iterator[Variant]:
    from nimblec.optimize import o2

    setting = Setting(device=device_of(model), dtype=dtype, use=o2.fastest(times), fp8=fp8)
    runs = Runs(model, setting, report)
    yield Variant(name="Triton kernels", make=partial(runs, *o2.TRITON))
    yield Variant(name="fused regions", make=partial(_fused, runs, model, dtype), is_fallback=True)
    if model.written_elsewhere:
        return
    # What no rewrite touched: the framework's own kernels, such as cuDNN's LSTM, may be faster than ours.
    if dtype is not None or _has_bodies(model):
        yield _as_written(runs, dtype)
    else:
        yield replace(as_it_runs(model), is_original=False)


def _has_bodies(model: TorchModel) -> bool:
    """Return whether a model has loops or branches, which it cannot run as it is where a capture is to hold them."""
    if model.is_flat:
        return any(control.calls(model.module))
    return has_control(model.module) or has_lengths(model.module)


def _as_written(runs: Runs, dtype: torch.dtype | None) -> Variant:
    return Variant(name="as a graph" if dtype is None else "cast", make=partial(runs, AS_WRITTEN))


def _fused(runs: Runs, model: TorchModel, dtype: torch.dtype | None) -> TorchModel:
    """Return the model after -O1's rewrites, or by torch.compile alone where it cannot be a graph of pure calls."""
    try:
        return runs(*FUSED_REGIONS)
    except (TraceError, UnsupportedModelError) as exc:
        if dtype is not None or model.written_elsewhere:
            raise  # torch.compile takes state that another entry writes for constant
        return replace(compiled(model), notes=(f"fused by torch.compile alone: {exc}",))
