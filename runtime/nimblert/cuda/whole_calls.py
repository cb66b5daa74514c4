"""Repeated calls with inputs of the same layout: the graphs that run each in one launch."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from nimblert.calls.binding import VECTOR_NBYTES, fills_memory
from nimblert.cuda import graph
from nimblert.cuda.call_graphs import Arrival, CallGraph, CallGraphs, Recipe
from nimblert.cuda.driver import Handle
from nimblert.cuda.early import Signal
from nimblert.cuda.memory import DeviceMemory
from nimblert.cuda.pools import Lent, addresses
from nimblert.cuda.transfers import Given, Inlet, Outlet
from nimblert.ordering import pieces
from nimblert.plan import Launch, Program, Region, Tensor, Weight, Work
from nimblert.rules.state_rules import writes_state

_ENOUGH_ON_HOST = 3
_ENOUGH_ON_DEVICE = 16
"""The number of equal calls before they get a graph: calls with inputs of the same layouts, on the device at the same
addresses, and for a whole call with outputs at the same addresses too. Making the graph takes longer than it saves in
one call."""

_WRITTEN_NBYTES = 1 << 12
"""Kernels write no larger output into memory of the host. On an H100 that saves 2 of the 10 us of a launch that brings
back 4 KiB; 64 KiB in scattered order would take 37 us more."""

_INDICES = frozenset({"int16", "int32", "int64", "uint16", "uint32", "uint64"})
"""Of inputs that may be indices. One computed from inputs of two calls may lie outside of what each of them reads."""

_REWRITTEN = frozenset({Region.ARENA, Region.OUTPUT, Region.STATE})
"""What a run may write where another run follows with the same inputs; of the state, only kernels' scratch memory."""

_strides_of = attrgetter("strides")


class WholeCalls:
    """The graphs of calls of a ``program`` of a plan with this ``state``, over ``memory``."""

    def __init__(
        self,
        program: Program,
        state: Sequence[Weight],
        functions: Sequence[Handle],
        memory: DeviceMemory,
        inlet: Inlet,
        outlet: Outlet,
        signal: Signal,
    ) -> None:
        self._program, self._state, self._functions, self._memory = program, state, functions, memory
        self._inlet, self._outlet, self._signal = inlet, outlet, signal
        self._arriving, self._whole = CallGraphs(), CallGraphs()

    def from_host(
        self, arrays: Sequence[np.ndarray], lent: Sequence[Lent | None]
    ) -> tuple[CallGraph | None, bool]:
        """The graph that transfers host arrays and runs the program, or None; whether it transfers the outputs too."""
        if not self._inlet.is_small:
            return None, False
        lying = tuple(map(_strides_of, arrays))
        key = lying, tuple([None if memory is None else memory.address for memory in lent])
        found = self._whole.get(key) or self._whole.missed(key, _ENOUGH_ON_HOST, self._made_for_host, arrays, lent)
        if found is not None:
            return found, True
        found = self._arriving.get(lying)
        return found or self._arriving.missed(lying, _ENOUGH_ON_HOST, self._made_for_host, arrays, None), False

    def _made_for_host(self, arrays: Sequence[np.ndarray], lent: Sequence[Lent | None] | None) -> CallGraph:
        is_early = self._movable.may_be_early and self._inlet.may_be_early(arrays)
        arrivals, staged = self._inlet.uploads(arrays, self._signal if is_early else None)
        to = [None] * len(self._program.outputs) if lent is None else self._outlet.on_host(lent)
        written, copied = self._split(to, self._movable.to_host)
        adding = self._adding(self._memory.rebased(written))
        made = Recipe(adding, arrivals, self._outlet.downloads(copied)).instantiated()
        return CallGraph(made, staged)

    def from_device(
        self, arrays: Given, lent: Sequence[Lent | None], outlet: Outlet
    ) -> tuple[CallGraph | None, bool]:
        """As `from_host`, for device arrays; ``outlet`` is cropped where their movers pad."""
        key = arrays, tuple([None if memory is None else memory.address for memory in lent])
        make = self._made_in_place
        found = self._whole.get(key) or self._whole.missed(key, _ENOUGH_ON_DEVICE, make, arrays, lent, outlet)
        if found is not None:
            return found, True
        found = self._arriving.get(arrays)
        return found or self._arriving.missed(arrays, _ENOUGH_ON_DEVICE, self._made_for_device, arrays), False

    def _made_for_device(self, arrays: Given) -> CallGraph:
        return CallGraph(Recipe(self._adding(self._memory), self._inlet.moves(arrays)).instantiated())

    def _made_in_place(self, arrays: Given, lent: Sequence[Lent | None], outlet: Outlet) -> CallGraph:
        """The program over these arrays, where its kernels may use them, and over the new memory for its outputs.

        The inputs are also copied to its own memory, for `replay`. One that is the program's own memory for an output,
        which a call may have returned, is copied before.
        """
        arrivals: list[Arrival] = []
        beside: list[graph.Step] = []
        inputs, outputs, *_ = self._movable
        moves = self._inlet.moves(arrays)
        outputs = [
            may_move and shape == tensor.shape
            for may_move, shape, tensor in zip(outputs, outlet.shapes, self._program.outputs, strict=True)
        ]
        elsewhere, copied = self._split(addresses(lent), outputs)
        own = [(self._memory.address(tensor.pointer), tensor.span_nbytes) for tensor in self._program.outputs]
        for tensor, may_move, (mover, address), move in zip(self._program.inputs, inputs, arrays, moves, strict=True):
            is_own = any(at < address + tensor.span_nbytes and address < at + nbytes for at, nbytes in own)
            if may_move and mover.is_copy and address % VECTOR_NBYTES == 0 and not is_own:
                elsewhere[Region.INPUT, tensor.pointer.index] = address
                beside += move.steps
            else:
                arrivals.append(move)
        adding = self._adding(self._memory.rebased(elsewhere))
        return CallGraph(Recipe(adding, arrivals, outlet.copies(copied), beside).instantiated())

    def _split(
        self, to: Sequence[int | None], movable: Sequence[bool]
    ) -> tuple[dict[tuple[Region, int], int], list[int | None]]:
        """The addresses for outputs: by region of those that are ``movable``, and of those to be copied there."""
        written: dict[tuple[Region, int], int] = {}
        copied = list(to)
        for index, (tensor, may_move, address) in enumerate(zip(self._program.outputs, movable, to, strict=True)):
            if may_move and address is not None:
                written[Region.OUTPUT, tensor.pointer.index] = address
                copied[index] = None
        return written, copied

    def _adding(self, memory: DeviceMemory) -> Callable[[Handle], graph.Ends]:
        return partial(graph.add_program, program=self._program, functions=self._functions, memory=memory)

    @cached_property
    def _movable(self) -> "_Movable":
        return _movable(self._program, self._state)

    def close(self) -> None:
        """Free the graphs."""
        self._arriving.close()
        self._whole.close()


