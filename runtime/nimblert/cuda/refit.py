"""Refits on a GPU: weights are replaced in place, by copies and by the commands of refits."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.device_arrays import DeviceArray
from nimblert.calls.changing import uninterrupted
from nimblert.calls.refitting import Refit
from nimblert.calls.remembering import remembered
from nimblert.cuda import graph
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.memory import Bases, DeviceMemory, allocate
from nimblert.cuda.movers import GatherKernels, Mover
from nimblert.cuda.uploads import Upload, Uploader
from nimblert.plan import Program, Region, Tensor

_STREAM = 0

_Step: TypeAlias = Callable[[], object]


class Refitter:
    """Replaces the weights of a plan on one GPU.

    The first refit of a set of weights builds a graph of the commands that compute constants from them. It is kept
    until another set is given, with the memory of these weights and of what the commands compute between.
    """

    def __init__(self, device: int, weights: Bases, functions: Sequence[Handle], kernels: GatherKernels) -> None:
        self._device = device
        self._weights = weights
        self._functions = functions
        self._kernels = kernels
        self._prepared: _Prepared | None = None

    def refit(self, refits: Sequence[Refit]) -> None:
        """Do ``refits`` once the device is idle, and wait.

        Everything that can fail comes before the change: memory is allocated, the graph is built. Raises InputError,
        CudaError.
        """
        with closing(Context(self._device)) as context:
            prepared = self._prepare([given.program for given in refits])
            moves, uploads = self._copies(context, refits, prepared)
            uploader = prepared.uploader if uploads else None

            def change() -> None:
                context.make_current()
                for move in moves:
                    move()
                if uploader is not None:
                    uploader.enqueue(uploads, _STREAM)
                if prepared.executable is not None:
                    call("cuGraphLaunch", prepared.executable, _STREAM)
                call("cuCtxSynchronize")

            call("cuCtxSynchronize")  # launches may still be running
            uninterrupted(change)

    def _prepare(self, programs: Sequence[Program]) -> "_Prepared":
        """Memory and graph for these refits, those of the last time where it was the same ones."""
        if self._prepared is None or [*map(id, self._prepared.programs)] != [*map(id, programs)]:
            self.close()
            self._prepared = _Prepared(self._device, programs, self._weights, self._functions)
        return self._prepared

    def _copies(
        self, context: Context, refits: Sequence[Refit], prepared: "_Prepared"
    ) -> tuple[list[_Step], list[Upload]]:
        """The copies of the arrays on the device and on the host to their places, in the layouts of the plan."""
        moves: list[_Step] = []
        given: list[tuple[_Place, np.ndarray, _Way]] = []
        for refit, places in zip(refits, prepared.places, strict=True):
            for place, array in zip(places, refit.arrays, strict=True):
                if array is None or not place.nbytes:
                    continue
                if isinstance(array, DeviceArray):
                    moves.append(self._move(place, array))
                else:
                    given.append((place, *self._laid(place, array)))
        landing = allocate(context, max((place.nbytes for place, _, way in given if way.permute), default=0))
        return moves, [_upload(place.address, array, way, landing) for place, array, way in given]

    def _move(self, place: "_Place", array: DeviceArray) -> _Step:
        mover = self._kernels.mover_to("weight", place.tensor, array.strides)
        return partial(mover.move, place.address, array.address, _STREAM)

    def _laid(self, place: "_Place", array: np.ndarray) -> "tuple[np.ndarray, _Way]":
        """An array on the host, made dense if it is not, and its way to a place."""
        way = place.ways.get(array.strides)
        if way is not None:
            return array, way
        if not layouts.is_dense(array.shape, array.strides, array.itemsize):
            array = np.ascontiguousarray(array)
        return array, remembered(place.ways, array.strides, self._way(place.tensor, array))

    def _way(self, tensor: Tensor, array: np.ndarray) -> "_Way":
        """Of a dense array."""
        gather = layouts.gather(tensor.shape, tensor.strides, layouts.element_strides(array))
        if gather is None or gather.is_copy:
            return _Way(layouts.memory_order(tensor.strides))
        return _Way(layouts.memory_order(array.strides), self._kernels.mover(gather, array.itemsize))

    def close(self) -> None:
        """Free the graph and its memory."""
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None


class _Way(NamedTuple):
    """How arrays of one layout get from the host to a place: their bytes in this order of axes.

    With ``permute`` they are uploaded to memory that all such arrays share in turn, and permuted from there.
    """

    axes: tuple[int, ...]
    permute: Mover | None = None


def _upload(address: int, array: np.ndarray, way: _Way, landing: int) -> Upload:
    source = np.ascontiguousarray(array.transpose(way.axes)).reshape(-1).view(np.uint8)
    if way.permute is None:
        return Upload(address, source)
    return Upload(landing, source, partial(way.permute.move, address, landing, _STREAM))


class _Place:
    """The memory of a weight; ``ways`` are those of arrays on the host, by their strides."""

    def __init__(self, tensor: Tensor, memory: DeviceMemory) -> None:
        self.tensor = tensor
        self.address = memory.address(tensor.pointer)
        self.nbytes = tensor.span_nbytes
        self.ways: dict[tuple[int, ...], _Way] = {}


class _Prepared:
    """Memory of refits, ``places`` of their inputs, and the graph of their commands, None where they have none."""

    def __init__(self, device: int, programs: Sequence[Program], weights: Bases, functions: Sequence[Handle]) -> None:
        self.programs = programs
        self.executable: Handle | None = None
        with ExitStack() as owned:
            self._context = context = Context(device)
            owned.callback(context.close)
            memories = [_memory(context, program, weights) for program in programs]
            self.places = [
                [_Place(tensor, memory) for tensor in program.inputs]
                for program, memory in zip(programs, memories, strict=True)
            ]
            if any(program.commands for program in programs):
                made = _beside_each_other(programs, memories, functions)
                self.executable = context.acquire(made, "cuGraphExecDestroy")
                call("cuGraphUpload", self.executable, _STREAM)
            self.close = owned.pop_all().close

    @cached_property
    def uploader(self) -> Uploader:
        """For arrays on the host."""
        return Uploader(self._context)


def _memory(context: Context, program: Program, weights: Bases) -> DeviceMemory:
    arena = allocate(context, program.arena_nbytes)
    return DeviceMemory(context, program, {**weights, (Region.ARENA, 0): arena})


def _beside_each_other(
    programs: Sequence[Program], memories: Sequence[DeviceMemory], functions: Sequence[Handle]
) -> Handle:
    """An executable graph of independent programs: no refit needs what another makes."""

    def add(built: Handle) -> None:
        for program, memory in zip(programs, memories, strict=True):
            graph.add_program(built, program, functions, memory)

    return graph.instantiated(add)
