"""Prepared calls: the transfers of arrays of some layouts, and the graph that runs the program between them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nimblert.arrays.device_arrays import DeviceOutput
from nimblert.arrays.dlpack import DeviceArray
from nimblert.calls.binding import VECTOR_NBYTES, fills_memory
from nimblert.calls.outputs import filled
from nimblert.cuda import driver
from nimblert.cuda.driver import Handle
from nimblert.cuda.program import GraphProgram
from nimblert.cuda.transfers import DeviceInput, HostInput, InputTransfer, OutputTransfers
from nimblert.errors import CudaError, InputError
from nimblert.plan import Program, Region, Tensor, pieces

if TYPE_CHECKING:
    from nimblert.calls.backend import RunAt

Outputs: TypeAlias = dict[str, np.ndarray | DeviceOutput]

_ENOUGH_ON_HOST, _ENOUGH_ON_DEVICE = 3, 16
"""Equal calls after which a graph of their own is made: that takes longer than it saves in one call."""

_GRAPH_NBYTES = 2 << 20
"""Host inputs of more bytes together are not uploaded by a graph."""

_MOST_GRAPHS, _MOST_SEEN = 4, 64
"""Of calls with arrays at other addresses."""


class PreparedCall:
    """Calls with inputs of these layouts.

    ``inputs`` are the transfers of the inputs, None for a bound one; ``outputs`` those of the outputs, cropped if the
    inputs are smaller than the program's. New outputs are on the GPU if any input is (``on_device``).
    """

    def __init__(
        self,
        backend: GraphProgram,
        inputs: Sequence[InputTransfer | None],
        outputs: OutputTransfers,
        *,
        on_device: bool,
    ) -> None:
        self.program = backend.program
        self.run_at: RunAt | None = None
        self._backend, self._inputs, self._outputs = backend, inputs, outputs
        self._on_device = on_device

    def run(self, arrays: Sequence[Any]) -> Outputs:
        """Run on arrays of these layouts, and return new outputs: on the device if any input is there."""
        return self.run_into(arrays, {}, reuse_outputs=False, stream=None)

    def run_into(
        self, arrays: Sequence[Any], out: Mapping[str, Any], *, reuse_outputs: bool, stream: int | None
    ) -> Outputs:
        """Run as `run` does, but write outputs in ``out`` there, and leave bound ones out.

        With ``reuse_outputs`` outputs are views of memory that the next run overwrites. With ``stream`` the call is
        enqueued there, and its outputs are on the device; where some are cropped, this waits. Raises InputError.
        """
        if stream is not None and any(isinstance(mine, np.ndarray) for mine in out.values()):
            raise InputError("out: an array of the host is written when the run has ended: leave the stream out")
        backend, outputs = self._backend, self._outputs
        used = backend.begin(stream)
        copies: dict[str, np.ndarray] = {}
        results: Outputs = {}
        try:
            self.enqueue_inputs(arrays, used, in_place=stream is None)
            backend.launch_program(used)
            for index, tensor in enumerate(self.program.outputs):
                mine = out.get(tensor.name)
                if isinstance(mine, DeviceArray):
                    outputs.to_array(index, mine, used)
                elif mine is not None:
                    copies[tensor.name] = outputs.staged(index, used)
                elif tensor.name in backend.bound:
                    continue
                elif self._on_device or stream is not None:
                    precede = None if stream is None else backend.in_flight.precede_reader
                    results[tensor.name] = outputs.to_device(index, used, reuse=reuse_outputs, precede=precede)
                else:
                    read = outputs.staged if reuse_outputs else outputs.to_host
                    results[tensor.name] = read(index, used)
        finally:  # whatever happened, the arrays are the caller's again
            backend.end(stream, (arrays, out))
        into = {name: out[name] for name in copies}
        if backend.crops is not None:
            if stream is not None:
                backend.synchronize_stream(used)
            sizes = backend.sizes
            into, copies, results = filled(into, sizes), filled(copies, sizes), filled(results, sizes)
        for name, view in copies.items():
            np.copyto(into[name], view)
        return results

    def enqueue_inputs(self, arrays: Sequence[Any], stream: Handle, *, in_place: bool = True) -> None:
        """Enqueue the transfers of the inputs; ``in_place`` is for a caller that waits for them."""
        for transfer, array in zip(self._inputs, arrays, strict=True):
            if isinstance(transfer, DeviceInput):
                transfer.enqueue(array.address, stream)
            elif transfer is not None:
                self._backend.in_flight.wait()  # the run before may still read page-locked memory
                transfer.enqueue(array, stream, self._backend.uploader, in_place=in_place)

    def close(self) -> None:
        """Free the graphs, and make no more."""


class HostCall(PreparedCall):
    """Calls with host arrays. Those with small inputs get a graph that uploads them and downloads small outputs."""

    def __init__(self, backend: GraphProgram, inputs: Sequence[HostInput], outputs: OutputTransfers) -> None:
        super().__init__(backend, inputs, outputs, on_device=False)
        self._fills = [transfer.fill for transfer in inputs]
        is_small = sum(transfer.nbytes for transfer in inputs) <= _GRAPH_NBYTES
        self._may_be_whole = is_small and not any(transfer.is_large for transfer in inputs)
        self._count = 0
        self._graph: Handle | None = None

    def run(self, arrays: Sequence[np.ndarray]) -> Outputs:
        """Run as `PreparedCall.run` says."""
        backend, outputs = self._backend, self._outputs
        if self._graph is None and self._may_be_whole:
            self._count += 1
            if self._count == _ENOUGH_ON_HOST:
                self._graph = self._make()
        stream = backend.begin(None)
        # The previous run may still read page-locked memory.
        backend.in_flight.wait()
        try:
            if self._graph is None:
                self.enqueue_inputs(arrays, stream)
                backend.launch_program(stream)
                outputs.enqueue_small(stream)
            else:
                for fill, array in zip(self._fills, arrays, strict=True):
                    fill(array)
                backend.launch(self._graph, stream)
            large = outputs.enqueue_large(stream)
        finally:
            backend.end(None)
        results = outputs.on_host(large)
        return results if backend.crops is None else filled(results, backend.sizes)

    def _make(self) -> Handle | None:
        """Return the graph; None where the driver has no memory for it."""
        kernels = self._backend.kernels
        arrivals = [transfer.steps(kernels) for transfer in self._inputs if isinstance(transfer, HostInput)]
        try:
            return self._backend.instantiate(self._backend.memory, arrivals, self._outputs.small_downloads())
        except CudaError:
            self._may_be_whole = False
            return None

    def close(self) -> None:
        """Close as `PreparedCall.close` says."""
        self._may_be_whole = False
        if self._graph is not None:
            driver.release("cuGraphExecDestroy", self._graph)
            self._graph = None


class DeviceCall(PreparedCall):
    """Calls with arrays on the GPU. Repeated ones get a graph of the program over the caller's arrays."""

    def __init__(self, backend: GraphProgram, inputs: Sequence[DeviceInput], outputs: OutputTransfers) -> None:
        super().__init__(backend, inputs, outputs, on_device=True)
        # A complex array may be a conjugate view.
        if not any(tensor.dtype.startswith("complex") for tensor in self.program.inputs):
            self.run_at = self._run_at
        self._device_inputs = inputs
        self._seen: Counter[object] = Counter()
        self._graphs: dict[object, Handle] = {}
        self._patience = 1.0

    def run(self, arrays: Sequence[DeviceArray]) -> Outputs:
        """Run as `PreparedCall.run` says."""
        return self._run_at(tuple([array.address for array in arrays]), None)

    def _run_at(self, addresses: tuple[int, ...], stream: int | None) -> Outputs:
        """Run on arrays at these addresses, which are ready for work on ``stream``, and wait."""
        backend, outputs = self._backend, self._outputs
        used = backend.begin(stream)
        try:
            blocks = outputs.take_blocks(used)
            key = addresses, tuple([None if block is None else block.address for block in blocks])
            graph = self._graphs.get(key) or self._missed(*key)
            if graph is None:
                for transfer, address in zip(self._device_inputs, addresses, strict=True):
                    transfer.enqueue(address, used)
                backend.launch_program(used)
                outputs.enqueue_copies(blocks, used)
            else:
                backend.launch(graph, used)
        finally:
            backend.synchronize_stream(used)
            if backend.in_flight.stream is not None:
                backend.in_flight.ended()
        results = outputs.in_blocks(blocks)
        return results if backend.crops is None else filled(results, backend.sizes)

    def _missed(self, addresses: tuple[int, ...], to: tuple[int | None, ...]) -> Handle | None:
        """Count a call at these addresses, and make its graph after enough of them.

        Where callers use more addresses than graphs are kept for, later graphs take ever more calls.
        """
        key = addresses, to
        self._seen[key] += 1
        if self._seen[key] < _ENOUGH_ON_DEVICE * self._patience:
            if len(self._seen) > _MOST_SEEN:
                self._seen.clear()
            return None
        del self._seen[key]
        if len(self._graphs) == _MOST_GRAPHS:
            self._patience *= 4
            driver.release("cuGraphExecDestroy", self._graphs.pop(next(iter(self._graphs))))
        try:
            self._graphs[key] = self._make(addresses, to)
        except CudaError:
            self._patience *= 4
        return self._graphs.get(key)

    def _make(self, addresses: tuple[int, ...], to: tuple[int | None, ...]) -> Handle:
        """Return the graph of the program over these arrays and blocks, where its kernels may use them.

        Inputs are also copied to the program's own memory, for `replay`. One that is the program's own memory for an
        output, which a call may have returned, is copied before.
        """
        backend, outputs = self._backend, self._outputs
        arrivals, beside, elsewhere = [], [], {}
        movable_inputs, movable_outputs = movable(self.program)
        own = [(backend.memory.address(tensor.pointer), tensor.span_nbytes) for tensor in self.program.outputs]
        for tensor, transfer, address in zip(self.program.inputs, self._device_inputs, addresses, strict=True):
            is_own = any(at < address + tensor.span_nbytes and address < at + nbytes for at, nbytes in own)
            steps = transfer.steps(address)
            is_usable = transfer.mover.is_copy and address % VECTOR_NBYTES == 0 and not is_own
            if tensor.name in movable_inputs and is_usable:
                elsewhere[Region.INPUT, tensor.pointer.index] = address
                beside += steps
            else:
                arrivals.append(steps)
        copied: list[int | None] = list(to)
        for index, (tensor, head) in enumerate(zip(self.program.outputs, outputs.tensors, strict=True)):
            block = to[index]
            if block is not None and tensor.name in movable_outputs and head.shape == tensor.shape:
                elsewhere[Region.OUTPUT, tensor.pointer.index] = block
                copied[index] = None
        departures = outputs.copy_steps(copied)
        return backend.instantiate(backend.memory.rebased(elsewhere), arrivals, departures, beside)

    def close(self) -> None:
        """Close as `PreparedCall.close` says."""
        self._patience = inf
        while self._graphs:
            driver.release("cuGraphExecDestroy", self._graphs.popitem()[1])


def movable(program: Program) -> tuple[frozenset[str], frozenset[str]]:
    """Return the inputs and the outputs, by name, for which kernels may use an array of the caller instead.

    An input that a kernel also writes is not among them: the array is the caller's.
    """
    users = Counter((t.pointer.region, t.pointer.index) for t in (*program.inputs, *program.outputs))
    accesses = (access for _, command in program.work for access in pieces.writes(command))
    written = {(access.pointer.region, access.pointer.index) for access in accesses}

    def stand_alone(tensors: Sequence[Tensor], region: Region) -> Iterator[str]:
        for tensor in tensors:
            place = tensor.pointer.region, tensor.pointer.index
            is_read_only = region is Region.OUTPUT or place not in written
            if place[0] is region and users[place] == 1 and is_read_only and fills_memory(program, tensor):
                yield tensor.name

    return (
        frozenset(stand_alone(program.inputs, Region.INPUT)),
        frozenset(stand_alone(program.outputs, Region.OUTPUT)),
    )
