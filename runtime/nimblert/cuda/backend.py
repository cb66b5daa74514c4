"""The CUDA backend: a program as an instantiated CUDA graph over device memory."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from nimblert.arrays.dlpack import DeviceArray
from nimblert.arrays.layouts import numpy_dtype
from nimblert.cuda import driver, graph
from nimblert.cuda.calls import DeviceCall, HostCall, PreparedCall
from nimblert.cuda.driver import Context, Handle, call, release
from nimblert.cuda.memory import Bases, BlockPool, DeviceMemory, HostLayout, Staging, allocate
from nimblert.cuda.movers import GatherKernels
from nimblert.cuda.program import GraphProgram
from nimblert.cuda.transfers import DeviceInput, HostInput, InputTransfers, OutputTransfers, page_locked
from nimblert.cuda.uploader import Uploader, upload_region
from nimblert.cuda.working import CudaWorking, DeviceArena
from nimblert.errors import InputError
from nimblert.plan import Plan, Pointer, Program, Region, Tensor, Work
from nimblert.plan.dimensions import Shapes

if TYPE_CHECKING:
    from nimblert.calls.refitting import Refit
    from nimblert.cuda.refit import Refitter

_MOST_PREPARED = 64
"""Calls with more layouts of inputs are prepared again."""


class CudaLoaded:
    """Code and weights of a plan on one GPU, which its contexts share.

    Weights are uploaded while ``verify_digest`` waits, and while the driver loads the code that it has verified.
    """

    def __init__(self, plan: Plan, device: int, verify_digest: Callable[[], object] = bool) -> None:
        driver.initialise()
        driver.check_device(plan.device, driver.describe(device))
        self.device, self.bodies = device, plan.bodies
        self._plan = plan
        with ExitStack() as owned:
            self._context = context = Context(device)
            owned.callback(context.close)
            self.kernels = GatherKernels(context)
            self.uploader = Uploader(context)
            weights = allocate(context, plan.weights_nbytes)
            self.weights: Bases = {(Region.WEIGHTS, 0): weights}
            with ThreadPoolExecutor(1, initializer=context.make_current) as thread:
                uploading = thread.submit(upload_region, self.uploader, weights, plan.weights)
                verify_digest()
                self.functions: Sequence[Handle] = graph.load_functions(context, plan.modules, plan.kernels)
                uploading.result()
            self.host_pool = BlockPool(Context(device), on_device=False)
            owned.callback(self.host_pool.close)
            self.device_pool = BlockPool(Context(device), on_device=True)
            owned.callback(self.device_pool.close)
            self._owned = owned.pop_all()

    def working(self, arena: DeviceArena | None = None, *, poison: bool = False) -> CudaWorking:
        """Return arena and state for one context."""
        return CudaWorking(
            self._plan, self.device, arena, self.uploader, self.kernels, self.device_pool, poison=poison
        )

    def backend(self, program: Program, working: CudaWorking, *, poison: bool = False) -> "CudaBackend":
        """Load a program into the memory of a context."""
        return CudaBackend(self, program, working, poison=poison)

    def empty(self, tensor: Tensor) -> np.ndarray:
        """Return a new array in page-locked memory for an input or output, in its layout."""
        return HostLayout.of(tensor).over(self.host_pool.take(tensor.span_nbytes))

    def refit(self, refits: "Sequence[Refit]", backends: Sequence["CudaBackend"]) -> Sequence["CudaBackend"]:
        """Replace weights in place, and return the backends, which stay the same."""
        self._refitter.refit(refits)
        return backends

    @cached_property
    def _refitter(self) -> "Refitter":
        from nimblert.cuda.refit import Refitter  # few processes replace weights

        refitter = Refitter(self.device, self.weights, self.functions, self.kernels, self.uploader)
        self._owned.callback(refitter.close)
        return refitter

    def close(self) -> None:
        """Free code and weights; every context must be closed."""
        self._owned.close()


class CudaBackend(GraphProgram):
    """A program loaded on a GPU.

    ``inputs`` and ``outputs`` are numpy views of page-locked memory; `run` uploads the inputs, replays the graph and
    downloads the outputs. `replay` uses the inputs on the device. Programs of one ``working`` memory run one at a time.
    ``bound`` are the names of inputs and outputs in memory of the caller.
    """

    def __init__(self, loaded: CudaLoaded, program: Program, working: CudaWorking, *, poison: bool = False) -> None:
        self._prepared: dict[object, PreparedCall] = {}
        with ExitStack() as owned:
            context = Context(loaded.device)
            owned.callback(context.close)
            self._own = DeviceMemory(context, program, {**loaded.weights, **working.bases}, poison=poison)
            self._staged_inputs = Staging(context, program.inputs, self._own)
            self._staged_outputs = Staging(context, program.outputs, self._own)
            self.inputs: tuple[np.ndarray, ...] = self._staged_inputs.views
            self.outputs: tuple[np.ndarray, ...] = self._staged_outputs.views
            self._transfers = InputTransfers(context, program.inputs, self._own, self._staged_inputs, loaded.kernels)
            self._pools = loaded.host_pool, loaded.device_pool
            self.kernels, self.uploader = loaded.kernels, loaded.uploader
            super().__init__(
                program, context, loaded.functions, self._own, working, loaded.device, loaded.bodies
            )
            self._owned = owned.pop_all()

    def prepare(self, arrays: Sequence[np.ndarray | DeviceArray], shapes: Shapes | None = None) -> PreparedCall:
        """Return the call for arrays of these layouts and dtypes, one for each input.

        Those of smaller shapes than the inputs are padded, and ``shapes`` crops the outputs. Raises InputError.
        """
        key = shapes, tuple([(type(array), array.shape, array.strides) for array in arrays])
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) == _MOST_PREPARED:
                self._drop_prepared()
            prepared = self._prepared[key] = self._prepare(arrays, shapes)
        return prepared

    def _prepare(self, arrays: Sequence[np.ndarray | DeviceArray], shapes: Shapes | None) -> PreparedCall:
        self._context.make_current()
        inputs = [
            None if tensor.name in self.bound else self._transfers.prepare(index, array)
            for index, (tensor, array) in enumerate(zip(self.program.inputs, arrays, strict=True))
        ]
        outputs = self._outputs if shapes is None else self._outputs.cropped(shapes)
        host = [transfer for transfer in inputs if isinstance(transfer, HostInput)]
        device = [transfer for transfer in inputs if isinstance(transfer, DeviceInput)]
        if not self.bound and len(host) == len(inputs):
            return HostCall(self, host, outputs)
        if not self.bound and len(device) == len(inputs):
            return DeviceCall(self, device, outputs)
        on_device = any(isinstance(array, DeviceArray) for array in arrays)
        return PreparedCall(self, inputs, outputs, on_device=on_device)

    @cached_property
    def _outputs(self) -> OutputTransfers:
        return OutputTransfers(
            self.program.outputs, self.memory, self._staged_outputs, self.kernels, self._pools, self.device
        )

    def _drop_prepared(self) -> None:
        while self._prepared:
            self._prepared.popitem()[1].close()

    def bind(self, tensor: Tensor, array: DeviceArray | np.ndarray | None) -> None:
        """Use an array of the caller in place of an input or output; None restores the program's own memory.

        Raises InputError for one in memory that the GPU does not reach.
        """
        self._context.make_current()
        self.in_flight.wait()
        if array is None:
            address = self._own.address(tensor.pointer)
        else:
            found = page_locked(array) if isinstance(array, np.ndarray) else array.address
            if found is None:
                raise InputError(
                    f"bind {tensor.name!r}: the array is on the host: give one on the GPU, or one that empty_input or "
                    "empty_output returned"
                )
            address = found
        memory = self.memory.rebased({(tensor.pointer.region, tensor.pointer.index): address})
        old, self._graph = self._graph, self.instantiate(memory)
        release("cuGraphExecDestroy", old)
        self._drop_prepared()
        self.__dict__.pop("_outputs", None)
        self.memory = memory
        self.bound = self.bound - {tensor.name} if array is None else self.bound | {tensor.name}
        for mirror in (self._staged_inputs, self._staged_outputs, self._transfers):
            mirror.moved(memory)

    def address(self, tensor: Tensor) -> int:
        """Return the device address of the memory for an input or output, which may be bound."""
        return self.memory.address(tensor.pointer)

    def own_address(self, tensor: Tensor) -> int:
        """Return the device address of the program's own memory for an input or output."""
        return self._own.address(tensor.pointer)

    def place(self, arrays: Sequence[np.ndarray | DeviceArray]) -> None:
        """Copy these inputs to the device, and wait."""
        prepared = self.prepare(arrays)
        stream = self.begin(None)
        try:
            prepared.enqueue_inputs(arrays, stream)
        finally:
            self.end(None)

    def empty(self, tensor: Tensor, *, on_device: bool, stream: int | None) -> np.ndarray | DeviceArray:
        """Return a new array for an output, for a run on ``stream``, by default the context's."""
        if not on_device:
            return np.empty(tensor.shape, numpy_dtype(tensor.dtype))
        self._context.make_current()
        if stream is None:
            return self._outputs.empty(tensor, self._stream, None)
        return self._outputs.empty(tensor, stream, self.in_flight.precede_reader)

    def run(self) -> None:
        """Upload `inputs`, replay the graph, download `outputs`, and wait."""
        self.begin(None)
        try:
            self._staged_inputs.to_device(self._stream)
            self.launch_program(self._stream)
            self._staged_outputs.to_host(self._stream)
        finally:
            self.end(None)

    def replay(self) -> None:
        """Replay the graph on the inputs on the device, and wait."""
        self.begin(None)
        try:
            self.launch_program(self._stream)
        finally:
            self.end(None)

    def enqueue_replay(self, stream: int | None) -> None:
        """Replay the graph on ``stream``, by default the context's, without waiting."""
        used = self.begin(stream)
        try:
            self.launch_program(used)
        finally:
            self.in_flight.enqueued(used, None)

    def synchronize(self) -> None:
        """Wait for all work in flight."""
        self._context.make_current()
        self.in_flight.wait()

    def steps(self) -> Generator[Work, None, None]:
        """See `profiling.steps`."""
        from nimblert.cuda import profiling

        return profiling.steps(self)

    def profile(self) -> list[int]:
        """See `profiling.command_times`."""
        from nimblert.cuda import profiling

        return profiling.command_times(self)

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """Return a copy of ``nbytes`` bytes of the program's device memory, as uint8."""
        host = np.empty(nbytes, np.uint8)
        if nbytes:
            self.synchronize()
            call("cuMemcpyDtoH", host.ctypes.data, self.memory.address(pointer), nbytes)
        return host

    def close(self) -> None:
        """Wait for all work in flight, and free the graphs, and memory that was made for the program alone."""
        self._context.make_current()
        self.in_flight.close()
        self._drop_prepared()
        release("cuGraphExecDestroy", self._graph)
        self._owned.close()
