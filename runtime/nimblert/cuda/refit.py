"""Refits on a GPU: weights are replaced in place, by copies and by the commands of refits."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.device_arrays import DeviceArray
from nimblert.calls.refitting import Refit
from nimblert.cuda import graph
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.memory import Bases, DeviceMemory, allocate
from nimblert.cuda.movers import GatherKernels
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

    def refit(self, refits: Sequence[Refit], ready: Callable[[], None]) -> None:
        """Do ``refits`` once the device is idle, and wait.

        Everything that can fail comes first: memory is allocated, the graph is built, ``ready`` is called. Raises
        InputError, CudaError.
        """
        with closing(Context(self._device)) as context:
            prepared = self._prepare([given.program for given in refits])
            moves, uploads = self._copies(context, refits, prepared)
            uploader = prepared.uploader if uploads else None
            call("cuCtxSynchronize")  # launches may still be running
            ready()
            context.make_current()  # ready() may have changed it
            for move in moves:
                move()
            if uploader is not None:
                uploader.enqueue(uploads, _STREAM)
            if prepared.executable is not None:
                call("cuGraphLaunch", prepared.executable, _STREAM)
            call("cuCtxSynchronize")

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
        todo = [
            (tensor, array, memory.address(tensor.pointer))
            for given, memory in zip(refits, prepared.memories, strict=True)
            for tensor, array in zip(given.program.inputs, given.arrays, strict=True)
            if array is not None and tensor.span_nbytes
        ]
        landing = allocate(context, max((tensor.span_nbytes for tensor, _, _ in todo), default=0))
        moves: list[_Step] = []
        uploads: list[Upload] = []
        for tensor, array, target in todo:
            if isinstance(array, DeviceArray):
                moves.append(self._move(tensor, array, target))
            else:
                uploads.append(self._upload(tensor, array, target, landing))
        return moves, uploads

    def _move(self, tensor: Tensor, array: DeviceArray, target: int) -> _Step:
        return partial(self._kernels.mover_to("weight", tensor, array.strides).move, target, array.address, _STREAM)

    def _upload(self, tensor: Tensor, array: np.ndarray, target: int, landing: int) -> Upload:
        """A dense array is uploaded as it lies, to memory that all share in turn, and permuted on the GPU."""
        if not layouts.is_dense(array.shape, array.strides, array.itemsize):
            array = np.ascontiguousarray(array)
        gather = layouts.gather(tensor.shape, tensor.strides, layouts.element_strides(array))
        if gather is None or gather.is_copy:
            order = sorted(range(array.ndim), key=lambda axis: -tensor.strides[axis])
            return Upload(target, _bytes_of(np.ascontiguousarray(array.transpose(order))))
        permute = partial(self._kernels.mover(gather, array.itemsize).move, target, landing, _STREAM)
        return Upload(landing, _bytes_of(layouts.in_memory_order(array)), permute)

    def close(self) -> None:
        """Free the graph and its memory."""
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


class _Prepared:
    """Memory of refits, and the graph of their commands; ``executable`` is None where they have none."""

    def __init__(self, device: int, programs: Sequence[Program], weights: Bases, functions: Sequence[Handle]) -> None:
        self.programs = programs
        self.executable: Handle | None = None
        with ExitStack() as owned:
            self._context = context = Context(device)
            owned.callback(context.close)
            self.memories = [_memory(context, program, weights) for program in programs]
            built = [
                graph.build(context, program, functions, memory)
                for program, memory in zip(programs, self.memories, strict=True)
                if program.commands
            ]
            if built:
                self.executable = context.acquire(_beside_each_other(built), "cuGraphExecDestroy")
                call("cuGraphUpload", self.executable, _STREAM)
            self.close = owned.pop_all().close

    @cached_property
    def uploader(self) -> Uploader:
        """For arrays on the host."""
        return Uploader(self._context)


def _memory(context: Context, program: Program, weights: Bases) -> DeviceMemory:
    arena = allocate(context, program.arena_nbytes)
    return DeviceMemory(context, program, {**weights, (Region.ARENA, 0): arena})


def _beside_each_other(graphs: Sequence[Handle]) -> Handle:
    """An executable graph of independent graphs: no refit needs what another makes."""
    built = call("cuGraphCreate", 0)
    try:
        for each in graphs:
            call("cuGraphAddChildGraphNode", built, None, 0, each)
        return call("cuGraphInstantiate", built, 0)
    finally:
        call("cuGraphDestroy", built)
