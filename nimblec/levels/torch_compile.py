"""A model through torch.compile: fewer kernels, fused by Inductor."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nimblec.frontend.pytorch.model import TorchModel

_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "freezing": True,  # weights are constants: batch norms fold, layouts are chosen once
    "triton.cudagraphs": False,  # the plan is the graph
    "allow_buffer_reuse": False,  # reuse orders kernels that could run side by side; the plan does it
}


def compiled(model: TorchModel) -> TorchModel:
    """The model as torch.compile runs it."""
    return replace(model, module=torch.compile(model.module, fullgraph=True, dynamic=False, options=_OPTIONS))
