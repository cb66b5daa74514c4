"""Rewrites of a model's ATen graph that keep its meaning and its precision."""

import torch
from torch import fx

from nimblec.optimize.pipeline import Setting
from nimblec.optimize.rewrites import REGIONS, REWRITES


def optimize(graph: fx.GraphModule, *, device: str, dtype: torch.dtype | None = None) -> fx.GraphModule:
    """Return a graph that computes the same in fewer and faster kernels on ``device`` ("cuda" or "cpu").

    With ``dtype``, what is in float32 is computed in that half precision.

    ``graph`` is flat, of pure ATen calls with static shapes, its constants on the device; it is not
    changed. Outputs keep their dtype, shape, strides and order.
    """
    return REWRITES(graph, Setting(device=device, dtype=dtype))


def compile_regions(graph: fx.GraphModule, *, at_any_cost: bool = True) -> fx.GraphModule:
    """Return a graph in which each region is one call of an op of generated kernels; equal regions share one.

    A region that Inductor refuses stays as it is. Without ``at_any_cost`` all regions do unless one of them saves a
    launch: the microseconds that a faster pool gains are not worth Inductor's seconds. ``graph`` is not changed.
    """
    return REGIONS(graph, Setting(at_any_cost=at_any_cost))
