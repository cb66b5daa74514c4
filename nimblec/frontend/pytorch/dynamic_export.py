"""Export a module of this process with the dynamic shapes that its user gives, as torch.export takes them."""

from typing import Any

import torch
from torch import SymInt
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import _combine_args, _tree_map_with_path
from torch.utils import _pytree as pytree

from nimblec.frontend.pytorch.borrowed import borrowed
from nimblec.frontend.pytorch.dynamic_shapes import user_inputs
from nimblec.frontend.pytorch.export_errors import exporting
from nimblec.frontend.pytorch.model import as_module, results_by_name
from nimblec.source import LiveModel, Source


def export_dynamic(live: LiveModel) -> Source:
    """The ExportedProgram of a live model, whose dynamic dimensions go by the names of their Dims.

    Raises TraceError where torch.export refuses the model or the shapes.
    """
    name = "the module" if isinstance(live.model, torch.nn.Module) else "the function"
    args = live.args or ()
    with borrowed(live.model):
        module = as_module(live.model)
        module.register_forward_hook(results_by_name)  # which is gone with the loan
        with exporting(name, "torch.export"):
            program = torch.export.export(
                module, args, live.kwargs, dynamic_shapes=live.dynamic_shapes, strict=False
            )
            labels = _labels(program, module, args, live.kwargs, live.dynamic_shapes)
    return Source(kind="live", live=LiveModel(model=program, args=None), labels=tuple(labels.items()))


def _labels(
    program: ExportedProgram, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> dict[str, str]:
    """The name of the Dim of each symbol."""
    exported = {
        id(leaf): value
        for leaf, value in zip(pytree.tree_leaves((args, kwargs)), user_inputs(program), strict=True)
    }
    found: dict[str, str] = {}

    def note(_path: Any, leaf: Any, of: Any) -> None:
        for axis, dim in of.items() if isinstance(of, dict) else enumerate(of or ()):
            size = exported[id(leaf)].shape[axis]
            if isinstance(dim, Dim) and isinstance(size, SymInt) and size.node.expr.is_symbol:
                found.setdefault(str(size.node.expr), dim.__name__)

    combined: Any = _combine_args(module, args, kwargs)
    if isinstance(shapes, tuple | list):
        combined = type(shapes)(combined.values())
    _tree_map_with_path(note, combined, shapes, tree_name="inputs")
    return found
