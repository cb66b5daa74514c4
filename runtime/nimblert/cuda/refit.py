"""Refits on a GPU: weights are replaced in place, by copies and by the commands of refits."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import numpy as np

from nimblert.arrays.device_arrays import DeviceArray
from nimblert.calls.refitting import Refit
from nimblert.cuda import graph
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.memory import Bases, DeviceMemory, allocate
from nimblert.cuda.movers import GatherKernels
from nimblert.plan import Region, Tensor


def refit(
    device: int,
    refits: Sequence[Refit],
    weights: Bases,
    functions: Sequence[Handle],
    kernels: GatherKernels,
    ready: Callable[[], None],
) -> None:
    """Do ``refits`` on these ``weights`` once the device is idle, and wait.

    Everything that can fail comes first: memory is allocated, graphs are built, ``ready`` is called. Raises InputError,
    CudaError.
    """
    with closing(Context(device)) as context:
        todo: list[Callable[[], None]] = []
        for given in refits:
            arena = allocate(context, given.program.arena_nbytes)
            memory = DeviceMemory(context, given.program, {**weights, (Region.ARENA, 0): arena})
            for tensor, array in zip(given.program.inputs, given.arrays, strict=True):
                if array is not None and tensor.span_nbytes:
                    todo.append(_copy(tensor, array, memory, kernels))
            if given.program.commands:
                built = graph.build(context, given.program, functions, memory)
                executable = context.acquire(call("cuGraphInstantiate", built, 0), "cuGraphExecDestroy")
                call("cuGraphUpload", executable, 0)
                todo.append(partial(call, "cuGraphLaunch", executable, 0))
        call("cuCtxSynchronize")  # launches may still be running
        ready()
        context.make_current()  # ready() may have changed it
        for step in todo:
            step()
        call("cuCtxSynchronize")


def _copy(
    tensor: Tensor, array: np.ndarray | DeviceArray, memory: DeviceMemory, kernels: GatherKernels
) -> Callable[[], None]:
    """A function that copies an array into the tensor, in the tensor's layout."""
    target = memory.address(tensor.pointer)
    if isinstance(array, DeviceArray):
        mover = kernels.mover_to("weight", tensor, array.strides)
        return lambda: mover.move(target, array.address, 0)
    order = sorted(range(array.ndim), key=lambda axis: -tensor.strides[axis])
    laid = np.ascontiguousarray(array.transpose(order))
    return lambda: call("cuMemcpyHtoD", target, laid.ctypes.data, laid.nbytes)
