"""Hand a model of this process to the capture process, a fresh one for CUPTI and the allocator.

The model is exported here by torch.export. A pickled module would not be the same: classes drop
attributes when they are pickled, lambdas and hooks cannot be pickled, and what libraries keep outside of
modules (registries that `__init__` fills, patches, flags) does not exist in the other process.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from nimblec.base.errors import UnsupportedModelError
from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblec.pytorch import sources
from nimblec.pytorch.borrowed import borrowed
from nimblec.pytorch.export_errors import exporting
from nimblec.pytorch.model import ModelCall, as_module, is_compiled, place_call
from nimblec.pytorch.outputs import missing_outputs, results_by_name
from nimblec.pytorch.recurrent import padded_sequences
from nimblec.pytorch.repeatable import run_twice
from nimblec.pytorch.state import declared_writes, named_tensors, refuse_autocast, storages, written_by


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
    model with sizes that depend on values. Tensors that entries share are written once, to a file of their own.
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
    tensors = {entry: named_tensors(call.module) for entry, call in calls.items()}
    held = {entry: storages(call.module) for entry, call in calls.items()}
    holders = Counter(chain.from_iterable({*map(id, named.values())} for named in tensors.values()))

    def is_common(tensor: Tensor) -> bool:
        return holders[id(tensor)] > 1 and type(tensor) in {Tensor, torch.nn.Parameter}

    paths: dict[str, Path] = {}
    writes: dict[str, Sequence[str]] = {}
    written: set[int] = set()
    notes: tuple[str, ...] = ()
    for entry, call in calls.items():
        paths[entry] = folder / f"model_{len(paths)}.pt2"
        apart = [name for name, tensor in tensors[entry].items() if is_common(tensor)]
        program, said = _export(call, paths[entry], apart)
        if source.kind != "entries" and _has_value_sizes(program):
            raise ValueSizesError(call)
        notes += said
        others = {storage for other in held if other != entry for storage in held[other].values()}
        if others & {*held[entry].values()}:
            writes[entry] = declared_writes(call.module) or written_by(call.name, program)
            written |= {held[entry][name] for name in writes[entry]} & others
    if source.kind != "entries":
        return Source(kind="exported", model=str(paths["main"])), options, notes
    common, places = _common(tensors, is_common, written)
    torch.save([tensor.detach().cpu() for tensor in common], folder / "common.pt")
    entries = {
        entry: Source(kind="exported", model=str(path), shared=places[entry], writes=tuple(writes.get(entry, ())))
        for entry, path in paths.items()
    }
    return Source(kind="entries", model=str(folder / "common.pt"), entries=tuple(entries.items())), options, notes


def _common(
    tensors: Mapping[str, Mapping[str, Tensor]], is_common: Callable[[Tensor], bool], written: Collection[int]
) -> tuple[list[Tensor], dict[str, tuple[tuple[str, int], ...]]]:
    """Return the tensors that several entries have, and each entry's names for them with their places in the list.

    All tensors of a storage that is ``written`` become one, as an entry reads what another one writes.
    """
    numbers: dict[int, int] = {}
    found: list[Tensor] = []
    places: dict[str, tuple[tuple[str, int], ...]] = {}
    for entry, named in tensors.items():
        of_entry = []
        for name, tensor in named.items():
            is_written = (storage := tensor.untyped_storage()._cdata) in written
            if is_written or is_common(tensor):
                number = numbers.setdefault(storage if is_written else id(tensor), len(found))
                if number == len(found):
                    found.append(tensor)
                of_entry.append((name, number))
        places[entry] = tuple(of_entry)
    return found, places


def _without_values(tensor: Tensor) -> Tensor:
    empty = tensor.new_zeros(1)
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty


def _has_value_sizes(program: ExportedProgram) -> bool:
    # The results of a while_loop have offsets of their own, which are no sizes.
    values = chain.from_iterable(tree_leaves(node.meta.get("val")) for node in program.graph.nodes)
    return any(free_unbacked_symbols(value.shape if isinstance(value, Tensor) else value) for value in values)


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


def _export(call: ModelCall, path: Path, apart: Iterable[str] = ()) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Write one call to ``path``, without the values of tensors ``apart``; returns the program, and notes."""
    if is_compiled(call.module):
        raise UnsupportedModelError(
            f"{call.name} was returned by torch.compile, whose kernels cannot be given to another process: compile "
            "the plain module, or name it package.module:callable"
        )

    with borrowed(call.module) as originals:
        module = as_module(call.module)
        # A function's own tensors stay where they are, and so do its arguments.
        device = "cpu" if module is call.module else next((t.device.type for _, t in call.inputs), "cpu")
        placed = place_call(call, device=device)
        missing = missing_outputs(run_twice(call.name, placed, originals))
        # The hook is removed when the module is given back.
        module.register_forward_hook(results_by_name)
        with exporting(call.name, "torch.export"), padded_sequences():
            program = torch.export.export(module, placed.args, placed.kwargs, strict=False)
            if _has_vmap(program):
                # Older torch (2.11) writes no file with such calls.
                program = program.run_decompositions({})
            state = dict(program.state_dict)
            program.state_dict.update({name: _without_values(state[name]) for name in state.keys() & {*apart}})
            torch.export.save(program, path)
            program.state_dict.update(state)
    return program, (*placed.notes, *missing)
