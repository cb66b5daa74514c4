"""Check a PyTorch model and its arguments without running anything."""

from collections.abc import Mapping
from typing import Any

import torch

from nimblec.base.errors import ArgumentError


def is_exported(model: Any) -> bool:
    """Return whether a model is an ExportedProgram."""
    return isinstance(model, torch.export.ExportedProgram)


def refuse_script(model: Any) -> None:
    """Raise ArgumentError for TorchScript, which torch.export cannot read."""
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise ArgumentError(
            "the model is TorchScript, which has no Python code to export: give the torch.nn.Module that it was made "
            "from, or an ONNX file of it"
        )


def refuse_script_within(model: Any) -> None:
    """Raise ArgumentError for TorchScript, also among the modules of a model."""
    refuse_script(model)
    for name, part in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(part, torch.jit.ScriptModule):
            raise ArgumentError(
                f"the model's module {name!r} is TorchScript, which has no Python code to export: use the "
                "torch.nn.Module there that it was made from"
            )


def positional(example_inputs: Any) -> tuple[Any, ...]:
    """Return the positional arguments of one call; a single tensor needs no tuple."""
    match example_inputs:
        case torch.Tensor():
            return (example_inputs,)
        case tuple() | list():
            return tuple(example_inputs)
    hint = "; keyword arguments are given as kwargs" if isinstance(example_inputs, Mapping) else ""
    raise ArgumentError(
        f"example_inputs: got {type(example_inputs).__name__}, expected a tensor or a tuple of the positional "
        f"arguments{hint}"
    )
