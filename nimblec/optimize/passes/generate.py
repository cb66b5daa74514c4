"""Generated kernels for the calls between those of libraries: each region of the graph becomes one op."""

from collections.abc import Callable

from torch import fx

from nimblec.graph.fusible import is_counter, is_fusible, is_one_launch
from nimblec.graph.rewriter import Rewriter, fake
from nimblec.graph.state import slots
from nimblec.kernels import triton_start
from nimblec.optimize.passes.partition import Region, extract, partition, replace
from nimblec.optimize.passes.state_writes import written_state


def generate_regions(
    module: fx.GraphModule, *, at_any_cost: bool = True, may_join: Callable[[fx.Node], bool] = is_fusible
) -> None:
    """Replace each region by one op of generated kernels, which writes state in place; equal regions share an op.

    A region that Inductor refuses stays as it is. Without ``at_any_cost`` all regions do unless one of them saves a
    launch: the microseconds that a faster pool gains are not worth Inductor's seconds.
    """
    regions = partition(module, may_join)
    if regions and (at_any_cost or any(map(_saves_launches, regions))):
        extracts = list(map(extract, regions, written_state(module, regions)))
        if fake((extracts[0].outputs or extracts[0].inputs)[0]).is_cuda:
            triton_start.begin()
        from nimblec.optimize.passes import inductor  # takes seconds

        replace(module, inductor.ops(extracts))
    Rewriter(module).finish()


def generate_counters(module: fx.GraphModule) -> None:
    """Count and compare by one kernel in the bodies of loops and branches; all else stays as it is."""
    if any(not slot.is_held for slot in slots(module).values()):
        generate_regions(module, at_any_cost=False, may_join=is_counter)


def _saves_launches(region: Region) -> bool:
    return len(region) > 1 or not is_one_launch(region[0])
