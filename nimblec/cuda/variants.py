"""The ways in which a model can run at a level of optimisation; the fastest is kept."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from nimblec.errors import TraceError, UnsupportedModelError
from nimblec.frontend.compiled import compiled
from nimblec.frontend.pytorch import TorchModel
from nimblec.frontend.rewritten import flattened, fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way; ``make`` takes seconds, and raises TraceError or UnsupportedModelError where it is closed."""

    name: str
    make: Callable[[], TorchModel]


def variants(model: TorchModel, level: int) -> tuple[Variant, ...]:
    """The ways worth trying at ``level``: one at 0 and at 1, several at 2.

    What the user compiled with torch.compile stays as it is at every level.
    """
    if level == 0 or model.is_compiled:
        return (Variant(name="as it runs", make=lambda: model),)
    ways = [Variant(name="fused regions", make=partial(_fused, model))]
    if level > 1:
        ways.append(Variant(name="torch.compile, tuned", make=partial(compiled, model, level)))
    return tuple(ways)


def _fused(model: TorchModel) -> TorchModel:
    """By our own rewrites, or where the model cannot be a graph of pure calls by torch.compile alone."""
    try:
        return fused(flattened(model))
    except (TraceError, UnsupportedModelError) as exc:
        return replace(compiled(model, 1), notes=(f"fused by torch.compile alone: {exc}",))
