"""A model as a flat graph of ATen calls, rewritten into fewer and faster kernels."""

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
    program = trace(model.module, model.args, model.kwargs, device=_device(model))
    tensors = tuple(t for t in pytree.tree_leaves((model.args, model.kwargs)) if isinstance(t, torch.Tensor))
    return replace(model, module=program.module, args=tensors, kwargs={}, nest=program.nest, is_flat=True)


def in_precision(model: TorchModel, dtype: torch.dtype) -> TorchModel:
    """A flat model computed in ``dtype`` where it is in float32; its inputs and outputs stay as they are."""
    from nimblec.graph.rewriter import copied
    from nimblec.optimize.layout.recurrent import pack_recurrent_weights
    from nimblec.optimize.precision.cast import cast

    module = copied(model.module)
    cast(module, dtype)
    pack_recurrent_weights(module)
    return replace(model, module=module)


def optimized(model: TorchModel, dtype: torch.dtype | None = None) -> TorchModel:
    """A flat model with the optimiser's rewrites."""
    from nimblec.optimize import optimize

    return replace(model, module=optimize(model.module, device=_device(model), dtype=dtype))


def fused(model: TorchModel, *, at_any_cost: bool = True) -> TorchModel:
    """An optimised model with generated kernels for what lies between library calls."""
    from nimblec.optimize.regions.compile import compile_regions

    return replace(model, module=compile_regions(model.module, at_any_cost=at_any_cost))


def _device(model: TorchModel) -> str:
    """The type of the device that the model is on."""
    return next((tensor.device.type for _, tensor in model.inputs), "cuda")
