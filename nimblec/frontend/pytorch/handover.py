"""Hand a model of this process to the capture process, a fresh one for CUPTI and the allocator.

The model is exported here by torch.export. A pickled module would not be the same: classes drop
attributes when they are pickled, lambdas and hooks cannot be pickled, and what libraries keep outside of
modules (registries that `__init__` fills, patches, flags) does not exist in the other process.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from nimblec.errors import UnsupportedModelError
from nimblec.frontend.pytorch import sources
from nimblec.frontend.pytorch.borrowed import borrowed
from nimblec.frontend.pytorch.export_errors import exporting
from nimblec.frontend.pytorch.model import (
    ModelCall,
    as_module,
    is_compiled,
    missing_outputs,
    place_call,
    results_by_name,
    state_written,
)
from nimblec.frontend.pytorch.repeatable import HOW_STATE_IS_KEPT, run_twice
from nimblec.options import Options
from nimblec.source import Source


def hand_over(source: Source, options: Options, folder: Path) -> tuple[Source, Options, tuple[str, ...]]:
    """Write a live model to ``.pt2`` files in ``folder``, one for each entry, its inputs of the sizes asked for.

    The files as a source, with the options that are left to follow, and what the user should know: an
    ExportedProgram for several sizes is written as it is. Raises TraceError where torch.export refuses
    the model, with the line of the user's that it stopped at, and UnsupportedModelError for a state that
    entries share: each file has its own.
    """
    if options.sizes:
        path = folder / "model.pt2"
        torch.export.save(sources.dynamic_program(source, options).program, path)
        return Source(kind="exported", model=str(path), labels=source.labels), options, ()
    calls = sources.load(source, options)
    options = replace(options, inputs=(), dims=(), examples=())  # which the files have
    held = {entry: _storages(call.module) for entry, call in calls.items()}
    entries: dict[str, Source] = {}
    notes: tuple[str, ...] = ()
    for entry, call in calls.items():
        path = folder / f"model_{len(entries)}.pt2"
        program, said = _export(call, path)
        notes += said
        others = {storage for other in held if other != entry for storage in held[other].values()}
        _refuse_shared_state(call.name, program, {name for name, storage in held[entry].items() if storage in others})
        entries[entry] = Source(kind="exported", model=str(path))
    if source.kind != "entries":
        return entries["main"], options, notes
    return Source(kind="entries", entries=tuple(entries.items())), options, notes


def _storages(module: Any) -> dict[str, int]:
    """What tells the storages of a module's parameters and buffers apart, by their names."""
    if not isinstance(module, torch.nn.Module):
        return {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: tensor.untyped_storage()._cdata for name, tensor in named}


def _refuse_shared_state(name: str, program: ExportedProgram, shared: Collection[str]) -> None:
    """Raise where the program writes into what is ``shared`` with other entries."""
    if not shared:
        return
    with exporting(name, "torch.export"):
        functional = program.run_decompositions({})  # whose signature tells
    for written in state_written(functional.graph_signature):
        if written in shared:
            raise UnsupportedModelError(
                f"{name} writes into {written!r}, which other entries have, too: name the callable that returns them, "
                "package.module:callable, which is called where all entries are captured"
            )


def _export(call: ModelCall, path: Path) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Write one call to ``path``: what was exported, and what the user should know."""
    if is_compiled(call.module):
        raise UnsupportedModelError(
            f"{call.name} is one of torch.compile, whose kernels no other process can be given: compile the plain "
            "module, or name it package.module:callable"
        )

    with borrowed(call.module):
        module = as_module(call.module)
        # A function's own tensors stay where they are, and so do its arguments.
        device = "cpu" if module is call.module else next((t.device.type for _, t in call.inputs), "cpu")
        placed = place_call(call, device=device)
        missing = missing_outputs(run_twice(call.name, placed, HOW_STATE_IS_KEPT, buffers_are_kept=True))
        module.register_forward_hook(results_by_name)  # which is gone with the loan
        with exporting(call.name, "torch.export"):
            program = torch.export.export(module, placed.args, placed.kwargs, strict=False)
            torch.export.save(program, path)
    return program, (*placed.notes, *missing)
