"""Refits on a GPU: weights are replaced in place, by copies and by the commands of refits."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from typing import TypeAlias

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.dlpack import DeviceArray
from nimblert.calls.refitting import Refit
from nimblert.cuda import graph
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.memory import DEFAULT_STREAM, Bases, DeviceMemory, allocate
from nimblert.cuda.movers import GatherKernels
from nimblert.cuda.uploader import Upload, Uploader
from nimblert.plan import Program, Region, Tensor

_Step: TypeAlias = Callable[[], object]


class Refitter:
    """Replaces the weights of a plan on one GPU.

    The first refit of a set of weights builds a graph of the commands that compute constants from them. It is kept
    until another set is given, with the memory of these weights and of what the commands compute between.
    """

    def __init__(
        self, device: int, weights: Bases, functions: Sequence[Handle], kernels: GatherKernels, uploader: Uploader
    ) -> None:
        self._device = device
        self._weights = weights
        self._functions = functions
        self._kernels = kernels
        self._uploader = uploader
        self._prepared: _PreparedRefits | None = None

    def refit(self, refits: Sequence[Refit]) -> None:
        """Do ``refits`` once the device is idle, and wait.

        Memory is allocated and the graph built before the first weight is written. Raises InputError, CudaError.
        """
        with closing(Context(self._device)) as context:
            call("cuCtxSynchronize")  # launches may still be running
            programs = [given.program for given in refits]
            if self._prepared is None or [*map(id, self._prepared.programs)] != [*map(id, programs)]:
                self.close()
                self._prepared = _PreparedRefits(self._device, programs, self._weights, self._functions)
            prepared = self._prepared
            moves, uploads = self._copies(context, refits, prepared)
            for move in moves:
                move()
            self._uploader.enqueue(uploads, DEFAULT_STREAM)
            if prepared.graph is not None:
                call("cuGraphLaunch", prepared.graph, DEFAULT_STREAM)
            call("cuCtxSynchronize")

    def _copies(
        self, context: Context, refits: Sequence[Refit], prepared: "_PreparedRefits"
    ) -> tuple[list[_Step], list[Upload]]:
        """Return the copies of the arrays on the device and on the host to their places, in the layouts of the plan."""
        moves: list[_Step] = []
        uploads: list[Upload] = []
        largest = max((tensor.span_nbytes for refit in refits for tensor in refit.program.inputs), default=0)
        # The arrays land one after the other in the same memory.
        landing = cache(partial(allocate, context, largest))
        for refit, memory in zip(refits, prepared.memories, strict=True):
            for tensor, array in zip(refit.program.inputs, refit.arrays, strict=True):
                if array is None or not tensor.span_nbytes:
                    continue
                target = memory.address(tensor.pointer)
                if isinstance(array, DeviceArray):
                    mover = self._kernels.mover_to("weight", tensor, array.strides)
                    moves.append(partial(mover.move, target, array.address, DEFAULT_STREAM))
                else:
                    uploads.append(self._upload(tensor, array, target, landing))
        return moves, uploads

    def _upload(self, tensor: Tensor, array: np.ndarray, target: int, landing: Callable[[], int]) -> Upload:
        """Return the upload of an array; if its axes are in another order, a kernel permutes it from ``landing``."""
        dense = array if layouts.is_dense(array.shape, array.strides, array.itemsize) else np.ascontiguousarray(array)
        gather = layouts.gather(tensor.shape, tensor.strides, layouts.element_strides(dense))
        if gather is None or gather.is_copy:
            axes = layouts.memory_order(tensor.strides)
            return Upload(target, np.ascontiguousarray(array.transpose(axes)).reshape(-1).view(np.uint8))
        permute = partial(self._kernels.mover(gather, array.itemsize).move, target, landing(), DEFAULT_STREAM)
        return Upload(landing(), layouts.in_memory_order(dense).view(np.uint8), permute)

    def close(self) -> None:
        """Free the graph and its memory."""
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None


class _PreparedRefits:
    """Memory of refits, and the graph of their commands, None where they have none."""

    def __init__(self, device: int, programs: Sequence[Program], weights: Bases, functions: Sequence[Handle]) -> None:
        self.programs = programs
        self.graph: Handle | None = None
        with ExitStack() as owned:
            context = Context(device)
            owned.callback(context.close)
            arenas = [{(Region.ARENA, 0): allocate(context, program.arena_nbytes)} for program in programs]
            self.memories = [DeviceMemory(context, p, {**weights, **a}) for p, a in zip(programs, arenas, strict=True)]

            def add(built: Handle) -> None:
                # No refit needs what another makes.
                for program, memory in zip(programs, self.memories, strict=True):
                    graph.add_program(built, program, functions, memory)

            if any(program.commands for program in programs):
                made = graph.instantiated(add)
                self.graph = context.acquire(made, "cuGraphExecDestroy")
                call("cuGraphUpload", self.graph, DEFAULT_STREAM)
            self.close = owned.pop_all().close
