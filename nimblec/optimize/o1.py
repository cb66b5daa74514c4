"""-O1: fewer kernels, and generated ones between the calls of libraries."""

from nimblec.optimize.pipeline import Recipe
from nimblec.optimize.rewrites import REGIONS, REWRITES

FUSED_REGIONS = Recipe("fused regions", REWRITES, REGIONS)
