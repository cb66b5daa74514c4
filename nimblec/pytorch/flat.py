"""A model as a flat graph of ATen calls."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import torch
from torch.utils import _pytree as pytree

from nimblec.base.errors import TraceError, UnsupportedModelError
from nimblec.graph.outputs import output_strides
from nimblec.graph.state import StateSlot, set_slot, slots
from nimblec.pytorch.aten_graph import AtenProgram, StateWrittenError, record_exported, trace
from nimblec.pytorch.model import TorchModel
from nimblec.pytorch.recording import record
from nimblec.pytorch.state import (
    StateTensor,
    WithState,
    Writing,
    declared_writes,
    named_tensors,
    state_of,
    storages,
)


def flattened(model: TorchModel) -> TorchModel:
    """Return the model as a graph of pure ATen calls on its device.

    State that it or another entry writes is passed to the graph after the model's own arguments, and its
    new value is returned after the model's results (`nimblec.graph.state`). Raises TraceError or
    UnsupportedModelError where it cannot be such a graph: its code reads values of tensors, writes into its
    inputs, or draws random numbers.
    """
    if model.is_flat:
        return model
    given = tuple(t for t in pytree.tree_leaves((model.args, model.kwargs)) if isinstance(t, torch.Tensor))
    program, exported = None, model
    written = model.writes or declared_writes(model.module)
    if not written:
        try:
            program = _recorded(model) or trace(model.module, model.args, model.kwargs, device=device_of(model))
        except StateWrittenError as exc:
            written = exc.names
            if exc.exported is not None:
                exported = replace(model, module=exc.exported.module(check_guards=False))
    state = state_of(type(model.module).__name__, model.module, written, model.written_elsewhere)
    if program is None or state:
        return _with_state(model, given, state, exported)
    return replace(model, module=program.module, args=given, kwargs={}, nest=program.nest, is_flat=True)


def written_storages(model: TorchModel) -> frozenset[int]:
    """Return the storages of its own that a model writes; empty if it cannot be a graph."""
    if written := model.writes or declared_writes(model.module):
        held = storages(model.module)
        return frozenset(held[name] for name in written)
    try:
        flat = flattened(model)
    except (TraceError, UnsupportedModelError):
        return frozenset()
    found = slots(flat.module).values()
    return frozenset(slot.tensor.untyped_storage()._cdata for slot in found if slot.output is not None)


def _with_state(
    model: TorchModel, given: tuple[torch.Tensor, ...], state: tuple[StateTensor, ...], exported: TorchModel
) -> TorchModel:
    """Return the model as a graph with its state as arguments; ``exported`` is the same one, exported if it was."""
    tensors = named_tensors(model.module)
    kept = tuple(tensors[each.name] for each in state)
    program = _recorded(exported, [(tensor, each.is_written) for tensor, each in zip(kept, state, strict=True)])
    if program is None:
        traced = record if isinstance(model.module, Writing) and model.module.makes_aten_calls else trace
        program = traced(WithState(model.module, state), ((model.args, model.kwargs), kept), device=device_of(model))
        for node in program.module.graph.nodes:
            path = str(node.meta.get("source", ""))
            node.meta["source"] = "" if path == WithState.INNER else path.removeprefix(f"{WithState.INNER}.")
    arguments = [node for node in program.module.graph.nodes if node.op == "placeholder"][-len(kept) :]
    outputs = count(len(output_strides(program.module)) - sum(each.is_written for each in state))
    for argument, each, tensor in zip(arguments, state, kept, strict=True):
        output = next(outputs) if each.is_written else None
        set_slot(argument, StateSlot(name=each.name, tensor=tensor, output=output))
    result = program.part(0)
    return replace(model, module=program.module, args=(*given, *kept), kwargs={}, nest=result.nest, is_flat=True)


def _recorded(model: TorchModel, state: Sequence[tuple[torch.Tensor, bool]] = ()) -> AtenProgram | None:
    leaves = pytree.tree_leaves((model.args, model.kwargs))
    return record_exported(model.module, leaves, state, device=device_of(model))


def device_of(model: TorchModel) -> str:
    """Return the type of the device that the model is on."""
    return next((tensor.device.type for _, tensor in model.inputs), "cuda")
