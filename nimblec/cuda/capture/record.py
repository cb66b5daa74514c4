"""Record a model on the GPU: two captures become its graph, plain runs its expected results."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nimblec.base.errors import TraceError, UnsupportedModelError, user_code
from nimblec.base.ir import CropWork, Graph, TensorView
from nimblec.cuda.capture.allocator import BumpAllocator, Shift, Zone
from nimblec.cuda.capture.buffers import Allocation, BufferTable, Span
from nimblec.cuda.capture.capture import (
    ByteRange,
    Capture,
    ValueDependentError,
    capture,
    pretend_capturing,
)
from nimblec.cuda.capture.cupti import CodeRecorder
from nimblec.cuda.capture.earlier import EarlierMemory
from nimblec.cuda.capture.foreign import ForeignMemory
from nimblec.cuda.capture.generator import GeneratorError, GeneratorMemory, find_memory
from nimblec.cuda.capture.modules import CodeIndex
from nimblec.cuda.capture.nodes import forget_functions
from nimblec.cuda.capture.relocation import Relocator
from nimblec.cuda.capture.residents import (
    Resident,
    contents,
    find_residents,
    kept_by_recordings,
    move_into,
    note_mutations,
    only_in,
    storages,
)
from nimblec.cuda.capture.tasks import build_graph
from nimblec.pytorch.model import TorchModel, uncompiled
from nimblec.pytorch.outputs import cut_outputs, name_outputs
from nimblec.pytorch.repeatable import refuse_differing
from nimblec.pytorch.source_tracker import SourceTracker
from nimblec.pytorch.state import generator_of, scratch_storages, settable_storages
from nimblec.pytorch.tensors import DTYPE_NAMES, as_array, as_tensor, range_of
from nimblert.cuda.driver import call


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A model's graph and the capture it came from.

    ``addresses`` are those of the graph's buffers in that capture, all different, so that every
    intermediate result is still there after `replay`. ``cropped`` are those of `TorchModel`.
    """

    graph: Graph
    capture: Capture
    addresses: tuple[int, ...]
    residents: tuple[Resident, ...]
    inputs: tuple[tuple[str, torch.Tensor], ...]
    notes: tuple[str, ...]
    cropped: tuple[int, ...]

    def replay(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Replay the captured graph on these inputs, by name, with all else as before any run."""
        self.capture.zone.restore()
        given = {name: _like(tensor, inputs[name]) for name, tensor in self.inputs}
        for index, resident in enumerate(self.residents):
            source = given[resident.name] if resident.is_input else resident.pristine
            call("cuMemcpyDtoD", self.capture.zone.addresses[index], source.data_ptr(), resident.pristine.nbytes)
        self.capture.replay()

    def outputs(self) -> list[np.ndarray]:
        """Return the outputs of the last replay, in the model's order."""
        return _arrays(self.capture.result, self.cropped)


class Recorders:
    """The recorders of the models of this process; ``code`` and ``allocator`` must have been started before CUDA."""

    def __init__(self, code: CodeRecorder, allocator: BumpAllocator) -> None:
        self.code = code
        self.allocator = allocator
        self.loaded: frozenset[int] = frozenset()
        self._models: list[TorchModel] = []

    def begin(self, models: Iterable[TorchModel]) -> None:
        """Register the loaded models, before any of them runs: no tensor that exists now was made by a run."""
        self.loaded = storages()
        self.add(*models)

    def add(self, *models: TorchModel) -> None:
        """Register more models: recorders of other models leave out their weights and inputs, unless shared."""
        self._models += models

    def of(self, model: TorchModel) -> "ModelRecorder":
        """Return the recorder of a model. Raises CudaError if an earlier run was out of memory."""
        self.allocator.check()
        return ModelRecorder(model, self, self._models)


class ModelRecorder:
    """Records one model."""

    def __init__(self, model: TorchModel, shared: Recorders, others: Iterable[TorchModel]) -> None:
        self._model = model
        self._sources = SourceTracker(model.module)
        self._code = shared.code
        self._allocator = shared.allocator
        self._loaded = shared.loaded
        self._elsewhere = _elsewhere(model, tuple(others))
        self._residents = find_residents(model.module, model.inputs, self._elsewhere)
        self._generator = generator_of(model.module)
        self._tell_capturing = False
        self._notes: list[str] = []

    def refuse_hidden_state(self) -> None:
        """Run twice from equal memory: a difference means state that no plan can hold.

        Raises UnsupportedModelError for such state, TraceError if the model cannot run.
        """

        def run() -> list[tuple[str, torch.Tensor]]:
            outputs = [(name, tensor.cpu()) for name, tensor in name_outputs(self._run(self._model))]
            self._restore()
            return outputs

        name = type(uncompiled(self._model.module)).__name__
        refuse_differing(name, run(), run())

    def warm_up(self) -> None:
        """Run and capture, so that every library has chosen and loaded its kernels."""
        try:
            self._warm_up()
        except GeneratorError as exc:
            why = str(exc)
        else:
            return
        self._compute_random_numbers(why)

    def _warm_up(self) -> None:
        try:
            self._try_out()
        except ValueDependentError as exc:
            self._tell_capturing = True
            self._try_out()
            self._notes.append(f"the plan holds the path that the model takes under capture; on its other path, {exc}")
        self._restore()

    def _try_out(self) -> None:
        for _ in range(2):
            self._run(self._model)
        # The first runs may have made tensors and kept them: tables, or constants of torch.compile.
        known = {*self._elsewhere, *(r.storage.data_ptr() for r in self._residents)}
        self._residents += find_residents(self._model.module, self._model.inputs, known)
        # Torch's generator allocates its state at the first capture, and keeps it while a graph lives.
        self._generator_owner = self._capture(self._allocator.resident)

    def _refuse_made_state(self) -> None:
        for resident in self._residents:
            if resident.mutated and resident.storage._cdata not in self._loaded:
                raise UnsupportedModelError(
                    f"{resident.name} ({resident.dtype} {list(resident.shape)}) is made in the model's first run and "
                    "written by later ones, so that no run has a known start: make it in __init__"
                )

    def record(self) -> Recording:
        """Capture twice and compare; the memory of the captures is returned to the driver.

        If torch's generator is not found in its known form, the model computes its random numbers instead.
        """
        recording = self._with_its_generator()
        self._allocator.release()
        return recording

    def _with_its_generator(self) -> Recording:
        try:
            return self._record()
        except GeneratorError as exc:
            # The exception's traceback would keep the captures alive.
            why = str(exc)
        self._compute_random_numbers(why)
        return self._record()

    def _compute_random_numbers(self, why: str) -> None:
        """Leave torch's generator alone, and warm up again."""
        self._notes.append(f"random numbers are not those that PyTorch draws: {why}")
        self._model.module.draws = self._generator = None
        self._warm_up()

    def _record(self) -> Recording:
        forget_functions()
        self._allocator.release()
        first_zone, second_zone, shift = self._allocator.zone_pair()
        first = self._capture_in(first_zone)
        outputs = [(name, t, t.data_ptr()) for name, t in name_outputs(first.result)]
        cropped = self._model.cropped
        memory = self._generator_memory(first)
        if first.regions:
            # The captured graph makes one trip of each loop, and takes all branches.
            self._run(self._model)
        else:
            self._replay(first)
        note_mutations(first_zone, self._residents)
        self._refuse_made_state()
        # Only addresses of the first run are compared.
        self._allocator.release()
        second = self._capture_in(second_zone)
        if first_zone.sizes != second_zone.sizes:
            raise TraceError(
                f"two captures of the model allocated differently ({len(first_zone.sizes)} and "
                f"{len(second_zone.sizes)} times): it does not run the same way each time"
            )
        if memory != self._generator_memory(second):
            raise GeneratorError("two captures have torch's generator in different allocations")
        moved = {*kept_by_recordings(), *(r.storage.data_ptr() for r in self._residents)}
        earlier, foreign = EarlierMemory(self._allocator.zones, moved, self._elsewhere), ForeignMemory()
        module = self._model.module
        held = contents(self._residents, settable_storages(module), scratch_storages(module))
        buffers = BufferTable(first_zone, earlier, foreign, held)
        code = CodeIndex(self._code)
        graph = build_graph(
            first,
            second,
            code=code,
            relocator=Relocator(Shift(first_zone.addresses, shift), earlier, foreign, memory),
            buffers=buffers,
            inputs=self._input_views(first_zone, buffers),
            outputs=_output_views(outputs[: len(outputs) - len(cropped)], buffers),
            crops=[_crop(*crop, buffers) for crop in zip(cropped, outputs[len(outputs) - len(cropped) :], strict=True)],
        )
        if memory is not None and not buffers.has(Allocation(memory.state_seed)):
            raise GeneratorError("no captured kernel reads torch's generator")
        return Recording(
            graph=graph,
            capture=first,
            addresses=buffers.addresses(),
            residents=tuple(self._residents),
            inputs=self._model.inputs,
            notes=(*self._notes, *code.kept_whole),
            cropped=cropped,
        )

    def compute(self, inputs: Mapping[str, np.ndarray], model: TorchModel | None = None) -> list[np.ndarray]:
        """Return the framework's results for these inputs without capture, from the initial state.

        ``model`` is another model on the same input tensors, for comparison.
        """
        self._restore()
        with torch.no_grad():
            for name, tensor in self._model.inputs:
                tensor.copy_(as_tensor(inputs[name]))
        outputs = _arrays(self._run(model or self._model), self._model.cropped)
        self._restore()
        self._allocator.release()
        return outputs

    def _run(self, model: TorchModel) -> Any:
        with user_code("the model cannot be run"):
            with torch.no_grad(), pretend_capturing(self._tell_capturing):
                result = model.run(self._sources.set)
            torch.cuda.synchronize()
        self._allocator.check()
        return result

    def _capture(self, zone: Zone) -> Capture:
        drawing = nullcontext() if self._generator is None else self._generator.capturing()
        with (
            drawing as generator,
            self._allocator.allocating_in(zone),
            torch.no_grad(),
            pretend_capturing(self._tell_capturing),
        ):
            try:
                captured = capture(
                    self._model.run, zone, self._sources, compiled=self._model.is_compiled, generator=generator
                )
            except TraceError as exc:
                if generator is None or isinstance(exc, ValueDependentError):
                    raise
                raise GeneratorError(f"with its generator, {exc}") from exc
        self._allocator.check()
        return captured

    def _capture_in(self, zone: Zone) -> Capture:
        move_into(zone, self._residents, self._allocator)
        return self._capture(zone)

    def _generator_memory(self, captured: Capture) -> GeneratorMemory | None:
        """Return the memory of torch's generator in a capture not yet replayed, and of the state in its place."""
        if self._generator is None:
            return None
        place = self._generator.find()
        numbers = {resident.storage._cdata: number for number, resident in enumerate(self._residents)}
        state = [numbers.get(tensor.untyped_storage()._cdata) for tensor in (place.seed, place.offset)]
        torch.cuda.synchronize()
        return find_memory(captured.zone, captured.begun, state, _read)

    def _replay(self, captured: Capture) -> None:
        captured.graph.instantiate()
        captured.replay()
        if captured.generator is not None and self._generator is not None:
            used, expected = captured.generator.used, self._generator.used
            if used != expected:
                raise GeneratorError(f"torch's generator moves by {used} in a capture, by {expected} in a plain run")

    def _restore(self) -> None:
        for resident in self._residents:
            resident.restore()
        torch.cuda.synchronize()

    def _input_views(self, zone: Zone, buffers: BufferTable) -> tuple[TensorView, ...]:
        addresses = {r.storage.data_ptr(): zone.addresses[i] for i, r in enumerate(self._residents)}
        views = []
        for name, tensor in self._model.inputs:
            span = buffers.span(_first_element(tensor, addresses.get(tensor.untyped_storage().data_ptr(), 0)))
            views.append(_view(name, tensor, span, buffers, range_of(name, tensor)))
        return tuple(views)


def _elsewhere(model: TorchModel, others: Iterable[TorchModel]) -> frozenset[int]:
    """Return the addresses of weights and inputs of other models of this process that ``model`` does not share."""
    others = tuple(others)
    given, own = (
        {tensor.untyped_storage().data_ptr() for one in models for _, tensor in one.inputs}
        for models in (others, (model,))
    )
    return frozenset(only_in((other.module for other in others), model.module) | (given - own))


def _read(address: int, nbytes: int) -> bytes:
    host = np.empty(nbytes, np.uint8)
    call("cuMemcpyDtoH", host.ctypes.data, address, nbytes)
    return host.tobytes()


def _output_views(outputs: Iterable[tuple[str, torch.Tensor, int]], buffers: BufferTable) -> tuple[TensorView, ...]:
    return tuple(_view(n, t, buffers.output(_first_element(t, at)), buffers, None) for n, t, at in outputs)


def _arrays(result: Any, cropped: Sequence[int]) -> list[np.ndarray]:
    return cut_outputs([as_array(tensor) for _, tensor in name_outputs(result)], cropped)


def _crop(index: int, sizes: tuple[str, torch.Tensor, int], buffers: BufferTable) -> CropWork:
    name, tensor, address = sizes
    span = buffers.span(ByteRange(begin=address, end=address + tensor.nbytes))
    if span is None:
        raise UnsupportedModelError(f"{name!r} is on {tensor.device}: a CUDA plan holds tensors of its device")
    return CropWork(output=index, sizes=buffers.access(span))


def _first_element(tensor: torch.Tensor, address: int) -> ByteRange:
    return ByteRange(begin=address, end=address + tensor.element_size())


def _view(
    name: str, tensor: torch.Tensor, span: Span | None, buffers: BufferTable, sample_range: tuple[int, int] | None
) -> TensorView:
    if span is None:
        raise UnsupportedModelError(f"{name!r} is empty or on {tensor.device}: a CUDA plan holds tensors of its device")
    return TensorView(
        name=name,
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        buffer=buffers.number(span.allocation),
        offset=span.offset,
        sample_range=sample_range,
    )


def _like(tensor: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    """Return the array's values on the device, with the strides of ``tensor``."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(as_tensor(array))
