"""-O2: the passes of -O1, and between them Triton kernels wherever they are faster on this GPU."""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from nimblec.kernels.choosing import Times
from nimblec.kernels.context import Clock, Contest, in_context
from nimblec.kernels.gpu import GPU
from nimblec.kernels.launch import ops
from nimblec.kernels.products.fp8 import calibrate
from nimblec.kernels.products.gemm_rewrite import GEMM
from nimblec.kernels.products.quantized_rewrite import QUANTIZED
from nimblec.kernels.products.recurrence_rewrite import RECURRENCE
from nimblec.kernels.products.trained_rewrite import TRAINED
from nimblec.kernels.reductions.attention_rewrite import ATTENTION_FAMILY
from nimblec.kernels.reductions.norm_rewrite import NORM
from nimblec.kernels.reductions.pool_rewrite import POOL
from nimblec.kernels.selector import Family, timing_fingerprint
from nimblec.optimize.passes.channels_last import lay_float32_channels_last
from nimblec.optimize.pipeline import Pass, Phase, Pipeline
from nimblec.optimize.rewrites import REGIONS, REWRITES

Use = Callable[[Family[Any, Any], fx.GraphModule], object]
"""A function that puts the kernels of a family into a graph."""


FAMILIES: tuple[Family[Any, Any], ...] = (
    ATTENTION_FAMILY,
    RECURRENCE,
    GEMM,
    QUANTIZED,
    TRAINED,
    POOL,
    NORM,
)
"""The families of kernels, in the order in which they are put into a graph; each states the reason for its place."""


def _put_in(family: Family[Any, Any]) -> Callable[..., None]:
    """Return the rewrite of a family, which leaves the choice of kernels to the setting's `Use`."""

    @wraps(family.use)
    def put_in(module: fx.GraphModule, *, use: Use) -> None:
        use(family, module)

    return put_in


def _passes() -> Iterator[Pass]:
    done: tuple[Callable[..., object], ...] = (lay_float32_channels_last,)
    for family in FAMILIES:
        put_in = _put_in(family)
        yield Pass(run=put_in, needs=done, takes=("use",), reason=family.reason)
        done = (*done, put_in)


KERNELS = Pipeline(
    Phase(
        name="calibration",
        passes=(Pass(run=calibrate, takes=("args",), reason="kernels, which other passes put in, have no ranges"),),
        when=lambda setting: setting.fp8,
    ),
    Phase(
        name="kernels",
        passes=(
            Pass(
                run=lay_float32_channels_last,
                reason="Triton kernels read images channels last in float32 too, where the library gains nothing by it",
            ),
            *_passes(),
        ),
    ),
)
"""Kernels wherever they are faster than the framework's, one by one."""

TRITON = (REWRITES, KERNELS, REGIONS)


class Timed:
    """Puts kernels in wherever they are faster on the current GPU; ``times`` keeps what was measured.

    ``preferred`` are tilings to use instead of the fastest, as `in_context` returns them.
    """

    def __init__(self, times: Times, preferred: Mapping[str, str] = MappingProxyType({})) -> None:
        self._times = times
        self._preferred = preferred
        self._contests: list[Contest] = []

    def __call__(self, family: Family[Any, Any], module: fx.GraphModule) -> None:
        """Put in the kernels of a family."""
        self._contests += family.select(module, GPU.current(), self._times, self._preferred)

    def in_context(self, module: fx.GraphModule) -> dict[str, str]:
        """Return the tilings, other than those chosen, by which all kernels of a graph in their order take less time.

        Empty where the memory that is left does not hold what all of them read.
        """
        from nimblec.kernels.timing import GraphTimer, WeightPool

        if not self._contests or not any(map(_is_triton_kernel, module.graph.nodes)):
            return {}
        gpu = GPU.current()
        templates = sorted({template for family in FAMILIES for template in family.templates})
        fingerprint = repr((timing_fingerprint(templates), gpu.trigger))
        clock = Clock(timer=GraphTimer(gpu), times=self._times, fingerprint=fingerprint)
        try:
            return in_context(module, self._contests, clock, WeightPool(gpu), l2=gpu.l2)
        except torch.OutOfMemoryError:
            return {}


def first(gpu: GPU, times: Times | None = None) -> Use:
    """Put kernels in wherever they apply, each with its fastest tiling by ``times``, or the most promising one."""
    return lambda family, module: family.use_first(module, gpu, times)


def _is_triton_kernel(node: fx.Node) -> bool:
    return node.target in ops()
