"""A model through torch.compile: fewer kernels, fused by Inductor."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nimblec.pytorch.model import TorchModel

_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "freezing": True,  # weights are constants: batch norms fold, layouts are chosen once
    "comprehensive_padding": False,  # torch 2.11: sums of an adaptive pooling's rows would read the padding
    "triton.cudagraphs": False,  # the plan is the graph
    "allow_buffer_reuse": False,  # reuse would order concurrent kernels; the plan reuses memory
}


def compiled(model: TorchModel) -> TorchModel:
    """Return the model as torch.compile runs it."""
    return replace(model, module=torch.compile(model.module, fullgraph=True, dynamic=False, options=_OPTIONS))


def forget_kernels() -> None:
    """Make Inductor compile kernels of their own for the next model.

    In the first seconds of a process Inductor compiles kernels in that process, and keeps one object for equal
    sources. If another model compiled the same source, say for another profile, that object would choose its tiling
    again, and a model recorded before would run other code than its recording holds.
    """
    if codecache := sys.modules.get("torch._inductor.codecache"):
        codecache.PyCodeCache.cache_clear()
