"""The CUDA driver: the one module that imports its bindings, and the checks of its results."""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias

from nimblert.errors import CudaError, DeviceMismatchError, PlanInvalidError
from nimblert.stages import stage

if TYPE_CHECKING:
    from nimblert.plan import Device  # imported later: the GPU starts meanwhile

_PARAM_BUFFER_POINTER = 1  # CU_LAUNCH_PARAM_BUFFER_POINTER
_PARAM_BUFFER_SIZE = 2  # CU_LAUNCH_PARAM_BUFFER_SIZE

NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
PER_THREAD = 2  # CU_STREAM_PER_THREAD: in each thread another stream

Handle: TypeAlias = Any
"""A CUDA object of cuda.bindings (CUmodule, CUgraphNode ...), which has no types."""


@cache
def bindings() -> Any:
    """Return the module ``cuda.bindings.driver``, imported on first use: plans for the CPU need none."""
    try:
        from cuda.bindings import driver
    except ImportError as exc:
        raise DeviceMismatchError(
            "this plan needs a GPU, and cuda-bindings is not installed: pip install 'nimblert[cuda]'"
        ) from exc
    return driver


def call(api: str, *args: object) -> Any:
    """Call a driver function, and return its results without the status. Raises CudaError."""
    results = getattr(bindings(), api)(*args)
    if results[0] != 0:
        raise CudaError(api, results[0].name)
    return results[1] if len(results) == 2 else results[1:]


def function(api: str) -> Callable[..., None]:
    """Return `call` of a driver function without results, looked up once, which takes half the time."""
    found = getattr(bindings(), api)

    def checked(*args: object) -> None:
        status = found(*args)[0]
        if status != 0:
            raise CudaError(api, status.name)

    return checked


def initialise() -> None:
    """Initialise the driver. Raises DeviceMismatchError without a driver or GPU, and in a forked process."""
    driver = bindings()
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as exc:  # cuda.bindings: libcuda cannot be loaded
        raise DeviceMismatchError("this plan needs a GPU, and this machine has no NVIDIA driver") from exc
    if status == driver.CUresult.CUDA_ERROR_NOT_INITIALIZED:
        raise DeviceMismatchError(
            "CUDA cannot be used in a process that was forked from one that uses it: start this one anew "
            "(multiprocessing.get_context('spawn'))"
        )
    if status != 0 or call("cuDeviceGetCount") == 0:
        raise DeviceMismatchError(f"this plan needs a GPU, and none can be used here (cuInit: {status.name})")


@contextmanager
def starting(ordinal: int) -> Iterator[None]:
    """Start the driver and a GPU's primary context in a thread for the block, which may import what uses them.

    Uses ctypes, as the bindings take a while to import. Errors are ignored: the calls of the block meet them again.
    """
    owned = ExitStack()
    thread = Thread(target=_retain, args=(owned, ctypes.c_int(int(ordinal))), name="nimblert-start")
    thread.start()
    try:
        yield
    finally:
        thread.join()
        owned.close()


