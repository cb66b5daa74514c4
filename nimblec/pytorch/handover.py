"""Hand a model of this process to the capture process, a fresh one for CUPTI and the allocator.

The model is exported here by torch.export. A pickled module would not be the same: classes drop
attributes when they are pickled, lambdas and hooks cannot be pickled, and what libraries keep outside of
modules (registries that `__init__` fills, patches, flags) does not exist in the other process.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from nimblec.base.errors import UnsupportedModelError
from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblec.pytorch import sources
from nimblec.pytorch.borrowed import borrowed
from nimblec.pytorch.export_errors import exporting
from nimblec.pytorch.model import ModelCall, as_module, is_compiled, place_call
from nimblec.pytorch.outputs import missing_outputs, results_by_name
from nimblec.pytorch.recurrent import padded_sequences
from nimblec.pytorch.repeatable import HOW_STATE_IS_KEPT, run_twice
from nimblec.pytorch.state import declared_writes, refuse_autocast, storages, written_by


class ValueSizesError(Exception):
    """Sizes within a model depend on values of its inputs; ``call`` is the model with its arguments."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__(call.name)
        self.call = call


def hand_over(source: Source, options: Options, folder: Path) -> tuple[Source, Options, tuple[str, ...]]:
    """Write a live model to ``.pt2`` files in ``folder``, one for each entry, its inputs of the sizes asked for.

    Returns the files as a source, the options that remain, and notes for the user. An ExportedProgram for
    several sizes is written as it is, or each of its sizes where the model's code fixes them. Raises TraceError where
    torch.export refuses the model, with the user's line at which it stopped, ValueSizesError for a single
    model with sizes that depend on values. The source lists tensors that entries share and write, since each file has
    its own copy.
    """
    if options.sizes and source.live is not None and source.live.module is not None:
        return _each_size(source, options, folder)
    if options.sizes:
        path = folder / "model.pt2"
        torch.export.save(sources.dynamic_program(source, options).program, path)
        return Source(kind="exported", model=str(path), labels=source.labels), options, ()
    calls = sources.load(source, options)
    for call in calls.values():
        refuse_autocast(
            call.name,
            call.module,
            "which casts otherwise on the CPU, where it would be exported: name a function that returns the step, "
            "package.module:callable",
        )
    options = replace(options, inputs=(), dims=(), examples=())  # these are in the files
    held = {entry: storages(call.module) for entry, call in calls.items()}
    paths: dict[str, Path] = {}
    written: set[int] = set()
    notes: tuple[str, ...] = ()
    for entry, call in calls.items():
        paths[entry] = folder / f"model_{len(paths)}.pt2"
        program, said = _export(call, paths[entry])
        if source.kind != "entries" and _has_value_sizes(program):
            raise ValueSizesError(call)
        notes += said
        others = {storage for other in held if other != entry for storage in held[other].values()}
        if others & {*held[entry].values()}:
            names = declared_writes(call.module) or written_by(call.name, program)
            written |= {held[entry][name] for name in names} & others
    numbers = {storage: number for number, storage in enumerate(sorted(written))}
    entries = {
        entry: Source(
            kind="exported",
            model=str(path),
            shared=tuple((name, numbers[storage]) for name, storage in held[entry].items() if storage in numbers),
        )
        for entry, path in paths.items()
    }
    if source.kind != "entries":
        return entries["main"], options, notes
    return Source(kind="entries", entries=tuple(entries.items())), options, notes


def _has_value_sizes(program: ExportedProgram) -> bool:
    return any(free_unbacked_symbols(node.meta.get("val")) for node in program.graph.nodes)


def _each_size(source: Source, options: Options, folder: Path) -> tuple[Source, Options, tuple[str, ...]]:
    """Write the model in the sizes of each profile."""
    names = ", ".join(name for name, _ in options.sizes)
    said = f"{names}: calls of other sizes than the plan's are refused, since the module's code fixes one"
    notes: tuple[str, ...] = (said,)
    parts: list[tuple[str, Source]] = []
    for call in sources.dynamic_program(source, options).calls(options).values():
        path = folder / f"model_{len(parts)}.pt2"
        program, others = _export(call, path)
        if written := written_by(call.name, program):
            raise UnsupportedModelError(f"{call.name}: writes {written[0]!r}, which each size would have for itself")
        notes += others
        parts.append(("main", Source(kind="exported", model=str(path))))
    return Source(kind="sizes", entries=tuple(parts)), replace(options, inputs=(), dims=(), examples=()), notes


def _has_vmap(program: ExportedProgram) -> bool:
    """Return whether an exported graph has the calls of torch.vmap, as that of associative_scan does."""
    blocks = (module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    targets = (node.target for block in blocks for node in block.graph.nodes)
    return any(getattr(target, "__module__", None) == "torch._functorch.predispatch" for target in targets)


def _export(call: ModelCall, path: Path) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Write one call to ``path``; returns what was exported, and notes for the user."""
    if is_compiled(call.module):
        raise UnsupportedModelError(
            f"{call.name} was returned by torch.compile, whose kernels cannot be given to another process: compile "
            "the plain module, or name it package.module:callable"
        )

    with borrowed(call.module):
        module = as_module(call.module)
        # A function's own tensors stay where they are, and so do its arguments.
        device = "cpu" if module is call.module else next((t.device.type for _, t in call.inputs), "cpu")
        placed = place_call(call, device=device)
        missing = missing_outputs(run_twice(call.name, placed, HOW_STATE_IS_KEPT, buffers_are_kept=True))
        # The hook is removed when the module is given back.
        module.register_forward_hook(results_by_name)
        with exporting(call.name, "torch.export"), padded_sequences():
            program = torch.export.export(module, placed.args, placed.kwargs, strict=False)
            if _has_vmap(program):
                # Older torch (2.11) writes no file with such calls.
                program = program.run_decompositions({})
            torch.export.save(program, path)
    return program, (*placed.notes, *missing)
