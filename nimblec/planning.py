"""From a captured graph to a plan: the passes that both targets share."""

from nimblec import __version__
from nimblec.ir import Graph
from nimblec.lower import lower, state, weights
from nimblec.schedule.dependencies import dependencies, rename_workspaces
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import serial
from nimblert.plan import Device, Plan, Target


def make_plan(graph: Graph, *, target: Target, device: Device, versions: tuple[tuple[str, str], ...]) -> Plan:
    """Schedule the graph, lay out its memory and write it down as a plan without a golden record."""
    renamed = rename_workspaces(graph)
    schedule = serial(dependencies(renamed))
    memory = layout(renamed, schedule)
    return Plan(
        producer=f"nimblec {__version__}",
        versions=versions,
        target=target,
        device=device,
        modules=renamed.modules,
        kernels=renamed.kernels,
        weights_nbytes=memory.weights_nbytes,
        weights=weights(renamed, memory),
        state_nbytes=memory.state_nbytes,
        state=state(renamed, memory),
        programs=(lower(renamed, schedule, memory),),
    )
