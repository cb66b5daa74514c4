"""A PyTorch model as an ONNX file, through torch.onnx.export, for the CPU target."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from nimblec.base.errors import CompileError, TraceError, UnsupportedModelError
from nimblec.onnx_export.exporting import exporting_onnx
from nimblec.onnx_export.model_state import ModelState
from nimblec.onnx_export.sources import keep_sources
from nimblec.onnx_export.stateless import StateFoundError, stateless
from nimblec.onnx_export.translations import COMMON, TRANSLATIONS
from nimblec.onnx_export.weights import kept_weights, name_ends, optimize_around_weights, register_constants
from nimblec.pytorch.borrowed import borrowed
from nimblec.pytorch.export_errors import exporting
from nimblec.pytorch.model import ModelCall, TorchModel, as_module, place_call
from nimblec.pytorch.objects import refuse_script_within
from nimblec.pytorch.outputs import missing_outputs, name_outputs
from nimblec.pytorch.repeatable import compared, run_twice
from nimblec.pytorch.state import (
    StateTensor,
    WithState,
    declared_writes,
    find_state,
    named_tensors,
    refuse_autocast,
    refuse_shared_buffers,
    storages,
    written_by,
)
from nimblec.pytorch.tensors import as_array, range_of
from nimblert.cpu.onnx_session import onnxruntime, runtime_errors, session_options

_ROUNDING = 1e-4
"""Relative to the largest magnitude of an output: what kernels of two libraries round differently in a network."""
_HALF_ULPS = 8
"""The same of a model with half precision, in units of its last place."""
_MAGNIFIED = 0.01
"""An output of which rounding of the inputs changes so much is not compared."""
_NUDGES = (4, -4)
"""Changes of the inputs, in units of rounding: a number at the bend of a ReLU crosses it by one or the other."""
_OF_ROUNDING = 16
"""Rounding within a model may change an output by this many times what rounding of its inputs does."""

_OVERLAPPING = "expected compiled_fn to be GraphModule"
"""What torch says of a graph that writes a tensor whose memory another tensor of the module shares."""

_BEFORE, _AFTER = "state before: ", "state after: "
"""Prefixes of the names of state tensors in the file, which no input or output of the module has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """An ONNX file, those of its inputs and outputs that are state, and notes for the user.

    ``weights`` are the names of parameters and buffers that it holds and reads as the module does. ``examples`` are
    arrays for its inputs, by name, and ``ranges`` those of integers. A file that ``is_dynamic`` leaves sizes open.
    """

    path: Path
    state: tuple[ModelState, ...]
    weights: frozenset[str]
    examples: Mapping[str, np.ndarray]
    ranges: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...]
    is_dynamic: bool = False


def export(
    calls: Mapping[str, ModelCall], folder: Path, *, refittable: bool = False, max_error: float | None = None
) -> dict[str, ExportedModel]:
    """Export each entry of a model to an ONNX file in ``folder``; ``refittable`` leaves all parameters as they are.

    ``max_error`` is the largest difference of the file's outputs from PyTorch's, as `nimblec.compile` takes it.

    The parameters and buffers that runs of any entry write are state of all that have them. The modules are
    not modified. Raises ArgumentError for TorchScript, TraceError if a model cannot be run or torch.onnx.export refuses
    it, UnsupportedModelError if its runs differ, CompileError if ONNX Runtime's results differ from PyTorch's.
    """
    for call in calls.values():
        refuse_script_within(call.module)
        refuse_autocast(
            call.name,
            call.module,
            "whose mix of types ONNX Runtime does not support on the CPU: leave it out, or compile for --target cuda",
        )
    exported: dict[str, ExportedModel] = {}
    paths = {entry: folder / str(number) / "model.onnx" for number, entry in enumerate(calls)}
    held = {entry: storages(call.module) for entry, call in calls.items()}
    written: dict[str, Sequence[str]]
    written = {entry: names for entry, call in calls.items() if (names := declared_writes(call.module))}
    for entry, call in calls.items():
        paths[entry].parent.mkdir()
        known = {held[other][name] for other, names in written.items() for name in names}
        try:
            if known.isdisjoint(held[entry].values()):
                exported[entry] = _export(call, paths[entry], refittable=refittable, max_error=max_error)
                written[entry] = ()
            else:  # a file without the state would be useless
                written[entry] = _written(call)
        except StateFoundError as exc:
            written[entry] = exc.names
        except TraceError as exc:
            if _OVERLAPPING in str(exc):
                refuse_shared_buffers(call.name, call.module)
            raise
    for entry, state in find_state(calls, written).items():
        if state:
            exported[entry] = _export_with_state(
                calls[entry], state, paths[entry], refittable=refittable, max_error=max_error
            )
    return {entry: exported[entry] for entry in calls}


def _written(call: ModelCall) -> Sequence[str]:
    """Return the parameters and buffers that runs of a model write, once two runs were found to agree."""
    with borrowed(call.module) as originals:
        model = place_call(call, device="cpu")
        run_twice(call.name, model, originals)
        if declared := declared_writes(call.module):
            return declared
        with exporting(call.name, "torch.export"):
            program = torch.export.export(as_module(model.module), model.args, model.kwargs, strict=False)
        return written_by(call.name, program)


