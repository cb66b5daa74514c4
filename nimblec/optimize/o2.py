"""-O2: the passes of -O1, and between them Triton kernels wherever they are faster on this GPU."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch import fx

from nimblec.kernels.choosing import Times
from nimblec.kernels.gpu import GPU
from nimblec.kernels.products.fp8 import calibrate
from nimblec.kernels.products.gemm_rewrite import GEMM
from nimblec.kernels.products.quantized_rewrite import QUANTIZED
from nimblec.kernels.products.recurrence_rewrite import RECURRENCE
from nimblec.kernels.products.trained_rewrite import TRAINED
from nimblec.kernels.reductions.attention_rewrite import ATTENTION_FAMILY
from nimblec.kernels.reductions.group_norm_rewrite import GROUP_NORM
from nimblec.kernels.reductions.norm_rewrite import NORM
from nimblec.kernels.reductions.pool_rewrite import POOL
from nimblec.kernels.selector import Family
from nimblec.optimize.passes.channels_last import lay_float32_channels_last
from nimblec.optimize.passes.float_products import split_products
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
    GROUP_NORM,
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
            Pass(run=split_products, reason="no kernel multiplies two matrices of which none is constant"),
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


def fastest(times: Times) -> Use:
    """Put kernels in wherever they are faster on the current GPU; ``times`` keeps what was measured."""
    return lambda family, module: family.select(module, GPU.current(), times)


def first(gpu: GPU, times: Times | None = None) -> Use:
    """Put kernels in wherever they apply, each with its fastest tiling by ``times``, or the most promising one."""
    return lambda family, module: family.use_first(module, gpu, times)