class _Movable(NamedTuple):
    """For each input and output, whether the program's kernels may use an array of a caller instead.

    ``to_host``: whether they may write an output to page-locked memory. ``may_be_early``: whether the program may run
    once before, on inputs of which some parts are those of the call before.
    """

    inputs: list[bool]
    outputs: list[bool]
    to_host: list[bool]
    may_be_early: bool


def _movable(program: Program, state: Sequence[Weight]) -> _Movable:
    """What the program's kernels may use elsewhere, in a plan with this ``state``.

    An input that a kernel also writes may not be replaced: the array is the caller's. An output on the host may be
    touched by one kernel alone: reading it over PCIe takes long, and where an op has several kernels, a plan does not
    tell which of them read what others wrote.
    """
    touching: defaultdict[tuple[Region, int], list[Work]] = defaultdict(list)
    written: set[tuple[Region, int]] = set()
    for _, command in program.work:
        reads, writes = (
            {(access.pointer.region, access.pointer.index) for access in accesses}
            for accesses in (pieces.reads(command), pieces.writes(command))
        )
        written |= writes
        for place in reads | writes:
            touching[place].append(command)
    users = Counter((t.pointer.region, t.pointer.index) for t in (*program.inputs, *program.outputs))

    def stands_alone(tensor: Tensor, region: Region) -> bool:
        place = tensor.pointer
        return place.region is region and users[region, place.index] == 1 and fills_memory(program, tensor)

    def is_one_kernels(tensor: Tensor) -> bool:
        commands = touching[Region.OUTPUT, tensor.pointer.index]
        return len(commands) == 1 and isinstance(commands[0], Launch)

    inputs = [
        stands_alone(tensor, Region.INPUT) and (Region.INPUT, tensor.pointer.index) not in written
        for tensor in program.inputs
    ]
    outputs = [stands_alone(tensor, Region.OUTPUT) for tensor in program.outputs]
    to_host = [
        may_move and is_one_kernels(tensor) and tensor.span_nbytes <= _WRITTEN_NBYTES
        for may_move, tensor in zip(outputs, program.outputs, strict=True)
    ]
    regions = {region for region, _ in written}
    may_run_twice = regions <= _REWRITTEN and not writes_state(state, program)
    may_be_mixed = all(tensor.dtype not in _INDICES for tensor in program.inputs)
    return _Movable(inputs, outputs, to_host, may_run_twice and may_be_mixed)