def _export(call: ModelCall, path: Path, *, refittable: bool, max_error: float | None) -> ExportedModel:
    """Return a model exported without state; raises StateFoundError, before ONNX is made, if its runs write any."""
    with borrowed(call.module) as originals:
        model = place_call(call, device="cpu")
        result = run_twice(call.name, model, originals)
        outputs = name_outputs(result)
        _refuse_shared_names(call, outputs)
        notes = (*model.notes, *missing_outputs(result), *_complex(model.inputs, outputs))
        # Without the empty dict, the exporter takes a trailing dict for keyword arguments.
        args = model.args if model.kwargs else (*model.args, {})
        with stateless():
            program = _onnx_program(call.name, as_module(model.module), args, model.kwargs, refittable=refittable)
        name_ends(program, _names(model), [name for name, _ in outputs])
        program.save(path, external_data=True)
        notes += accuracy(call.name, program, model, outputs, max_error=max_error)
    weights = frozenset(kept_weights(program))
    return ExportedModel(path=path, state=(), weights=weights, notes=notes, **examples_of(model.inputs))


def _refuse_shared_names(call: ModelCall, outputs: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise UnsupportedModelError for an output that is called as an input: a value of an ONNX file has one name."""
    inputs = {name for name, _ in call.inputs}
    for name, _ in outputs:
        if name in inputs:
            raise UnsupportedModelError(
                f"{call.name}: output {name!r} is called as an input is: return it by another name"
            )


def _export_with_state(
    call: ModelCall, state: Sequence[StateTensor], path: Path, *, refittable: bool, max_error: float | None
) -> ExportedModel:
    """Return a model exported as a function of its state as well."""
    with borrowed(call.module):
        model = place_call(call, device="cpu")
        tensors = named_tensors(model.module)
        held = tuple(tensors[each.name].detach().clone() for each in state)
        module = WithState(model.module, state)
        args = ((model.args, model.kwargs), held)
        with torch.no_grad():
            result, after = module(*args)
        written = [tensor.name for tensor in state if tensor.is_written]
        outputs = [*name_outputs(result), *zip((_AFTER + name for name in written), after, strict=True)]
        inputs = [*_names(model), *(_BEFORE + tensor.name for tensor in state)]
        program = _onnx_program(call.name, module, args, {}, refittable=refittable, translations=TRANSLATIONS)
        weights = frozenset(name.removeprefix("module.") for name in kept_weights(program))
        for initializer in tuple(program.model.graph.initializers.values()):
            initializer.name = (initializer.name or "").removeprefix("module.")
        name_ends(program, inputs, [name for name, _ in outputs])
        program.save(path, external_data=True)
        notes = (*model.notes, *missing_outputs(result), *_complex(model.inputs, name_outputs(result)))
        with_state = replace(model, module=_flattened(module), args=args, kwargs={})
        notes += accuracy(call.name, program, with_state, outputs, max_error=max_error)
    described = tuple(
        ModelState(
            name=tensor.name,
            input=_BEFORE + tensor.name,
            output=_AFTER + tensor.name if tensor.is_written else "",
            data=as_array(_parts(value) if value.is_complex() else value),
            storage=tensor.storage,
        )
        for tensor, value in zip(state, held, strict=True)
    )
    return ExportedModel(path=path, state=described, weights=weights, notes=notes, **examples_of(model.inputs))


def _flattened(module: WithState) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that returns the outputs of a module, then the state that it leaves."""

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        result, after = module(*args)
        return (*(tensor for _, tensor in name_outputs(result)), *after)

    return run


def _names(model: TorchModel) -> list[str]:
    return [name for name, _ in model.inputs]


def _onnx_program(
    name: str,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    refittable: bool,
    translations: Mapping[Any, Any] = COMMON,
) -> torch.onnx.ONNXProgram:
    """Return a module in ONNX.

    torch.export may choose another attention kernel than the module ran, whose result has another layout, and refuse
    the view that follows. Then all attention uses the math backend, which has only one layout.
    """

    def exported() -> torch.onnx.ONNXProgram:
        with exporting_onnx(name):
            program = torch.onnx.export(
                module,
                args,
                kwargs=kwargs,
                dynamo=True,
                verbose=False,
                custom_translation_table=dict(translations),
                optimize=not refittable,
            )
            assert program is not None
            if refittable:
                optimize_around_weights(program)
            register_constants(program)
            keep_sources(program)
        return program

    try:
        return exported()
    except TraceError:
        # The cache would give attention its former layout.
        FakeTensorMode.cache_clear()
        with suppress(TraceError), sdpa_kernel(SDPBackend.MATH):
            return exported()
        raise


def examples_of(inputs: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the ``examples`` of an `ExportedModel`, and their ``ranges``."""
    arrays = {name: as_array(_parts(tensor) if tensor.is_complex() else tensor) for name, tensor in inputs}
    found = ((name, range_of(name, tensor)) for name, tensor in inputs)
    return {"examples": arrays, "ranges": {name: ends for name, ends in found if ends is not None}}


def accuracy(
    name: str,
    program: torch.onnx.ONNXProgram,
    model: TorchModel,
    outputs: Sequence[tuple[str, torch.Tensor]],
    *,
    max_error: float | None,
) -> tuple[str, ...]:
    """Return a note of how far ONNX Runtime's outputs are from PyTorch's; none where it cannot run the file.

    ``outputs`` are those of ``model``. Raises CompileError where the file computes something else, or where floats
    differ by more than ``max_error`` of an output's largest magnitude.

    A model with an empty tensor is not run, as kernels of ONNX Runtime may end the process before the rules of a plan
    refuse them; nor one with an output of uint64, which torch does not take from ONNX Runtime.
    """
    made = [value for node in program.model.graph for value in node.outputs]
    graph = program.model.graph
    has_empty = any(value.shape is not None and 0 in value.shape for value in (*graph.inputs, *made))
    if has_empty or any(value.dtype is not None and value.dtype.name == "UINT64" for value in graph.outputs):
        return ()
    halves = {"FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}
    used = {value.dtype.name for value in made if value.dtype is not None}
    bound = max([_ROUNDING, *(_HALF_ULPS * torch.finfo(halves[dtype]).eps for dtype in halves.keys() & used)])
    try:
        program.initialize_inference_session(_session)
        found = program(*model.args, **model.kwargs)
    except runtime_errors():
        # A node that ONNX Runtime cannot run is reported later.
        return ()
    notes: list[str] = []
    errors: dict[str, float] = {}
    nudged = cache(partial(_nudged_outputs, model))
    for i, ((output, wanted), got) in enumerate(zip(outputs, found, strict=True)):
        numbers = _parts(wanted) if wanted.is_complex() else wanted
        if got.dtype != numbers.dtype:
            here, there = (str(tensor.dtype).removeprefix("torch.") for tensor in (got, numbers))
            notes.append(f"{name}: output {output!r} is {here}, PyTorch's is {there}")
        differs = compared(numbers, got)
        moved = [] if differs.within(bound) else [compared(wanted, close[i]) for close in nudged()]
        most = max((other.relative for other in moved), default=0.0)
        # Anything smaller is rounding, such as the gradient of a bias before a norm.
        if differs.exact or most <= _MAGNIFIED:
            changes = differs.exact and any(other.absolute for other in moved)
            if not changes and not differs.within(max(bound, _OF_ROUNDING * most)):
                raise CompileError(
                    f"{name}: output {output!r} of the ONNX file that torch.onnx.export made differs from what "
                    f"PyTorch computes ({differs}): compute it by other operators"
                )
            errors[output] = 0.0 if differs.exact else differs.relative
    return (_accuracy_note(name, errors, max_error), *notes)


def _accuracy_note(name: str, errors: Mapping[str, float], max_error: float | None) -> str:
    """Return a sentence on the largest difference, by output; raises CompileError for one above ``max_error``."""
    largest = max(errors, key=lambda output: errors[output], default="")
    if not errors.get(largest):
        return f"{name}: ONNX Runtime's outputs equal PyTorch's"
    most = f"differs from PyTorch by at most {errors[largest]:.2g} of the largest magnitude of an output ({largest!r})"
    if max_error is not None and errors[largest] > max_error:
        raise CompileError(f"{name}: ONNX Runtime {most}, and --max-error allows {max_error:.2g}")
    return f"{name}: ONNX Runtime {most}"


def _nudged_outputs(model: TorchModel) -> list[list[torch.Tensor]]:
    """Return PyTorch's outputs in runs on inputs that differ by rounding."""
    found = []
    for by in _NUDGES:
        args, kwargs = pytree.tree_map_only(torch.Tensor, partial(_nudged, by=by), (model.args, model.kwargs))
        with torch.no_grad():
            result = model.module(*args, **kwargs)
        found.append([tensor for _, tensor in name_outputs(result)])
    return found


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj())


def _complex(
    inputs: Sequence[tuple[str, torch.Tensor]], outputs: Sequence[tuple[str, torch.Tensor]]
) -> tuple[str, ...]:
    """Return a note for each complex tensor, of which ONNX Runtime has none."""
    listed = [("input", *each) for each in inputs] + [("output", *each) for each in outputs]
    return tuple(
        f"{kind} {name!r} is complex: in the plan a last axis of 2 has its real and imaginary parts, as "
        "torch.view_as_real gives them"
        for kind, name, tensor in listed
        if tensor.is_complex()
    )


def _nudged(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Return the tensor with changes ``by`` a few units of rounding, in turns down and up."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.arange(tensor.numel()).remainder(2).mul(2).sub(1).reshape(tensor.shape)
    return (tensor * (1 + by * torch.finfo(tensor.dtype).eps * signs)).to(tensor.dtype)


def _session(model: str | bytes) -> Any:
    """Return a session without ONNX Runtime's optimiser, whose faults are not the file's."""
    options = session_options()
    options.graph_optimization_level = onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime().InferenceSession(model, options, providers=["CPUExecutionProvider"])
