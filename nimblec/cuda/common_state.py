"""State that several entries share."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nimblec.base.errors import CompileError
from nimblec.base.ir import BufferKind, Graph, ProgramKey

if TYPE_CHECKING:
    from nimblec.pytorch.model import TorchModel


def with_common_state(models: "Mapping[ProgramKey, TorchModel]") -> "dict[ProgramKey, TorchModel]":
    """Return the models, each with the storages that other entries write, which its rewrites must not fold."""
    from nimblec.pytorch.flat import written_storages

    written = frozenset().union(*map(written_storages, models.values()))
    return {key: replace(model, written_elsewhere=written) for key, model in models.items()}


def refuse_folded_state(
    modules: Mapping[str, Any],
    graphs: Mapping[str, Graph],
    *,
    as_they_run: Collection[str],
    kept: Mapping[str, Collection[int]],
) -> None:
    """Raise CompileError if an entry may have folded a tensor that another entry writes; all arguments are by entry.

    A rewritten module computes with the values that its weights and buffers had when it was rewritten, except for the
    storages ``kept`` as state; entries captured ``as_they_run`` read the memory itself.
    """
    states = {
        entry: {b.storage: b.name for b in graph.buffers if b.kind is BufferKind.STATE and b.storage}
        for entry, graph in graphs.items()
    }
    for entry, module in modules.items():
        if entry in as_they_run:
            continue
        held = _storages(module) - states[entry].keys() - {*kept.get(entry, ())}
        for other, written in states.items():
            for storage in held & written.keys():
                raise CompileError(
                    f"entry {entry!r} has {written[storage]!r}, which entry {other!r} writes, and was rewritten as if "
                    "it were constant: use -O0"
                )


def _storages(module: Any) -> set[int]:
    """Return the storages of the parameters and buffers of a module; none for a function."""
    if not hasattr(module, "named_buffers"):
        return set()
    return {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
