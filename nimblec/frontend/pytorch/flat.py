"""A model as a flat graph of ATen calls."""

from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

from nimblec.frontend.pytorch.aten_graph import trace
from nimblec.frontend.pytorch.model import TorchModel


def flattened(model: TorchModel) -> TorchModel:
    """The model as a graph of pure ATen calls on its device.

    Raises TraceError or UnsupportedModelError where it cannot be one: its code looks at values, it
    writes into its own state, or draws random numbers.
    """
    if model.is_flat:
        return model
    program = trace(model.module, model.args, model.kwargs, device=device_of(model))
    tensors = tuple(t for t in pytree.tree_leaves((model.args, model.kwargs)) if isinstance(t, torch.Tensor))
    return replace(model, module=program.module, args=tensors, kwargs={}, nest=program.nest, is_flat=True)


def device_of(model: TorchModel) -> str:
    """The type of the device that the model is on."""
    return next((tensor.device.type for _, tensor in model.inputs), "cuda")
