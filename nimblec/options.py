"""What a user may ask of a compilation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict

import numpy as np

TargetChoice: TypeAlias = Literal["auto", "cuda", "cpu"]

Precision: TypeAlias = Literal["keep", "fp32", "tf32", "fp16", "bf16"]

DEFAULT_LEVEL = 1
"""The level of optimisation of a CUDA plan where none is asked for."""

Observer: TypeAlias = Callable[[str, float | None], None]
"""Called with (stage, None) when a stage starts and (stage, seconds) when it has ended."""


def _own_cache(name: str) -> Path:
    """A file or folder of the user's own that the next compilation finds again."""
    return Path.home() / ".cache" / "nimblec" / name


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The static shape of a model input, and its dtype (a plan's dtype name) where it is given."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``inputs`` fix the shapes of inputs by name; ``examples`` are arrays for inputs by name.

    ``dims`` are sizes of an ONNX file's named dimensions, wherever ``inputs`` leave them dynamic.
    An integer input with an example is drawn from the example's range in later golden checks.
    ``streams``: "auto", "1", "max" or a number of streams; ``memory_limit``: bytes the arena may
    have. ``timing_cache`` is the file that keeps measured times, ``plan_cache`` the folder that keeps
    the plans of model files (None: nowhere); the user's own by default.
    ``level``: 0 keeps the framework's own kernels, 1 fuses, 2 also chooses kernels by timing them
    (CUDA target; None is `DEFAULT_LEVEL` there). ``precision``: "keep" leaves torch's settings, "fp32"
    and "tf32" say how float32 convolutions and matrix products are computed, "fp16" and "bf16" compute
    a float32 model in half precision (CUDA target). ``max_error`` is the largest difference to accept
    from level 0 at the model's own precision, relative to an output's largest magnitude.
    """

    target: TargetChoice = "auto"
    inputs: tuple[InputSpec, ...] = ()
    dims: tuple[tuple[str, int], ...] = ()
    examples: tuple[tuple[str, np.ndarray], ...] = field(default=(), compare=False)
    level: int | None = None
    precision: Precision = "keep"
    max_error: float | None = None
    streams: str = "auto"
    memory_limit: int | None = None
    timing_cache: Path = field(default_factory=lambda: _own_cache("timings.json"))
    plan_cache: Path | None = field(default_factory=lambda: _own_cache("plans"))


class Settings(TypedDict, total=False):
    """The options that are one plain value each, as `nimblec.compile` takes them."""

    level: int | None
    precision: Precision
    max_error: float | None
    streams: str
    memory_limit: int | None
    timing_cache: Path
    plan_cache: Path | None
