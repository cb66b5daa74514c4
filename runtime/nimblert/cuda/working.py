"""The device memory that the programs of a context share, and the work in flight there."""

import threading
from functools import partial
from typing import Any

from nimblert.arrays import device_arrays
from nimblert.arrays.device_arrays import DeviceArray
from nimblert.calls.remembering import remembered
from nimblert.cuda import driver
from nimblert.cuda.driver import NO_TIMING, PER_THREAD, Context, Handle, call
from nimblert.cuda.memory import Bases, allocate, place_working
from nimblert.cuda.state import DeviceState
from nimblert.errors import InputError
from nimblert.plan import Plan, Region

_MOST_KEPT = 64
"""The most launches whose arrays are kept alive before waiting for them."""


class InFlight:
    """The work in a memory that was enqueued without waiting; the next user of the memory waits for it.

    Its event is destroyed with ``context``. ``is_shared``: several contexts use the memory, perhaps in several threads.
    """

    def __init__(self, context: Context, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self._make_current = context.make_current
        self.event: Handle = context.acquire(call("cuEventCreate", NO_TIMING), "cuEventDestroy")
        """Recorded after the work, by `enqueued` or by a node of the graph that was launched."""
        self._record = partial(driver.function("cuEventRecord"), self.event)
        self.stream: int | None = None
        """The stream of the work; None where there is none."""
        self._kept: list[object] = []
        self.tracking = threading.RLock()
        """Held while ``stream`` is set, where the memory is shared."""

    def precede(self, stream: int) -> None:
        """Make later work on ``stream`` wait for it."""
        if self.stream is not None and (self.stream != stream or stream == PER_THREAD):
            call("cuStreamWaitEvent", stream, self.event, 0)

    def precede_reader(self, stream: int) -> None:
        """As `precede`, on a stream of another library, in any thread and also once this is closed."""
        if self.stream is not None:
            self._make_current()
            self.precede(stream)

    def enqueued(self, stream: int, arrays: object) -> None:
        """Track the work enqueued on ``stream`` so far; ``arrays`` are kept alive until it has ended."""
        if len(self._kept) >= _MOST_KEPT:
            call("cuEventSynchronize", self.event)
            self._kept.clear()
        with self.tracking:
            self._record(stream)
            self.stream = stream
            self._kept.append(arrays)

    def wait(self) -> None:
        """Wait until it has ended."""
        if self.stream is not None:
            with self.tracking:
                call("cuEventSynchronize", self.event)
                self.ended()

    def ended(self) -> None:
        """Note that it has ended."""
        self.stream = None
        self._kept.clear()

    def close(self) -> None:
        """Wait for it, ignoring errors: after a kernel has failed, the driver refuses every call."""
        if self.stream is not None:
            with self.tracking:
                driver.bindings().cuEventSynchronize(self.event)
                self.ended()


class DeviceArena:
    """An arena that contexts share, and the work in flight there."""

    def __init__(self, nbytes: int, device: int) -> None:
        driver.initialise()
        self._context = Context(device)
        try:
            self.address = allocate(self._context, nbytes)
            self.in_flight = InFlight(self._context, is_shared=True)
        except BaseException:
            self._context.close()
            raise

    def close(self) -> None:
        """Free it; the contexts that use it must be closed."""
        self._context.close()


class CudaWorking:
    """The device memory that the programs of a context share, and the stream that they run on."""

    def __init__(self, plan: Plan, device: int, arena: DeviceArena | None, *, poison: bool) -> None:
        self._context = Context(device)
        self._device = device
        self._is_only_gpu = driver.count() == 1
        self._here: dict[int, bool] = {}
        """Addresses that were found to be on this GPU, or within its reach: the driver takes 8 us to tell."""
        self._taking = threading.RLock()
        self._closed = False
        try:
            non_blocking = driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
            created = self._context.acquire(call("cuStreamCreate", non_blocking), "cuStreamDestroy")
            self.stream = int(created)
            self._written = self._context.acquire(call("cuEventCreate", NO_TIMING), "cuEventDestroy")
            address = None if arena is None else arena.address
            self.bases: Bases = place_working(self._context, plan, address, poison=poison)
            self.in_flight = InFlight(self._context) if arena is None else arena.in_flight
            self._kept = DeviceState(plan, device, self.bases[Region.STATE, 0], self.stream)
        except BaseException:
            self._context.close()
            raise

    def take(self, value: Any, ordinal: int, stream: int | None = None) -> DeviceArray:
        """An array of the caller on this GPU, ready for later work on ``stream``, by default the context's.

        Raises InputError where it is on another GPU, and once this is closed.
        """
        self._check_here(ordinal)
        with self._taking:  # no other thread may record the event in between, or close this
            if self._closed:
                raise InputError("the context that would read it is closed")
            self._context.make_current()
            reader = self.stream if stream is None else stream
            array = device_arrays.take(value, reader)
            if ordinal == -1 and not self._is_only_gpu and array.address not in self._here:
                self._check_here(_ordinal(array.address))
                remembered(self._here, array.address, found=True)
            if array.stream is not None and array.stream != reader:
                call("cuEventRecord", self._written, array.stream)
                call("cuStreamWaitEvent", reader, self._written, 0)
            return array

    def _check_here(self, ordinal: int) -> None:
        if ordinal not in {self._device, -1}:
            raise InputError(f"is on GPU {ordinal}, the plan runs on GPU {self._device}: copy it there")

    def stream_handle(self, stream: Any) -> int | None:
        """The handle of a stream of the caller, or None: an int, or what `__cuda_stream__` gives. Raises InputError.

        The protocol: https://nvidia.github.io/cuda-python/cuda-core/latest/interoperability.html.
        """
        if stream is None or (type(stream) is int and stream >= 0):
            return stream
        asked = getattr(stream, "__cuda_stream__", None)
        if asked is None:
            raise InputError(f"stream: got {stream!r}, expected a handle (an int) or an object with __cuda_stream__")
        _, handle = asked()
        return int(handle)

    @property
    def kept(self) -> DeviceState:
        """The state, after all work in this memory has ended."""
        self._context.make_current()
        self.in_flight.wait()
        return self._kept

    def close(self) -> None:
        """Free it; the programs that use it must be closed."""
        with self._taking:
            self._closed = True
            self._kept.close()
            self._context.close()


def _ordinal(address: int) -> int:
    """The GPU whose memory an address is in; -1 for memory that all reach, and for what the driver does not know."""
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
