"""Loops and branches as conditional nodes, whose conditions kernels set."""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from nimblert.cuda import driver, graph
from nimblert.cuda.driver import Context, Handle, PackedParameters, call
from nimblert.cuda.graph import Nodes
from nimblert.cuda.memory import DeviceMemory, allocate, host_bytes
from nimblert.errors import endless
from nimblert.plan import Program, Switch, While

_PTX = Path(__file__).with_name("control.ptx")

_GO_ON = struct.Struct("<QQQQQII")
_CHOOSE = struct.Struct("<QQI")
_TRIPS_NBYTES, _FAILED_NBYTES = 8, 4


class Control:
    """The loops and branches of a program, with a count of trips for each loop.

    A loop that goes beyond its limit ends, and the next wait for the program raises InputError.
    """

    def __init__(self, program: Program, bodies: Sequence[Program], context: Context) -> None:
        self._bodies = bodies
        self._context = context.handle
        module = context.acquire(call("cuModuleLoadData", _PTX.read_bytes() + b"\0"), "cuModuleUnload")
        self._go_on, self._choose = (call("cuModuleGetFunction", module, name) for name in (b"go_on", b"choose"))
        works = ((work, owner) for owner in (program, *bodies) for _, work in owner.work)
        self._loops = [(work, owner) for work, owner in works if isinstance(work, While)]
        self._numbers = {loop: number for number, (loop, _) in enumerate(self._loops)}
        self._trips = allocate(context, _TRIPS_NBYTES * len(self._loops))
        self._failed_at = int(context.acquire(call("cuMemHostAlloc", _FAILED_NBYTES, 0), "cuMemFreeHost"))
        self._failed = host_bytes(self._failed_at, _FAILED_NBYTES).view(np.uint32)
        self._failed[0] = 0

    def checked(self, wait: Callable[[int], None]) -> Callable[[int], None]:
        """Return ``wait`` with the check of what has ended: it raises InputError for a loop beyond its limit."""

        def checking(stream: int) -> None:
            wait(stream)
            if self._failed[0]:
                loop, owner = self._loops[int(self._failed[0]) - 1]
                self._failed[0] = 0
                op = owner.ops[loop.op]
                raise endless(f"op {op.name} ({op.source})", loop.limit)

        return checking

    def add(
        self, built: Handle, command: While | Switch, functions: Sequence[Handle], memory: DeviceMemory
    ) -> Nodes:
        """Add a loop or branch to a graph: a kernel that sets its condition, and the conditional node."""
        kinds = driver.bindings().CUgraphConditionalNodeType
        handle = call("cuGraphConditionalHandleCreate", built, self._context, 0, 0)
        if isinstance(command, While):
            number = self._numbers[command]
            go_on = partial(
                _GO_ON.pack,
                int(handle),
                memory.address(command.condition),
                self._trips + _TRIPS_NBYTES * number,
                command.limit,
                self._failed_at,
                number + 1,
            )
            first = _add_setter(built, self._go_on, go_on(1))
            (body,), node = self._add_conditional(built, handle, kinds.CU_GRAPH_COND_TYPE_WHILE, 1)
            ends = graph.add_program(body, self._bodies[command.body], functions, memory, self)
            graph.add_edges(body, ends.last, [_add_setter(body, self._go_on, go_on(0))])
        else:
            count = len(command.bodies)
            chosen = _CHOOSE.pack(int(handle), memory.address(command.index), count)
            first = _add_setter(built, self._choose, chosen)
            branches, node = self._add_conditional(built, handle, kinds.CU_GRAPH_COND_TYPE_SWITCH, count)
            for branch, number in zip(branches, command.bodies, strict=True):
                graph.add_program(branch, self._bodies[number], functions, memory, self)
        graph.add_edges(built, [first], [node])
        return Nodes(first, node)

    def _add_conditional(self, built: Handle, handle: Handle, kind: int, count: int) -> tuple[Sequence[Handle], Handle]:
        """Add a conditional node to a graph, and return the graphs of its bodies, which are empty, and the node."""
        params = driver.bindings().CUgraphNodeParams()
        params.type = driver.bindings().CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = kind
        params.conditional.size = count
        params.conditional.ctx = self._context
        node = call("cuGraphAddNode", built, None, None, 0, params)
        return params.conditional.phGraph_out, node


def _add_setter(built: Handle, function: Handle, params: bytes) -> Handle:
    return graph.add_kernel(built, function, (1, 1, 1), (1, 1, 1), PackedParameters(params))
