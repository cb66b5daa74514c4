"""The families of kernels, in the order in which they are put into a graph; each states the reason for its place."""

from typing import Any

from nimblec.kernels.products.gemm_rewrite import GEMM
from nimblec.kernels.products.trained_rewrite import TRAINED
from nimblec.kernels.reductions.attention_rewrite import ATTENTION_FAMILY
from nimblec.kernels.reductions.norm_rewrite import NORM
from nimblec.kernels.reductions.pool_rewrite import POOL
from nimblec.kernels.selector import Family

FAMILIES: tuple[Family[Any, Any], ...] = (
    ATTENTION_FAMILY,
    GEMM,
    TRAINED,
    POOL,
    NORM,
)
