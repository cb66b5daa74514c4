"""The device memory that the programs of a context share, and the work in flight there."""

import threading
from typing import Any

import numpy as np

from nimblert.arrays import device_arrays
from nimblert.arrays.device_arrays import DeviceOutput
from nimblert.arrays.dlpack import DeviceArray
from nimblert.cuda import driver
from nimblert.cuda.driver import NO_TIMING, PER_THREAD, Context, Handle, call
from nimblert.cuda.memory import DEFAULT_STREAM, Bases, BlockPool, allocate
from nimblert.cuda.movers import GatherKernels
from nimblert.cuda.uploader import Uploader, upload_region
from nimblert.errors import InputError
from nimblert.plan import Plan, Region, Tensor

_MOST_KEPT = 64
"""The most calls whose arrays are kept alive before waiting for them."""


class InFlight:
    """The work in a memory that was enqueued without waiting; the next user of the memory waits for it.

    ``stream`` is the stream of the work; None where there is none. Several contexts, perhaps in several threads, may
    share the memory.
    """

    def __init__(self, context: Context) -> None:
        self._make_current = context.make_current
        self._event: Handle = context.acquire(call("cuEventCreate", NO_TIMING), "cuEventDestroy")
        self._record = driver.function("cuEventRecord")
        self.stream: int | None = None
        self._kept: list[object] = []
        self._tracking = threading.RLock()

    def precede(self, stream: int) -> None:
        """Make later work on ``stream`` wait for it."""
        if self.stream is not None and (self.stream != stream or stream == PER_THREAD):
            call("cuStreamWaitEvent", stream, self._event, 0)

    def precede_reader(self, stream: int) -> None:
        """Do what `precede` does on a stream of another library, in any thread, even after the context is closed."""
        if self.stream is not None:
            self._make_current()
            self.precede(stream)

    def enqueued(self, stream: int, arrays: object) -> None:
        """Track the work enqueued on ``stream`` so far; ``arrays`` are kept alive until it has ended."""
        if len(self._kept) >= _MOST_KEPT:
            call("cuEventSynchronize", self._event)
            self._kept.clear()
        with self._tracking:
            self._record(self._event, stream)
            self.stream = stream
            if arrays is not None:
                self._kept.append(arrays)

    def wait(self) -> None:
        """Wait until it has ended."""
        if self.stream is not None:
            with self._tracking:
                call("cuEventSynchronize", self._event)
                self.ended()

    def ended(self) -> None:
        """Note that it has ended."""
        self.stream = None
        self._kept.clear()

    def close(self) -> None:
        """Wait for it, ignoring errors: after a kernel has failed, the driver refuses every call."""
        if self.stream is not None:
            with self._tracking:
                driver.bindings().cuEventSynchronize(self._event)
                self.ended()


class DeviceArena:
    """An arena that contexts share, and the work in flight there."""

    def __init__(self, nbytes: int, device: int) -> None:
        driver.initialise()
        self._context = Context(device)
        try:
            self.address = allocate(self._context, nbytes)
            self.in_flight = InFlight(self._context)
        except BaseException:
            self._context.close()
            raise

    def close(self) -> None:
        """Free it; the contexts that use it must be closed."""
        self._context.close()


