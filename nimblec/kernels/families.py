"""The families of kernels, in the order in which they are put into a graph; each states the reason for its place."""

from typing import Any

from nimblec.kernels.attention.rewrite import ATTENTION_FAMILY
from nimblec.kernels.core.selector import Family
from nimblec.kernels.gemm.rewrite import GEMM
from nimblec.kernels.norm.rewrite import NORM
from nimblec.kernels.pool.rewrite import POOL
from nimblec.kernels.trained.rewrite import TRAINED

FAMILIES: tuple[Family[Any, Any], ...] = (
    ATTENTION_FAMILY,
    GEMM,
    TRAINED,
    POOL,
    NORM,
)
