"""The state of a context in device memory."""

from contextlib import closing

import numpy as np

from nimblert.arrays.device_arrays import DeviceArray, DeviceOutput
from nimblert.cuda.driver import Context, call
from nimblert.cuda.memory import DEFAULT_STREAM, upload
from nimblert.cuda.movers import GatherKernels
from nimblert.cuda.pools import DevicePool
from nimblert.plan import Plan, Tensor


class DeviceState:
    """The STATE region of a plan, at an address on one GPU. Each call waits until it is done.

    ``stream`` is the one that waits for arrays of the caller. The GPU's context is current in the calling thread, and
    no run uses the region meanwhile. Device memory that `copy` has handed out is freed by its last user, also after
    `close`.
    """

    def __init__(self, plan: Plan, device: int, base: int, stream: int) -> None:
        self._plan = plan
        self._device = device
        self._base = base
        self._stream = stream
        self._pool = DevicePool(Context(device))

    def reset(self) -> None:
        """Restore the initial values."""
        upload(self._base, self._plan.state)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes, as uint8."""
        host = np.empty(nbytes, np.uint8)
        if nbytes:
            call("cuMemcpyDtoH", host.ctypes.data, self._base + offset, nbytes)
        return host

    def copy(self, tensor: Tensor) -> DeviceOutput:
        """A copy of a tensor in device memory."""
        lent = self._pool.take(tensor.span_nbytes, 0, is_shared=True)
        if tensor.span_nbytes:
            call("cuMemcpyDtoD", lent.address, self._base + tensor.pointer.offset, tensor.span_nbytes)
            call("cuStreamSynchronize", DEFAULT_STREAM)
        return DeviceOutput(
            DeviceArray(
                address=lent.address,
                dtype=tensor.dtype,
                shape=tensor.shape,
                strides=tensor.strides,
                device=self._device,
                owner=lent,
            )
        )

    def write(self, tensor: Tensor, array: np.ndarray | DeviceArray) -> None:
        """Copy an array of the tensor's dtype and shape into the tensor."""
        if not tensor.span_nbytes:
            return
        target = self._base + tensor.pointer.offset
        if isinstance(array, DeviceArray):
            with closing(Context(self._device)) as context:
                mover = GatherKernels(context).mover_to("state", tensor, array.strides)
                mover.move(target, array.address, self._stream)
                call("cuStreamSynchronize", self._stream)
        else:
            dense = np.ascontiguousarray(array)
            call("cuMemcpyHtoD", target, dense.ctypes.data, dense.nbytes)
            call("cuStreamSynchronize", DEFAULT_STREAM)

    def close(self) -> None:
        """Free the memory that nobody uses."""
        self._pool.close()
