"""A model through torch.compile: fewer kernels, fused by Inductor."""

from dataclasses import replace

import torch

from nimblec.frontend.pytorch import TorchModel

_FUSED = {
    "freezing": True,  # weights are constants: batch norms fold, layouts are chosen once
    "triton.cudagraphs": False,  # the plan is the graph
    "allow_buffer_reuse": False,  # reuse orders kernels that could run side by side; the plan does it
}
_TUNED = {**_FUSED, "max_autotune": True, "coordinate_descent_tuning": True}


def compiled(model: TorchModel, level: int) -> TorchModel:
    """The model compiled at ``level``: 1 fuses, 2 also chooses kernels by timing them."""
    module = torch.compile(model.module, fullgraph=True, dynamic=False, options=_TUNED if level > 1 else _FUSED)
    return replace(model, module=module)
