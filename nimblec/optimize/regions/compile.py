"""Generated kernels for what lies between library calls: each region of the graph becomes one op."""

from torch import fx

from nimblec.graph.fusible import is_one_launch
from nimblec.graph.rewriter import Rewriter, copied, fake
from nimblec.kernels.core import triton_start
from nimblec.optimize.layout.groups import lay_groups_contiguous
from nimblec.optimize.regions.biases import free_biases
from nimblec.optimize.regions.partition import Region, extract, partition, replace


def compile_regions(module: fx.GraphModule, *, at_any_cost: bool = True) -> fx.GraphModule:
    """A graph in which each region is one call of an op of generated kernels; equal regions share one.

    A region that Inductor refuses stays as it is. Without ``at_any_cost`` they all do where none saves
    a launch: the microseconds that a faster pool gains are not worth Inductor's seconds. ``module``
    stays as it is.
    """
    result = copied(module)
    lay_groups_contiguous(result)
    free_biases(result)
    regions = partition(result)
    if regions and (at_any_cost or any(map(_saves_launches, regions))):
        extracts = [extract(region) for region in regions]
        if fake(extracts[0].outputs[0]).is_cuda:
            triton_start.begin()
        from nimblec.optimize.regions import inductor  # takes seconds

        replace(result, inductor.ops(extracts))
    Rewriter(result).finish()
    return result


def _saves_launches(region: Region) -> bool:
    return len(region.calls) > 1 or not is_one_launch(region.calls[0])
