"""The source of a model: a file, the name of a callable, or an object of the calling process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as shortened
from typing import Any

from nimblec.base.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """A module, a function or an ExportedProgram of this process, and the arguments of one call.

    ``args`` is None where none were given: an ExportedProgram has its own. ``dynamic_shapes`` are what
    torch.export takes. ``module`` is the module itself where the ``model`` is only its signature with dynamic
    dimensions, since its code fixes them, so that each size is exported alone.
    """

    model: Any
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None
    module: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a model, which is not loaded yet.

    ``kind``: "callable" ("package.module:callable"), "exported" (.pt2), "onnx", of which ``model`` is
    the name or path, "live", which is ``live``, "entries", a source for each entry by its name, or "sizes",
    a source for each profile. A callable may return several entries, too. ``labels`` pair symbols of an exported
    program with the user's names for them; ``shared`` are its tensors that several entries have, by their names, each
    with its place in the list of tensors in the file ``model`` of the entries' source. ``writes`` names the tensors
    that its runs write, if it shares any.
    """

    kind: str
    model: str = ""
    live: LiveModel | None = None
    entries: "tuple[tuple[str, Source], ...]" = ()
    labels: tuple[tuple[str, str], ...] = ()
    shared: tuple[tuple[str, int], ...] = ()
    writes: tuple[str, ...] = ()


def read_entries(what: str, entries: Mapping[Any, Any]) -> dict[str, tuple[Any, Any, Any]]:
    """Return the model, example inputs and keyword arguments of each entry by its name. Raises ArgumentError."""
    if not entries:
        raise ArgumentError(f"{what}: has no entries")
    found: dict[str, tuple[Any, Any, Any]] = {}
    for name, call in entries.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ArgumentError(f"{what}: {shortened(name)} is not a name of an entry: expected a string")
        match call:
            case (module, example_inputs) if callable(module):
                found[name] = module, example_inputs, None
            case (module, example_inputs, dict() as kwargs) if callable(module):
                found[name] = module, example_inputs, kwargs
            case _:
                raise ArgumentError(
                    f"{what}: entry {name!r} is {type(call).__name__}, expected (module, example_inputs) or "
                    "(module, example_inputs, kwargs)"
                )
    return found
