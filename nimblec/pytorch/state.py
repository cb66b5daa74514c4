"""The state of a module: the buffers and parameters that its runs write, and the module as a function of them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.state import scratch
from nimblec.pytorch.export_errors import exporting
from nimblec.pytorch.generator import StepGenerator
from nimblec.pytorch.model import ModelCall, state_written


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of a module that an entry writes: this one, or only another that has the same ``storage``."""

    name: str
    storage: int
    is_written: bool


class Writing(torch.nn.Module):
    """A module that declares the names of the parameters and buffers that its runs write, so that none need be traced.

    Where it is exported (`torch.compiler.is_exporting`), its runs make ATen calls alone, each with its source noted,
    unless ``makes_aten_calls`` is false. ``autocast`` is the type of torch.autocast under which its runs compute.
    ``settable`` are those names that are state even in a graph that only reads them. ``draws`` is the source of its
    random numbers, if it draws any.
    """

    writes: tuple[str, ...]
    settable: tuple[str, ...] = ()
    makes_aten_calls = True
    autocast: torch.dtype | None = None
    draws: StepGenerator | None = None

    def let_torch_draw(self) -> None:
        """Draw random numbers from torch's own generator of the GPU from now on, if any are drawn."""


def declared_writes(module: Any) -> tuple[str, ...]:
    """Return the parameters and buffers that runs of a module write, as it declares them; () if it does not."""
    return module.writes if isinstance(module, Writing) else ()


def generator_of(module: Any) -> StepGenerator | None:
    """Return the generator of torch with its state in the module, if the module draws its random numbers from one."""
    return module.draws if isinstance(module, Writing) else None


def settable_storages(module: Any) -> frozenset[int]:
    """Return the identifiers of the storages that are state even in a graph that only reads them."""
    names = module.settable if isinstance(module, Writing) else ()
    return frozenset(storages(module)[name] for name in names)


def scratch_storages(module: Any) -> frozenset[int]:
    """Return the identifiers of the storages of kernels' scratch memory; none for a function."""
    held = scratch(module) if isinstance(module, torch.nn.Module) else ()
    return frozenset(tensor.untyped_storage()._cdata for tensor in held)


def refuse_autocast(name: str, module: Any, why: str) -> None:
    """Raise UnsupportedModelError for a step under torch.autocast; ``why`` says why it cannot be exported."""
    if isinstance(module, Writing) and module.autocast is not None:
        raise UnsupportedModelError(f"{name} runs under torch.autocast to {module.autocast}, {why}")


def written_by(name: str, program: torch.export.ExportedProgram) -> list[str]:
    """Return the parameters and buffers that a run of an exported model writes; TraceError names ``name``."""
    with exporting(name, "torch.export"):
        # The signature of a functional program lists the writes.
        functional = program.run_decompositions({})
    return state_written(functional.graph_signature)


def storages(module: Any) -> dict[str, int]:
    """Return an identifier of the storage of each parameter and buffer of a module, by name; none for a function."""
    return {name: tensor.untyped_storage()._cdata for name, tensor in named_tensors(module).items()}


def find_state(
    calls: Mapping[str, ModelCall], written: Mapping[str, Sequence[str]]
) -> dict[str, tuple[StateTensor, ...]]:
    """Return the state of each entry: what it or another entry writes, by the names that it has in the entry's module.

    ``written`` are the names that each entry's runs write. Raises UnsupportedModelError as `state_of`.
    """
    held = {entry: storages(call.module) for entry, call in calls.items()}
    changed = {held[entry][name] for entry, names in written.items() for name in names}
    return {entry: state_of(call.name, call.module, written[entry], changed) for entry, call in calls.items()}


