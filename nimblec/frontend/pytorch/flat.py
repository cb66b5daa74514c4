"""A model as a flat graph of ATen calls."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

from nimblec.frontend.pytorch.aten_graph import StateWrittenError, trace
from nimblec.frontend.pytorch.model import TorchModel
from nimblec.frontend.pytorch.state import StateTensor, WithState, named_tensors
from nimblec.graph.outputs import output_strides
from nimblec.graph.state import StateSlot, set_slot


def flattened(model: TorchModel) -> TorchModel:
    """The model as a graph of pure ATen calls on its device.

    Where it writes into its own state, the graph takes that as arguments, after the model's own, and
    returns what it becomes, after its results (`nimblec.graph.state`). Raises TraceError or
    UnsupportedModelError where it cannot be such a graph: its code looks at values, it writes into its
    inputs, or draws random numbers.
    """
    if model.is_flat:
        return model
    given = tuple(t for t in pytree.tree_leaves((model.args, model.kwargs)) if isinstance(t, torch.Tensor))
    try:
        program = trace(model.module, model.args, model.kwargs, device=device_of(model))
    except StateWrittenError as exc:
        return _with_state(model, given, exc.names)
    return replace(model, module=program.module, args=given, kwargs={}, nest=program.nest, is_flat=True)


def _with_state(model: TorchModel, given: tuple[torch.Tensor, ...], written: Sequence[str]) -> TorchModel:
    tensors = named_tensors(model.module)
    state = tuple(StateTensor(name=name, storage=0, is_written=True) for name in written)
    kept = tuple(tensors[name] for name in written)
    program = trace(WithState(model.module, state), ((model.args, model.kwargs), kept), device=device_of(model))
    arguments = [node for node in program.module.graph.nodes if node.op == "placeholder"][-len(kept) :]
    returned = len(output_strides(program.module)) - len(kept)
    for number, (argument, name, tensor) in enumerate(zip(arguments, written, kept, strict=True), returned):
        set_slot(argument, StateSlot(name=name, tensor=tensor, output=number))
    result = program.part(0)
    return replace(model, module=program.module, args=(*given, *kept), kwargs={}, nest=result.nest, is_flat=True)


def device_of(model: TorchModel) -> str:
    """The type of the device that the model is on."""
    return next((tensor.device.type for _, tensor in model.inputs), "cuda")
