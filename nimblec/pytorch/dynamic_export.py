"""Export a module of this process with the dynamic shapes that its user gives, as torch.export takes them."""

import re
from functools import wraps
from typing import Any

import torch
from torch import SymInt
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import _combine_args, _tree_map_with_path
from torch.utils import _pytree as pytree

from nimblec.base.errors import TraceError, UnsupportedModelError, root_cause
from nimblec.base.options import Options
from nimblec.base.source import LiveModel, Source
from nimblec.pytorch.borrowed import borrowed
from nimblec.pytorch.dynamic_shapes import user_inputs
from nimblec.pytorch.export_errors import FIXED, exporting
from nimblec.pytorch.model import as_module, state_written
from nimblec.pytorch.outputs import results_by_name
from nimblec.pytorch.recurrent import any_steps, padded_sequences
from nimblec.pytorch.sources import DynamicProgram

_VIOLATED = re.compile(r"Constraints violated \((.+?)\)")


def export_dynamic(live: LiveModel, options: Options) -> Source:
    """Return the ExportedProgram of a live model, with its dynamic dimensions under the names of their Dims.

    Packed sequences are traced as padded ones, and a model whose code fixes a dimension is returned to be exported for
    each size alone. Raises TraceError where torch.export refuses the model or the shapes.
    """
    name = "the module" if isinstance(live.model, torch.nn.Module) else "the function"
    args = live.args or ()
    with borrowed(live.model), padded_sequences():
        module = as_module(live.model)
        module.register_forward_hook(results_by_name)  # removed at the end of the loan
        try:
            with exporting(name, "torch.export"), any_steps():
                program = torch.export.export(
                    module, args, live.kwargs, dynamic_shapes=live.dynamic_shapes, strict=False
                )
                labels = _labels(program, module, args, live.kwargs, live.dynamic_shapes)
        except TraceError as exc:
            said = str(root_cause(exc))
            _refuse_sized_state(name, module, live, said)
            by_size = _by_size(name, module, live, options) if FIXED.search(said) else None
            if by_size is None:
                raise
            return by_size
    return Source(kind="live", live=LiveModel(model=program, args=None), labels=tuple(labels.items()))


def _by_size(name: str, module: torch.nn.Module, live: LiveModel, options: Options) -> Source | None:
    """Return the source of a module to be exported for each size alone; None if it does not run with all sizes."""
    args = live.args or ()

    @wraps(module.forward)
    def inputs(*args: Any, **kwargs: Any) -> list[Any]:
        return pytree.tree_leaves((args, kwargs))

    signature = torch.nn.Module()
    signature.forward = inputs
    with exporting(name, "torch.export"):
        program = torch.export.export(
            signature, args, live.kwargs, dynamic_shapes=live.dynamic_shapes, strict=False
        )
        labels = _labels(program, signature, args, live.kwargs, live.dynamic_shapes)
    for call in DynamicProgram(name, program, labels, live.model).calls(options).values():
        try:
            with torch.no_grad():
                call.module(*call.args, **call.kwargs)
        except Exception:  # noqa: BLE001 - the user's code raises anything
            return None
    found = LiveModel(model=program, args=None, module=live.model)
    return Source(kind="live", live=found, labels=tuple(labels.items()))


def _refuse_sized_state(name: str, module: torch.nn.Module, live: LiveModel, said: str) -> None:
    """Raise UnsupportedModelError if torch.export's error ``said`` is due to a state of a dimension's size."""
    violated = _VIOLATED.search(said)
    if violated is None:
        return
    with exporting(name, "torch.export"):
        program = torch.export.export(module, live.args or (), live.kwargs, strict=False).run_decompositions({})
    inputs = (leaf for leaf in pytree.tree_leaves((live.args, live.kwargs)) if isinstance(leaf, torch.Tensor))
    sizes = {size for tensor in inputs for size in tensor.shape if size > 1}
    for state in state_written(program.graph_signature):
        shape = tuple(program.state_dict[state].shape)
        if sizes.intersection(shape):
            raise UnsupportedModelError(
                f"{name}: the dimension {violated[1]} cannot have several sizes, since a run writes the state "
                f"{state!r} of fixed shape {shape}: make it as large as the largest size, and write a part of it"
            )


def _labels(
    program: ExportedProgram, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> dict[str, str]:
    """Return the name of the Dim of each symbol."""
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