class CudaWorking:
    """The device memory that the programs of a context share, and the stream that they run on.

    Reads and writes of the state wait for the work in flight, and until they are done; no run uses the state meanwhile.
    """

    def __init__(
        self,
        plan: Plan,
        device: int,
        arena: DeviceArena | None,
        uploader: Uploader,
        kernels: GatherKernels,
        pool: BlockPool,
        *,
        poison: bool,
    ) -> None:
        self._context = Context(device)
        self._plan, self._device = plan, device
        self._uploader, self._kernels, self._pool = uploader, kernels, pool
        self._is_only_gpu = driver.count() == 1
        self._taking = threading.Lock()
        try:
            non_blocking = driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
            created = self._context.acquire(call("cuStreamCreate", non_blocking), "cuStreamDestroy")
            self.stream = int(created)
            self._written = self._context.acquire(call("cuEventCreate", NO_TIMING), "cuEventDestroy")
            self._state = allocate(self._context, plan.state_nbytes)
            address = allocate(self._context, plan.arena_nbytes, poison=poison) if arena is None else arena.address
            self.bases: Bases = {(Region.ARENA, 0): address, (Region.STATE, 0): self._state}
            self.in_flight = InFlight(self._context) if arena is None else arena.in_flight
            upload_region(uploader, self._state, plan.state)
        except BaseException:
            self._context.close()
            raise

    def take(self, value: Any, ordinal: int, stream: int | None = None) -> DeviceArray:
        """Return an array of the caller on this GPU, ready for later work on ``stream``, by default the context's.

        Raises InputError where it is on another GPU, and once this is closed.
        """
        self._check_here(ordinal)
        with self._taking:  # no other thread may record the event in between, or close this
            if self._context.is_closed:
                raise InputError("the context that would read it is closed")
            self._context.make_current()
            reader = self.stream if stream is None else stream
            array = device_arrays.take(value, reader)
            if ordinal == -1 and not self._is_only_gpu:
                self._check_here(_ordinal(array.address))
            if array.stream is not None and array.stream != reader:
                call("cuEventRecord", self._written, array.stream)
                call("cuStreamWaitEvent", reader, self._written, 0)
            return array

    def _check_here(self, ordinal: int) -> None:
        if ordinal not in {self._device, -1}:
            raise InputError(f"is on GPU {ordinal}, the plan runs on GPU {self._device}: copy it there")

    def stream_handle(self, stream: Any) -> int | None:
        """Return the handle of a stream of the caller, or None: an int, or what `__cuda_stream__` gives.

        The protocol: https://nvidia.github.io/cuda-python/cuda-core/latest/interoperability.html. Raises InputError.
        """
        if stream is None or (type(stream) is int and stream >= 0):
            return stream
        asked = getattr(stream, "__cuda_stream__", None)
        if asked is None:
            raise InputError(f"stream: got {stream!r}, expected a handle (an int) or an object with __cuda_stream__")
        _, handle = asked()
        return int(handle)

    def reset(self) -> None:
        """Restore the initial values of the state."""
        self._settle()
        upload_region(self._uploader, self._state, self._plan.state)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Return a copy of ``nbytes`` bytes of the state, as uint8."""
        self._settle()
        host = np.empty(nbytes, np.uint8)
        if nbytes:
            call("cuMemcpyDtoH", host.ctypes.data, self._state + offset, nbytes)
        return host

    def copy(self, tensor: Tensor) -> DeviceOutput:
        """Return a copy of a tensor of the state in device memory, which its last user frees, also after `close`."""
        self._settle()
        block = self._pool.take(tensor.span_nbytes, DEFAULT_STREAM)
        if tensor.span_nbytes:
            call("cuMemcpyDtoD", block.address, self._state + tensor.pointer.offset, tensor.span_nbytes)
            call("cuStreamSynchronize", DEFAULT_STREAM)
        return DeviceOutput(
            DeviceArray(
                address=block.address,
                dtype=tensor.dtype,
                shape=tensor.shape,
                strides=tensor.strides,
                device=self._device,
                owner=block,
            )
        )

    def write(self, tensor: Tensor, array: np.ndarray | DeviceArray) -> None:
        """Copy an array of the tensor's dtype and shape into a tensor of the state."""
        if not tensor.span_nbytes:
            return
        self._settle()
        target = self._state + tensor.pointer.offset
        if isinstance(array, DeviceArray):
            self._kernels.mover_to("state", tensor, array.strides).move(target, array.address, self.stream)
            call("cuStreamSynchronize", self.stream)
        else:
            dense = np.ascontiguousarray(array)
            call("cuMemcpyHtoD", target, dense.ctypes.data, dense.nbytes)
            call("cuStreamSynchronize", DEFAULT_STREAM)

    def _settle(self) -> None:
        """Make the context current, and wait until all work in this memory has ended."""
        self._context.make_current()
        self.in_flight.wait()

    def close(self) -> None:
        """Free it; the programs that use it must be closed."""
        with self._taking:
            self._context.close()


def _ordinal(address: int) -> int:
    """Return the GPU that an address belongs to; -1 for memory that all reach, or that the driver does not know."""
    kinds, asked = driver.bindings().CUmemorytype, driver.bindings().CUpointer_attribute
    kind, is_managed, ordinal = call(
        "cuPointerGetAttributes",
        3,
        [
            asked.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            asked.CU_POINTER_ATTRIBUTE_IS_MANAGED,
            asked.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        ],
        address,
    )
    return int(ordinal) if kind == kinds.CU_MEMORYTYPE_DEVICE and not is_managed else -1
