"""The CUDA backend: a program as an instantiated CUDA graph over device memory."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import numpy as np

from nimblert.arrays.device_arrays import DeviceArray, DeviceOutput
from nimblert.arrays.dtypes import numpy_dtype
from nimblert.calls.changing import Commit
from nimblert.calls.refitting import Refit
from nimblert.calls.remembering import remembered
from nimblert.calls.turn import Turn
from nimblert.cuda import driver, graph
from nimblert.cuda.call_graphs import Recipe
from nimblert.cuda.direct import DeviceDirect
from nimblert.cuda.driver import PER_THREAD, Context, Handle, call, release
from nimblert.cuda.early import Signal
from nimblert.cuda.memory import Bases, DeviceMemory, Staging, place_weights
from nimblert.cuda.movers import GatherKernels, Mover
from nimblert.cuda.pools import HostLayout, Pools
from nimblert.cuda.refit import Refitter
from nimblert.cuda.transfers import Given, Inlet, Outlet
from nimblert.cuda.whole_calls import WholeCalls
from nimblert.cuda.working import CudaWorking, DeviceArena
from nimblert.dimensions import Shapes
from nimblert.errors import InputError
from nimblert.plan import Plan, Pointer, Program, Tensor, Work


class CudaResident:
    """Code and weights of a plan on one GPU, which its contexts share."""

    def __init__(self, plan: Plan, device: int) -> None:
        driver.initialise()
        driver.check_device(plan.device, driver.describe(device))
        self._plan = plan
        self._device = device
        self._context = Context(device)
        try:
            self.gathers = GatherKernels(self._context)
            self.weights: Bases = place_weights(self._context, plan)
            self.functions: Sequence[Handle] = graph.load_functions(self._context, plan.modules, plan.kernels)
            self._refitter = Refitter(device, self.weights, self.functions, self.gathers)
            self.pools = Pools(device)
        except BaseException:
            self._context.close()
            raise

    def working(self, arena: DeviceArena | None = None, *, poison: bool = False) -> CudaWorking:
        """Arena and state for one context."""
        return CudaWorking(self._plan, self._device, arena, poison=poison)

    def backend(self, program: Program, working: CudaWorking, *, poison: bool = False) -> "CudaBackend":
        """A program in the memory of a context."""
        return CudaBackend(self._plan, program, poison=poison, resident=self, working=working, device=self._device)

    def empty_input(self, tensor: Tensor) -> np.ndarray:
        """A new array in page-locked memory for an input, in its layout."""
        return HostLayout.of(tensor).at(self.pools.host.take(tensor.span_nbytes, None, is_shared=False))

    def refit(
        self,
        refits: Sequence[Refit],
        backends: Sequence["CudaBackend"],
        replace_old: Callable[[Sequence["CudaBackend"]], None],
    ) -> None:
        """Replace weights in place: the backends stay the same."""
        del backends, replace_old
        self._refitter.refit(refits)

    def close(self) -> None:
        """Free code and weights; every context must be closed."""
        self.pools.close()
        self._refitter.close()
        self._context.close()


class CudaBackend:
    """A program loaded on a GPU.

    ``inputs`` and ``outputs`` are numpy views of page-locked memory; `run` uploads the inputs, replays the graph and
    downloads the outputs. `replay` uses the inputs on the device. Programs of one ``working`` memory run one at a time.
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
            self._state = plan.state
            self._context = Context(device)
            owned.callback(self._context.close)
            self._device = device
            self._load(program, resident, working, poison=poison)
            self._owned = owned.pop_all()

    def _load(self, program: Program, resident: CudaResident, working: CudaWorking, *, poison: bool) -> None:
        context = self._context
        self._stream = working.stream
        self._in_flight = working.in_flight
        given = {**resident.weights, **working.bases}
        self.memory: DeviceMemory = DeviceMemory(context, program, given, poison=poison)
        self._own = self.memory
        self._staged_inputs = Staging(context, program.inputs, self.memory)
        self._staged_outputs = Staging(context, program.outputs, self.memory)
        self.inputs: tuple[np.ndarray, ...] = self._staged_inputs.views
        self.outputs: tuple[np.ndarray, ...] = self._staged_outputs.views
        self._inlet = Inlet(context, program.inputs, self.memory, self._staged_inputs, resident.gathers)
        self._outlet = Outlet(program.outputs, self.memory, self._staged_outputs, resident.gathers, resident.pools)
        self._signal = Signal(context, len(program.inputs))
        self._program = program
        self.functions: Sequence[Handle] = resident.functions
        self._bound: set[str] = set()
        self._direct: dict[tuple[Shapes, Shapes] | None, DeviceDirect] = {}
        self._launch_graph = driver.function("cuGraphLaunch")
        self._synchronize = driver.function("cuStreamSynchronize")
        self._recording: Handle | None = None
        self._scope, self._executable, self._calls = self._build(self.memory)

    def _build(self, memory: DeviceMemory) -> tuple[ExitStack, Handle, WholeCalls]:
        """The graph over ``memory`` and that of calls, and the scope that frees them."""
        with ExitStack() as scope:
            context = Context(self._device)
            scope.callback(context.close)
            executable = context.acquire(graph.instantiated(self._adding(memory)), "cuGraphExecDestroy")
            call("cuGraphUpload", executable, self._stream)
            self._synchronize(self._stream)
            calls = WholeCalls(
                self._program, self._state, self.functions, memory, self._inlet, self._outlet, self._signal
            )
            scope.callback(calls.close)
            return scope.pop_all(), executable, calls

    def _adding(self, memory: DeviceMemory) -> Callable[[Handle], graph.Ends]:
        return partial(graph.add_program, program=self._program, functions=self.functions, memory=memory)

    def direct(self, turn: Turn, shapes: tuple[Shapes, Shapes] | None) -> DeviceDirect:
        """The usual call as one function, in the turn of a context; see `nimblert.calls.backend.Backend`."""
        found = self._direct.get(shapes)
        if found is None or not found.is_for(turn):
            inputs, outputs = shapes or (None, None)
            made = DeviceDirect(turn, self._program, self, self._device, inputs, self._outlet_for(outputs))
            found = remembered(self._direct, shapes, made)
        return found

    def _outlet_for(self, shapes: Shapes | None) -> Outlet:
        return self._outlet if shapes is None else self._outlet.cropped(shapes)

    def bind(self, tensor: Tensor, array: DeviceArray | None, commit: Commit) -> None:
        """Use an array of the caller in place of an input or output; None restores the program's own memory."""
        self._context.make_current()
        self._in_flight.wait()
        address = self._own.address(tensor.pointer) if array is None else array.address
        memory = self.memory.rebased({(tensor.pointer.region, tensor.pointer.index): address})
        built, old = self._build(memory), self._scope

        def change() -> None:
            self._recording = None
            self._scope, self._executable, self._calls = built
            self.memory = memory
            for mine in (self._staged_inputs, self._staged_outputs, self._inlet, self._outlet):
                mine.moved(memory)
            (self._bound.discard if array is None else self._bound.add)(tensor.name)

        try:
            commit(change)
        finally:
            (old if self._scope is built[0] else built[0]).close()

    def address(self, tensor: Tensor) -> int:
        """The device address of the memory for an input or output, which may be bound."""
        return self.memory.address(tensor.pointer)

    def own_address(self, tensor: Tensor) -> int:
        """The device address of the program's own memory for an input or output."""
        return self._own.address(tensor.pointer)

    def place(self, arrays: Sequence[np.ndarray | DeviceArray]) -> None:
        """Copy these inputs to the device, and wait."""
        self._begin(self._stream)
        self._in_flight.wait()
        try:
            self._put(arrays, self._stream, in_place=True)
        finally:
            self._synchronize(self._stream)

    @property
    def movers(self) -> Sequence[Mapping[bytes, Mover]]:
        """For each input its movers of device arrays, by `dlpack.raw_numbers` of shape and strides, as far as known."""
        return self._inlet.movers

    def call_from_host(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray | DeviceOutput]:
        """Run on inputs on the host, and return new outputs there, by name."""
        stream = self._stream
        self._context.make_current()
        if self._in_flight.stream is not None:
            self._in_flight.wait()  # page-locked memory may still be read by the run before
        lent = self._outlet.lend_host()
        try:
            try:
                found, whole = self._calls.from_host(arrays, lent)
                if found is None:
                    for index, array in enumerate(arrays):
                        self._inlet.put(index, array, stream, in_place=True)
                    self._launch_graph(self._executable, stream)
                else:
                    staged = found.staged
                    staged.words[:] = 0
                    rest = staged.rest
                    if rest:
                        staged.fill(arrays)
                    self._launch_graph(found.executable, stream)
                    if not rest:
                        staged.fill(arrays)
                if not whole:
                    self._outlet.download(lent, stream)
                results = self._outlet.arrays(lent)
            finally:
                self._end(stream)
            if found is not None and found.staged.came_late():
                self._launch_graph(found.executable, stream)
                if not whole:
                    self._outlet.download(lent, stream)
                self._synchronize(stream)
        except BaseException:
            driver.bindings().cuStreamSynchronize(stream)  # a signal handler's exception may have come before it
            lent.clear()  # now: the traceback may keep it for long
            raise
        self._outlet.copy_small(results)
        return results

    def call_from_device(self, arrays: Given, stream: int, outlet: Outlet) -> dict[str, np.ndarray | DeviceOutput]:
        """Run on inputs on the device, and return new outputs there, by name; ``outlet`` crops where movers pad."""
        self._context.make_current()  # `_begin` in place: a function more is a microsecond
        if self._in_flight.stream is not None:
            self._in_flight.precede(stream)
        lent = outlet.lend_device(stream)
        try:
            try:
                found, whole = self._calls.from_device(arrays, lent, outlet)
                if found is None:
                    self._inlet.move(arrays, stream)
                self._launch_graph(self._executable if found is None else found.executable, stream)
                if not whole:
                    outlet.copy(lent, stream)
                return outlet.on_device(lent)
            finally:
                self._end(stream)
        except BaseException:
            driver.bindings().cuStreamSynchronize(stream)
            lent.clear()
            raise

    def _end(self, stream: int) -> None:
        self._synchronize(stream)
        if self._in_flight.stream is not None:
            self._in_flight.ended()

    def _begin(self, stream: int) -> None:
        self._context.make_current()
        if self._in_flight.stream is not None:
            self._in_flight.precede(stream)

    def _put(self, arrays: Sequence[np.ndarray | DeviceArray], stream: int, *, in_place: bool) -> bool:
        """Enqueue the copies of the inputs, see `Inlet.put`; whether any is on the device."""
        on_device = False
        for index, (tensor, array) in enumerate(zip(self._program.inputs, arrays, strict=True)):
            if isinstance(array, DeviceArray):
                on_device = True
                if tensor.name in self._bound:
                    continue
            else:
                self._in_flight.wait()  # page-locked memory may still be read by the run before
            self._inlet.put(index, array, stream, in_place=in_place)
        return on_device

    def call(
        self,
        arrays: Sequence[np.ndarray | DeviceArray],
        out: Mapping[str, np.ndarray | DeviceArray],
        *,
        reuse_outputs: bool,
        shapes: Shapes | None = None,
        stream: int | None = None,
    ) -> dict[str, np.ndarray | DeviceOutput]:
        """Run on these inputs, and return the outputs by name, except bound ones and those written into ``out``.

        Inputs of smaller shapes are padded, and ``shapes`` crops the outputs. Without ``stream`` this waits, and
        outputs are on the device if any input is. With ``stream`` it does not wait, and outputs are on the device.
        Raises InputError.
        """
        if stream is not None and any(isinstance(mine, np.ndarray) for mine in out.values()):
            raise InputError("out: an array of the host is written when the run has ended: leave the stream out")
        used = self._stream if stream is None else stream
        outlet = self._outlet_for(shapes)
        self._begin(used)
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        try:
            on_device = self._put(arrays, used, in_place=stream is None)
            self._launch_graph(self._executable, used)
            results: dict[str, np.ndarray | DeviceOutput] = {}
            for index, tensor in enumerate(self._program.outputs):
                mine = out.get(tensor.name)
                if isinstance(mine, DeviceArray):
                    outlet.to_array(index, mine, used)
                elif mine is not None:
                    copies.append((mine, outlet.to_host(index, used, reuse=True)))
                elif tensor.name in self._bound:
                    continue
                elif on_device or stream is not None:
                    precede = None if stream is None else self._in_flight.precede_reader
                    results[tensor.name] = outlet.to_device(index, used, reuse=reuse_outputs, precede=precede)
                else:
                    results[tensor.name] = outlet.to_host(index, used, reuse=reuse_outputs)
        finally:  # whatever happened, the arrays are the caller's again
            if stream is None:
                self._end(used)
            else:
                self._in_flight.enqueued(used, (arrays, out))
        for mine, view in copies:
            np.copyto(mine, view)
        return results

    def empty(self, tensor: Tensor, *, on_device: bool, stream: int | None) -> np.ndarray | DeviceArray:
        """A new array for an output, for a run on ``stream``, by default the context's."""
        if not on_device:
            return np.empty(tensor.shape, numpy_dtype(tensor.dtype))
        self._context.make_current()
        if stream is None:
            return self._outlet.empty(tensor, self._stream, None)
        return self._outlet.empty(tensor, stream, self._in_flight.precede_reader)

    def run(self) -> None:
        """Upload `inputs`, replay the graph, download `outputs`, and wait."""
        self._begin(self._stream)
        try:
            self._staged_inputs.to_device(self._stream)
            self._launch_graph(self._executable, self._stream)
            self._staged_outputs.to_host(self._stream)
        finally:
            self._end(self._stream)

    def replay(self) -> None:
        """Replay the graph on the inputs on the device, and wait."""
        self._begin(self._stream)
        try:
            self._launch_graph(self._executable, self._stream)
        finally:  # also where a signal handler's exception comes before it
            self._end(self._stream)

    def launch(self, stream: int | None) -> None:
        """Replay the graph on the inputs on the device, on ``stream`` or the context's, without waiting."""
        used = self._stream if stream is None else stream
        self._context.make_current()  # `_begin` in place, as above
        if self._in_flight.stream != used or used == PER_THREAD:
            self._in_flight.precede(used)
        try:
            self._launch_graph(self._recording or self._built_recording(), used)
        finally:  # as in `replay`
            if self._in_flight.is_shared:
                with self._in_flight.tracking:
                    self._in_flight.stream = used
            else:
                self._in_flight.stream = used

    def _built_recording(self) -> Handle:
        """The graph with a node that records the event of the work in flight, which saves the host a call."""
        recording = partial(graph.add_record, event=self._in_flight.event)
        made = Recipe(self._adding(self.memory), departures=[recording]).instantiated()
        self._scope.callback(driver.bindings().cuGraphExecDestroy, made)
        self._recording = made
        return made

    def synchronize(self) -> None:
        """Wait for all launches."""
        self._context.make_current()
        self._in_flight.wait()

    def steps(self) -> Generator[Work, None, None]:
        """Compute on the inputs on the device in issue order, and yield each launch, copy or fill when it is done.

        Each is a graph of one node, so that it runs as it does in the whole graph.
        """
        for command in self._work():
            self._begin(self._stream)  # the caller may have had another context since
            self._run_once(partial(graph.add_node, command=command, functions=self.functions, memory=self.memory))
            yield command

    def profile(self) -> list[int]:
        """Compute as `steps` does, and return the GPU nanoseconds of each launch, copy or fill.

        They are taken by events before and after the node, in the same graph, and include the time of the events.
        """
        self._begin(self._stream)
        with self._two_events() as (begin, end):
            return [self._time_alone(command, begin, end) for command in self._work()]

    @contextmanager
    def _two_events(self) -> Iterator[tuple[Handle, Handle]]:
        """Two events that tell the time between them, for the block."""
        with closing(Context(self._device)) as context:
            begin, end = (context.acquire(call("cuEventCreate", 0), "cuEventDestroy") for _ in range(2))
            yield begin, end

    def _time_alone(self, command: Work, begin: Handle, end: Handle) -> int:
        def add(single: Handle) -> None:
            first = graph.add_record(single, begin)
            node = graph.add_node(single, command, self.functions, self.memory)
            graph.add_edges(single, [first], [node])
            graph.add_edges(single, [node], [graph.add_record(single, end)])

        self._run_once(add)
        return round(float(call("cuEventElapsedTime", begin, end)) * 1e6)

    def _work(self) -> Iterator[Work]:
        """Launches, copies and fills, in issue order."""
        return (command for _, command in self._program.work)

    def _run_once(self, add: Callable[[Handle], object]) -> None:
        """Run the graph of the nodes that ``add`` adds to its end."""
        executable = graph.instantiated(add)
        try:
            try:
                self._launch_graph(executable, self._stream)
            finally:  # as in `replay`
                self._synchronize(self._stream)
        finally:
            release("cuGraphExecDestroy", executable)

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes of the program's device memory, as uint8."""
        host = np.empty(nbytes, np.uint8)
        if nbytes:
            self.synchronize()
            call("cuMemcpyDtoH", host.ctypes.data, self.memory.address(pointer), nbytes)
        return host

    def time(self, count: int) -> np.ndarray:
        """GPU time in microseconds of each of ``count`` replays, between two events."""
        self._begin(self._stream)
        times = np.empty(count)
        with self._two_events() as (begin, end):
            for i in range(count):
                call("cuEventRecord", begin, self._stream)
                self._launch_graph(self._executable, self._stream)
                call("cuEventRecord", end, self._stream)
                call("cuEventSynchronize", end)
                times[i] = call("cuEventElapsedTime", begin, end) * 1e3
        return times

    def close(self) -> None:
        """Wait for all launches, and free the graph, its memory, and everything that was made for it alone."""
        self._context.make_current()
        self._in_flight.close()
        self._scope.close()
        self._owned.close()
