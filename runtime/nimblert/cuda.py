"""The CUDA backend: a program as an instantiated CUDA graph over its own device memory."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from nimblert import device_arrays, device_refit, driver, graph
from nimblert.device_arrays import DeviceArray, DeviceOutput
from nimblert.driver import NO_TIMING, Context, Handle, call
from nimblert.dtypes import numpy_dtype
from nimblert.errors import InputError
from nimblert.memory import Bases, DeviceMemory, Staging, place_weights, place_working
from nimblert.plan import Plan, Pointer, Program, Record, Tensor, Wait, Work
from nimblert.refitting import Refit
from nimblert.transfers import GatherKernels, Inlet, Outlet, Pools


class CudaResident:
    """What all contexts of a plan on one GPU share: code and weights."""

    def __init__(self, plan: Plan, device: int = 0) -> None:
        driver.initialise()
        driver.check_device(plan.device, driver.describe(device))
        self._plan = plan
        self._device = device
        self._context = Context(device)
        try:
            self.gathers = GatherKernels(self._context)
            self.weights: Bases = place_weights(self._context, plan)
            self.functions: Sequence[Handle] = graph.load_functions(self._context, plan.modules, plan.kernels)
            self.pools = Pools(device)
        except BaseException:
            self._context.close()
            raise

    def working(self, arena: int | None = None, *, poison: bool = False) -> "CudaWorking":
        """Arena and state for one context."""
        return CudaWorking(self._plan, self._device, arena, poison=poison)

    def backend(self, program: Program, working: "CudaWorking", *, poison: bool = False) -> "CudaBackend":
        """A program in the memory of a context."""
        return CudaBackend(self._plan, program, poison=poison, resident=self, working=working, device=self._device)

    def refit(self, refits: Sequence[Refit], backends: Sequence["CudaBackend"]) -> Sequence["CudaBackend"]:
        """Replace weights where they lie: the same backends go on."""
        device_refit.refit(self._device, refits, self.weights, self.functions, self.gathers.move)
        return backends

    def close(self) -> None:
        """Give back code and weights; every context must be closed."""
        self.pools.close()
        self._context.close()


class CudaWorking:
    """The device memory that the programs of a context share, and the stream on which one of them runs."""

    def __init__(self, plan: Plan, device: int, arena: int | None, *, poison: bool) -> None:
        self._context = Context(device)
        self._device = device
        try:
            non_blocking = driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
            self.stream: Handle = self._context.acquire(call("cuStreamCreate", non_blocking), "cuStreamDestroy")
            self._written = self._context.acquire(call("cuEventCreate", NO_TIMING), "cuEventDestroy")
            self.bases: Bases = place_working(self._context, plan, arena, poison=poison)
        except BaseException:
            self._context.close()
            raise

    def take(self, value: Any, ordinal: int) -> DeviceArray:
        """An array on a GPU, for a run that comes next. Raises InputError where it is on another one."""
        if ordinal not in {self._device, -1}:
            raise InputError(f"is on GPU {ordinal}, the plan runs on GPU {self._device}: copy it there")
        self._context.make_current()
        array = device_arrays.take(value, int(self.stream))
        if array.stream is not None:
            call("cuEventRecord", self._written, array.stream)
            call("cuStreamWaitEvent", self.stream, self._written, 0)
        return array

    def close(self) -> None:
        """Give it back; the programs that use it must be closed."""
        self._context.close()


class CudaBackend:
    """A program loaded on a GPU.

    ``inputs`` and ``outputs`` are numpy views of page-locked memory; `run` uploads the one, replays
    and downloads the other. `replay` runs on what the device already holds. Programs of one
    ``working`` memory run one at a time.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        *,
        poison: bool = False,
        resident: CudaResident | None = None,
        working: CudaWorking | None = None,
        device: int = 0,
    ) -> None:
        with ExitStack() as owned:
            if resident is None:
                resident = CudaResident(plan, device)
                owned.callback(resident.close)
            if working is None:
                working = resident.working(poison=poison)
                owned.callback(working.close)
            self._modules = plan.modules  # the driver reads their code when a kernel is first used
            self._context = Context(device)
            owned.callback(self._context.close)
            self._load(program, resident, working, poison=poison)
            self._owned = owned.pop_all()

    def _load(self, program: Program, resident: CudaResident, working: CudaWorking, *, poison: bool) -> None:
        context = self._context
        self._stream = working.stream
        given = {**resident.weights, **working.bases}
        self.memory: DeviceMemory = DeviceMemory(context, program, given, poison=poison)
        self._staged_inputs = Staging(context, program.inputs, self.memory)
        self._staged_outputs = Staging(context, program.outputs, self.memory)
        self.inputs: tuple[np.ndarray, ...] = self._staged_inputs.views
        self.outputs: tuple[np.ndarray, ...] = self._staged_outputs.views
        self._inlet = Inlet(context, program.inputs, self.memory, self._staged_inputs, resident.gathers)
        self._outlet = Outlet(program.outputs, self.memory, self._staged_outputs, resident.gathers, resident.pools)
        self._program = program
        self.functions: Sequence[Handle] = resident.functions
        self.graph = graph.build(context, program, self.functions, self.memory)
        self._executable = context.acquire(call("cuGraphInstantiate", self.graph, 0), "cuGraphExecDestroy")
        call("cuGraphUpload", self._executable, self._stream)
        call("cuStreamSynchronize", self._stream)

    def place(self, arrays: Sequence[np.ndarray | DeviceArray]) -> None:
        """Have the device hold these inputs before whatever comes next, and wait for that."""
        self._context.make_current()
        try:
            for index, array in enumerate(arrays):
                self._inlet.put(index, array, self._stream)
        finally:
            call("cuStreamSynchronize", self._stream)

    def call(
        self,
        arrays: Sequence[np.ndarray | DeviceArray],
        out: Mapping[str, np.ndarray | DeviceArray],
        *,
        reuse_outputs: bool,
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> dict[str, np.ndarray | DeviceOutput]:
        """Run on these inputs, and wait: the outputs by name, on the device if any input was there.

        Inputs of smaller shapes are padded, outputs of smaller ``shapes`` cut to them.
        """
        self._context.make_current()
        on_device = any(isinstance(array, DeviceArray) for array in arrays)
        try:
            for index, array in enumerate(arrays):
                self._inlet.put(index, array, self._stream)
            call("cuGraphLaunch", self._executable, self._stream)
            coming = {
                tensor.name: self._outlet.begin(
                    index,
                    out.get(tensor.name),
                    self._stream,
                    reuse=reuse_outputs,
                    on_device=on_device,
                    shape=None if shapes is None else shapes[index],
                )
                for index, tensor in enumerate(self._program.outputs)
            }
        finally:  # the arrays are the caller's again, whatever happened
            call("cuStreamSynchronize", self._stream)
        return {name: get() for name, get in coming.items()}

    def empty(self, tensor: Tensor, arrays: Sequence[np.ndarray | DeviceArray]) -> np.ndarray | DeviceArray:
        """An array for an output, on the device if any of the inputs is there."""
        if not any(isinstance(array, DeviceArray) for array in arrays):
            return np.empty(tensor.shape, numpy_dtype(tensor.dtype))
        self._context.make_current()
        return self._outlet.empty(tensor, self._stream)

    def run(self) -> None:
        """Upload the inputs, replay the graph, download the outputs, and wait."""
        self._context.make_current()
        self._staged_inputs.to_device(self._stream)
        call("cuGraphLaunch", self._executable, self._stream)
        self._staged_outputs.to_host(self._stream)
        call("cuStreamSynchronize", self._stream)

    def replay(self) -> None:
        """Replay the graph on the inputs that the device holds, and wait."""
        self._context.make_current()
        call("cuGraphLaunch", self._executable, self._stream)
        call("cuStreamSynchronize", self._stream)

    def steps(self) -> Generator[Work, None, None]:
        """Compute on the inputs that the device holds, in issue order: each launch, copy or fill when it is done.

        Each is a graph of one node, so that it runs as it does in the whole graph.
        """
        for command in self._work():
            self._context.make_current()  # the caller may have had another one since
            with self._run_once() as single:
                graph.add_node(single, command, self.functions, self.memory)
            yield command

    def profile(self) -> list[int]:
        """Compute as `steps` does: GPU nanoseconds of each launch, copy or fill.

        Taken by an event before and one after the node, in the same graph: what the events cost is included.
        """
        self._context.make_current()
        begin, end = (call("cuEventCreate", 0) for _ in range(2))
        try:
            return [self._time_alone(command, begin, end) for command in self._work()]
        finally:
            call("cuEventDestroy", begin)
            call("cuEventDestroy", end)

    def _time_alone(self, command: Work, begin: Handle, end: Handle) -> int:
        with self._run_once() as single:
            first = call("cuGraphAddEventRecordNode", single, None, 0, begin)
            node = graph.add_node(single, command, self.functions, self.memory)
            graph.add_edge(single, first, node)
            call("cuGraphAddEventRecordNode", single, [node], 1, end)
        return round(float(call("cuEventElapsedTime", begin, end)) * 1e6)

    def _work(self) -> Iterator[Work]:
        """Launches, copies and fills, in issue order."""
        return (command for command in self._program.commands if not isinstance(command, Record | Wait))

    @contextmanager
    def _run_once(self) -> Iterator[Handle]:
        """A graph that runs, and is waited for, when the block has filled it."""
        single = call("cuGraphCreate", 0)
        try:
            yield single
            executable = call("cuGraphInstantiate", single, 0)
            try:
                call("cuGraphLaunch", executable, self._stream)
                call("cuStreamSynchronize", self._stream)
            finally:
                call("cuGraphExecDestroy", executable)
        finally:
            call("cuGraphDestroy", single)

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes of the program's device memory, as uint8."""
        host = np.empty(nbytes, np.uint8)
        if nbytes:
            self._context.make_current()
            call("cuMemcpyDtoH", host.ctypes.data, self.memory.address(pointer), nbytes)
        return host

    def launch(self, stream: int) -> None:
        """Replay the graph on the inputs that the device holds, on a stream of the caller, without waiting."""
        self._context.make_current()
        call("cuGraphLaunch", self._executable, stream)

    def time(self, count: int) -> np.ndarray:
        """GPU time in microseconds of each of ``count`` replays, taken by events around it."""
        self._context.make_current()
        begin, end = (call("cuEventCreate", 0) for _ in range(2))
        times = np.empty(count)
        try:
            for i in range(count):
                call("cuEventRecord", begin, self._stream)
                call("cuGraphLaunch", self._executable, self._stream)
                call("cuEventRecord", end, self._stream)
                call("cuEventSynchronize", end)
                times[i] = call("cuEventElapsedTime", begin, end) * 1e3
        finally:
            call("cuEventDestroy", begin)
            call("cuEventDestroy", end)
        return times

    def close(self) -> None:
        """Give back the graph and its memory, and what was made for it alone."""
        self._owned.close()
