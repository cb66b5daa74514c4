"""The state of a context in device memory: read to the host or the device, written from either, reset."""

from contextlib import closing

import numpy as np

from nimblert.arrays.device_arrays import DeviceArray, DeviceOutput
from nimblert.cuda.driver import Context, call
from nimblert.cuda.memory import upload
from nimblert.cuda.movers import GatherKernels
from nimblert.cuda.pools import DevicePool
from nimblert.plan import Plan, Tensor


class DeviceState:
    """The STATE region of a plan at an address of one GPU. Each call waits until it is done.

    ``stream`` is what waits for arrays that are taken in.

    What runs in the region must have ended; `close` gives back what was handed out of device memory, when its
    last user lets go of it.
    """

    def __init__(self, plan: Plan, device: int, base: int, stream: int) -> None:
        self._plan = plan
        self._device = device
        self._base = base
        self._stream = stream
        self._pool = DevicePool(Context(device))

    def reset(self) -> None:
        """Give every tensor what it was when the plan was made."""
        with closing(Context(self._device)):
            upload(self._base, self._plan.state)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes, as uint8."""
        host = np.empty(nbytes, np.uint8)
        if nbytes:
            with closing(Context(self._device)):
                call("cuMemcpyDtoH", host.ctypes.data, self._base + offset, nbytes)
        return host

    def copy(self, tensor: Tensor) -> DeviceOutput:
        """A copy of a tensor in device memory."""
        with closing(Context(self._device)):
            lent = self._pool.take(tensor.span_nbytes, 0)
            if tensor.span_nbytes:
                call("cuMemcpyDtoD", lent.address, self._base + tensor.pointer.offset, tensor.span_nbytes)
                call("cuStreamSynchronize", 0)
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
        """Copy an array of the tensor's dtype and shape to where it lies."""
        if not tensor.span_nbytes:
            return
        target = self._base + tensor.pointer.offset
        with closing(Context(self._device)) as context:
            if isinstance(array, DeviceArray):
                mover = GatherKernels(context).mover_to("state", tensor, array.strides)
                mover.move(target, array.address, self._stream)
                call("cuStreamSynchronize", self._stream)
            else:
                dense = np.ascontiguousarray(array)
                call("cuMemcpyHtoD", target, dense.ctypes.data, dense.nbytes)

    def close(self) -> None:
        """Give back what nobody has."""
        self._pool.close()