def _retain(owned: ExitStack, ordinal: ctypes.c_int) -> None:
    """Retain a GPU's primary context until ``owned`` closes, or nothing where that fails."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        with stage("start the driver"):
            failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        if not failed:
            with stage("start the GPU"):
                failed = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    except (OSError, AttributeError):
        return
    if not failed:
        owned.callback(cuda.cuDevicePrimaryCtxRelease_v2, device)


def count() -> int:
    """Return the number of GPUs that CUDA shows."""
    return int(call("cuDeviceGetCount"))


def describe(ordinal: int = 0) -> "Device":
    """Return the GPU with this ordinal, and the CUDA version of its driver. Raises DeviceMismatchError without one."""
    if not 0 <= ordinal < (shown := count()):
        raise DeviceMismatchError(f"device {ordinal}: CUDA shows {shown} here, from 0 (CUDA_VISIBLE_DEVICES)")
    from nimblert.plan import Device

    attribute = bindings().CUdevice_attribute
    device = call("cuDeviceGet", ordinal)

    def read(name: str) -> int:
        return int(call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    return Device(
        name=call("cuDeviceGetName", 128, device).split(b"\0")[0].decode(),
        compute_capability=(read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        multiprocessor_count=read("MULTIPROCESSOR_COUNT"),
        driver_version=call("cuDriverGetVersion"),
    )


def check_device(needed: "Device", found: "Device") -> None:
    """Raise DeviceMismatchError unless the cubins of a plan made for ``needed`` run on ``found``.

    The compute capability must be equal: library cubins are built for one (sm_90a runs on no other).
    """
    if needed.compute_capability != found.compute_capability:
        want, have = (".".join(map(str, d.compute_capability)) for d in (needed, found))
        raise DeviceMismatchError(
            f"the plan was made for compute capability {want} ({needed.name}), this machine has {have} "
            f"({found.name}): compile it on a GPU of this generation"
        )
    if needed.driver_version > found.driver_version:
        want, have = (f"{v // 1000}.{v % 1000 // 10}" for v in (needed.driver_version, found.driver_version))
        raise DeviceMismatchError(
            f"the plan needs a driver for CUDA {want} or newer, this machine's is for CUDA {have}: update the driver"
        )


class PackedParameters:
    """The parameters of a launch in a buffer, which the driver copies during the call that takes it."""

    def __init__(self, params: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(params, max(len(params), 1))
        self._size = ctypes.c_size_t(len(params))
        self._extra = (ctypes.c_uint64 * 5)(
            _PARAM_BUFFER_POINTER, ctypes.addressof(self._buffer), _PARAM_BUFFER_SIZE, ctypes.addressof(self._size), 0
        )
        self.extra = ctypes.addressof(self._extra)
        """The address for the ``extra`` of a launch, valid as long as this object lives."""

    def replace(self, params: bytes) -> None:
        """Overwrite the first bytes."""
        ctypes.memmove(self._buffer, params, len(params))


class SeparateParameters:
    """The same parameters as an array of pointers: the driver takes no buffer of a cooperative kernel (cuda.h).

    Raises PlanInvalidError where the kernel has parameters beyond the buffer.
    """

    def __init__(self, function: Handle, params: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(params, max(len(params), 1))
        begin, places = ctypes.addressof(self._buffer), []
        for offset, nbytes in parameter_layout(function):
            if offset + nbytes > len(params):
                raise PlanInvalidError([f"cooperative launch: {len(params)} bytes of parameters, its kernel has more"])
            places.append(begin + offset)
        self._pointers = (ctypes.c_void_p * max(len(places), 1))(*places)
        self.kernel_params = ctypes.addressof(self._pointers)
        """The address for the ``kernelParams`` of a launch, valid as long as this object lives."""


def parameter_layout(function: Handle) -> Iterator[tuple[int, int]]:
    """Yield the offset and the size of each parameter of a kernel."""
    for index in itertools.count():
        # The driver has no call for the number of parameters: it refuses the first index beyond them.
        try:
            offset, nbytes = call("cuFuncGetParamInfo", function, index)
        except CudaError as exc:
            if exc.result != "CUDA_ERROR_INVALID_VALUE":
                raise
            return
        yield offset, nbytes


class Context:
    """The primary context of a GPU; resources acquired in it are released in reverse order."""

    def __init__(self, ordinal: int = 0) -> None:
        device = call("cuDeviceGet", ordinal)
        self.handle: Handle = call("cuDevicePrimaryCtxRetain", device)
        """The CUcontext."""
        self.make_current: Callable[[], None] = partial(function("cuCtxSetCurrent"), self.handle)
        """Make this the calling thread's context."""
        with ExitStack() as stack:
            stack.callback(release, "cuDevicePrimaryCtxRelease", device)
            self.make_current()
            self._stack = stack.pop_all()
        self.is_closed = False

    @contextmanager
    def within(self) -> Iterator[None]:
        """Make this context current for the block, then the thread's former one; ignore errors, as `release` does."""
        before = bindings().cuCtxGetCurrent()[1]
        release("cuCtxSetCurrent", self.handle)
        try:
            yield
        finally:
            release("cuCtxSetCurrent", before)

    def acquire(self, handle: Handle, api: str) -> Handle:
        """Own a ``handle``: the driver function ``api`` is called with it when the context closes."""
        self._stack.callback(release, api, handle)
        return handle

    def callback(self, function: Callable[[], object]) -> None:
        """Call a function when the context closes."""
        self._stack.callback(function)

    def close(self) -> None:
        """Release everything."""
        self.is_closed = True
        release("cuCtxSetCurrent", self.handle)
        self._stack.close()


def release(api: str, handle: Handle) -> None:
    """Release a handle, and ignore the result.

    After a kernel has failed, CUDA refuses every call, and the process frees the memory at its end: the error to report
    is the kernel's.
    """
    getattr(bindings(), api)(handle)