def state_of(what: str, module: Any, written: Sequence[str], elsewhere: Collection[int]) -> tuple[StateTensor, ...]:
    """Return the state of a module: what its runs write, by name, and of what others write the storages that it has.

    Raises UnsupportedModelError where that shares memory with another tensor of the module, called ``what``.
    """
    tensors, held = named_tensors(module), storages(module)
    own = {held[name] for name in written}
    names: dict[int, str] = {}
    for name, storage in held.items():
        if storage in own or storage in elsewhere:
            first = names.setdefault(storage, name)
            if tensors[first] is not tensors[name]:
                raise _shared(what, first, name)
    return tuple(
        StateTensor(name=name, storage=storage, is_written=storage in own) for storage, name in names.items()
    )


def refuse_shared_buffers(what: str, module: Any) -> None:
    """Raise UnsupportedModelError for two buffers in the same memory, of a module that writes such a one."""
    buffers = module.named_buffers(remove_duplicate=False) if isinstance(module, torch.nn.Module) else ()
    names: dict[int, str] = {}
    for name, buffer in buffers:
        first = names.setdefault(buffer.untyped_storage()._cdata, name)
        if first != name:
            raise _shared(what, first, name)


def _shared(what: str, first: str, other: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} has {first!r} and {other!r} in the same memory, which a run writes: make one a view of the other in "
        "forward, not a tensor of the module"
    )


def named_tensors(module: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by every name that they have."""
    if not isinstance(module, torch.nn.Module):
        return {}
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def call_with(module: torch.nn.Module, given: dict[str, torch.Tensor], *call: Any) -> Any:
    """Call a module on ``call`` (args, kwargs) with the tensors ``given``, by any name of those they replace.

    What the module assigns in place of one of them is in ``given`` then. Each stands at all places of its tensor. They
    are named here, once for each module: with tied weights of its own, torch (2.13) does not restore a module that has
    two names itself.
    """
    tensors = named_tensors(module)
    names = {id(tensors[name]): name for name in given}
    replaced = {place: names[id(tensor)] for place, tensor in _places(module) if id(tensor) in names}
    everywhere = {place: given[name] for place, name in replaced.items()}
    before = dict(everywhere)
    # `functional_call` updates the dict.
    result = functional_call(module, everywhere, *call, tie_weights=False)
    given |= {name: everywhere[at] for at, name in replaced.items() if everywhere[at] is not before[at]}
    return result


def _places(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter and buffer of each module, by one name for each module that has it."""
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def share(
    modules: Mapping[str, torch.nn.Module], shared: Mapping[str, Sequence[tuple[str, int]]], file: Path, device: str
) -> None:
    """Give modules the tensors of a list in a file, on a device.

    ``shared`` names them by entry, each with its place in the list; those of one place become one tensor.
    """
    tensors = torch.load(file, map_location=device, mmap=True, weights_only=True)
    found: dict[int, torch.Tensor] = {}
    for entry, names in shared.items():
        for name, number in names:
            path, _, last = name.rpartition(".")
            holder = modules[entry].get_submodule(path)
            kind = holder._parameters if last in holder._parameters else holder._buffers
            before, tensor = kind[last], tensors[number]
            if isinstance(before, torch.nn.Parameter):
                tensor = torch.nn.Parameter(tensor, before.requires_grad)
            kind[last] = found.setdefault(number, tensor)  # type: ignore[assignment]


class WithState(torch.nn.Module):
    """A module as a function of its state: returns the result, and the tensors of the state that a run writes."""

    INNER = "module"
    """The path of the module in this one."""

    def __init__(self, module: torch.nn.Module, state: Sequence[StateTensor]) -> None:
        super().__init__()
        self.module = module
        self._state = tuple(state)

    def forward(
        self, call: tuple[tuple[Any, ...], dict[str, Any]], state: Sequence[torch.Tensor]
    ) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Run the module on (args, kwargs) and copies of the ``state``, which it may write or assign."""
        args, kwargs = call
        tensors = {tensor.name: value.clone() for tensor, value in zip(self._state, state, strict=True)}
        result = call_with(self.module, tensors, args, kwargs)
        return result, tuple(tensors[tensor.name] for tensor in self._state if tensor.is_written)
