"""The rules of entries, refits and state: what the programs of a plan must agree in, and what they may access."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from nimblert.arrays import layouts
from nimblert.check.bounds import MAX_RANK, under
from nimblert.plan import ITEM_NBYTES, Access, Fit, Plan, Profile, Program, Region, Role, Target, Tensor, Weight, Work
from nimblert.plan.dimensions import Axes, Shapes, profile_text, shapes_of
from nimblert.plan.pieces import reads, writes

_Signature: TypeAlias = tuple[object, ...]
"""The properties that all programs of an entry share."""


def entry_problems(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each program that is not distinct within its entry, or whose fits are wrong.

    The programs of an entry differ in sizes alone, and can serve the sizes that their fits declare.
    """
    first: dict[str, tuple[int, _Signature]] = {}
    taken: dict[tuple[str, Shapes], int] = {}
    profiles: dict[tuple[str, frozenset[tuple[str, int]]], int] = {}
    of_entries: defaultdict[str, dict[int, Program]] = defaultdict(dict)
    for i, program in enumerate(plan.programs):
        path = f"programs[{i}]"
        broken = tuple(_profile_problems(f"{path}.profile", program.profile))
        yield from broken
        yield from (f"{path}.outputs[{j}].mask: only inputs are masks" for j, t in enumerate(program.outputs) if t.mask)
        if program.role is not Role.ENTRY:
            yield f"{path}.role: {program.role.name}, which no command runs"
            continue
        if not broken:
            of_entries[program.entry][i] = program
        signature = _signature(program)
        other, expected = first.setdefault(program.entry, (i, signature))
        if signature != expected:
            yield f"{path}: takes or gives other tensors than programs[{other}], which is of the same entry"
        same = profiles.setdefault((program.entry, frozenset(program.profile)), i)
        if same != i:
            yield f"{path}.profile: {profile_text(program.profile)}, as programs[{same}] of the same entry"
        same = taken.setdefault((program.entry, shapes_of(program.inputs)), i)
        if same != i:
            yield f"{path}.inputs: have the shapes of programs[{same}], which is of the same entry"
    for programs in of_entries.values():
        if len({_signature(program) for program in programs.values()}) == 1:
            yield from _fit_problems(plan, programs)


def _profile_problems(path: str, profile: Profile) -> Iterator[str]:
    names = [name for name, _ in profile]
    if len(names) > MAX_RANK:
        yield f"{path}: {len(names)} dimensions, expected at most {MAX_RANK}"
    elif len(set(names)) != len(names) or not all(name.isprintable() and name for name in names):
        yield f"{path}: {names}, expected a name for each dimension, no two the same"
    elif not all(0 <= size < 1 << 63 for _, size in profile):
        yield f"{path}: {profile_text(profile)}, expected sizes below {1 << 63}"


def _signature(program: Program) -> _Signature:
    sides = (tuple((t.name, t.dtype, len(t.shape)) for t in side) for side in (program.inputs, program.outputs))
    return (*sides, frozenset(name for name, _ in program.profile))


def _fit_problems(plan: Plan, programs: Mapping[int, Program]) -> Iterator[str]:
    """Yield a sentence for each fit that the shapes of an entry contradict; ``programs`` are by index in the plan.

    They must agree in their tensors and in the names of their profiles.
    """
    if not any(program.fits for program in programs.values()):
        return
    axes = Axes(list(programs.values()))
    taken = {name for of in axes.inputs for name in of}
    for i, program in programs.items():
        path = f"programs[{i}].fits"
        if len(program.fits) != len(program.profile):
            yield f"{path}: {len(program.fits)}, expected one for each of {len(program.profile)} dimensions"
            continue
        if all(fit is Fit.EXACT for fit in program.fits):
            continue
        stateful = writes_state(plan.state, program)
        for (name, size), fit in zip(program.profile, program.fits, strict=True):
            if fit is Fit.EXACT:
                continue
            if name not in taken or name in axes.bound or size < 1:
                yield f"{path}: {name}={size} is {fit.name}, and no axis of an input is {name!r} in all programs alike"
            elif fit is Fit.SPLIT and any(of.count(name) != 1 for of in axes.outputs):
                yield f"{path}: {name!r} is SPLIT, expected one axis of it in each output"
            elif stateful:
                yield f"{path}: {name!r} is {fit.name}, and the program writes the state"


def state_problems(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each rule that the state of a plan breaks.

    Its tensors have distinct names, and every access is within one of them.
    """
    named = [tensor.name for tensor in plan.state if tensor.name]
    if len(set(named)) != len(named):
        yield "state: two have the same name"
    for i, tensor in enumerate(plan.state):
        if not tensor.name.isprintable():
            yield f"state[{i}].name: {tensor.name!r} is not printable"
        elif not tensor.name and plan.target is Target.CPU:
            yield f"state[{i}].name: is empty, as only that of scratch memory of a GPU's kernels may be"
    for i, program in enumerate(plan.programs):
        for j, access in _state_accesses(program, reads, writes):
            start, end = access.pointer.offset, access.pointer.offset + access.nbytes
            # Another rule reports accesses outside of the region.
            in_region = start >= 0 and end <= plan.state_nbytes
            if in_region and _state_tensor(plan.state, access) is None:
                where = f"programs[{i}].commands[{j}]"
                yield f"{where}: {access.nbytes} bytes at {start} of STATE lie in no one tensor of it"


def _state_accesses(program: Program, *kinds: Callable[[Work], Iterable[Access]]) -> Iterator[tuple[int, Access]]:
    """Yield the accesses of these kinds, of each command of a program, by its index, to the state."""
    for index, command in program.work:
        for access in chain.from_iterable(kind(command) for kind in kinds):
            if access.pointer.region is Region.STATE and access.nbytes > 0:
                yield index, access


def _state_tensor(state: Sequence[Weight], access: Access) -> Weight | None:
    """Return the tensor of the state that an access lies in, if it lies in one."""
    start = access.pointer.offset
    index = bisect_right(state, start, key=lambda tensor: tensor.offset) - 1
    if index < 0:
        return None
    tensor = state[index]
    return tensor if start + access.nbytes <= tensor.offset + tensor.data.nbytes else None


def keeps_state(plan: Plan) -> bool:
    """Return whether a run of the plan changes what later runs read."""
    return any(writes_state(plan.state, program) for program in plan.programs)


def writes_state(state: Sequence[Weight], program: Program) -> bool:
    """Return whether a run of a program writes a tensor of ``state`` that has a name."""
    if any(tensor.pointer.region is Region.STATE for tensor in program.inputs):
        return True
    found = (_state_tensor(state, access) for _, access in _state_accesses(program, writes))
    return any(tensor is None or tensor.name for tensor in found)


@dataclass(slots=True)
class _Owners:
    """The refits by the weight that they are given or make, and by the name of an input."""

    at: Mapping[int, int]
    """The index of each weight that has bytes, by its offset."""
    given: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)


def refit_problems(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each rule of refits, besides those of all programs, that ``plan`` breaks.

    A weight is replaced by one refit at most: given, as an input that lies there, or made, by a command that writes all
    of it. Of the weights, a refit reads only those given to it and those that none replaces. So no refit depends on
    another, and their order does not matter.
    """
    owners = _Owners(at={weight.offset: i for i, weight in enumerate(plan.weights) if weight.data.nbytes})
    for i, refit in enumerate(plan.refits):
        yield from under(f"refits[{i}]", _record_problems(refit))
        for j, tensor in enumerate(refit.inputs):
            yield from under(f"refits[{i}].inputs[{j}]", _input_problems(i, tensor, plan, owners))
    for i, refit in enumerate(plan.refits):
        for path, access in _accesses(refit, written=True):
            yield from (f"refits[{i}].{path}: {found}" for found in _write_problems(i, access, plan, owners))
    for i, refit in enumerate(plan.refits):
        for path, access in _accesses(refit, written=False):
            yield from (f"refits[{i}].{path}: {found}" for found in _read_problems(i, access, plan, owners))


def _record_problems(refit: Program) -> Iterator[str]:
    if refit.role is not Role.REFIT:
        yield f"role: {refit.role.name}, expected REFIT"
    if refit.outputs or refit.output_nbytes:
        yield f"outputs: {len(refit.outputs)}, expected none: what a refit makes are weights"
    if refit.stream_count > 1 or refit.event_count:
        yield f"stream_count: {refit.stream_count}, expected one stream and no events"
    if not refit.inputs:
        yield "inputs: none, expected the weights that are given"
    if refit.golden or refit.schedule or refit.profile:
        yield "profile: a refit has no profile, golden record or schedule"


def _input_problems(index: int, tensor: Tensor, plan: Plan, owners: _Owners) -> Iterator[str]:
    other = owners.named.setdefault(tensor.name, index)
    if other != index:
        yield f"name: {tensor.name!r} is an input of refits[{other}] too"
    if tensor.dtype not in ITEM_NBYTES or len(tensor.shape) > MAX_RANK or len(tensor.strides) != len(tensor.shape):
        return  # other rules report it
    if not tensor.span_nbytes:
        return  # an empty tensor is nowhere
    if not layouts.is_dense(tensor.shape, tensor.strides):
        yield f"strides: {tensor.strides}, expected those of {tensor.shape} in some order of its axes, without holes"
    pointer = tensor.pointer
    if pointer.region is Region.WEIGHTS:
        weight = owners.at.get(pointer.offset, -1)
        if weight < 0 or not _holds(plan.weights[weight], tensor):
            yield "pointer: no weight of this dtype and size lies there"
        elif owners.given.setdefault(weight, index) != index:
            yield f"pointer: weights[{weight}] is given to refits[{owners.given[weight]}] too"
    elif pointer.region is not Region.INPUT or pointer.offset:
        yield f"pointer: byte {pointer.offset} of {pointer.region.name}, expected a weight or an INPUT"


def _holds(weight: Weight, tensor: Tensor) -> bool:
    return (weight.dtype, weight.data.nbytes) == (tensor.dtype, tensor.span_nbytes)


_NOT_WHOLE = "{} bytes at {} of WEIGHTS are no whole weight"


def _whole(access: Access, plan: Plan, owners: _Owners) -> int | None:
    """Return the index of the weight that has exactly these bytes, or None."""
    weight = owners.at.get(access.pointer.offset)
    return weight if weight is not None and plan.weights[weight].data.nbytes == access.nbytes else None


def _write_problems(index: int, access: Access, plan: Plan, owners: _Owners) -> Iterator[str]:
    pointer = access.pointer
    if pointer.region is not Region.WEIGHTS:
        if pointer.region is not Region.ARENA:
            yield f"is in {pointer.region.name}, expected WEIGHTS or ARENA"
        return
    weight = _whole(access, plan, owners)
    if weight is None:
        yield _NOT_WHOLE.format(access.nbytes, pointer.offset)
    elif weight in owners.given:
        yield f"weights[{weight}] is given to refits[{owners.given[weight]}], and not made"
    elif owners.made.setdefault(weight, index) != index:
        yield f"weights[{weight}] is made by refits[{owners.made[weight]}] too"


def _read_problems(index: int, access: Access, plan: Plan, owners: _Owners) -> Iterator[str]:
    pointer = access.pointer
    if pointer.region is not Region.WEIGHTS:
        if pointer.region is Region.STATE:
            yield "is in STATE, which a refit may not access"
        return
    weight = _whole(access, plan, owners)
    if weight is None:
        yield _NOT_WHOLE.format(access.nbytes, pointer.offset)
    elif weight in owners.made:
        yield f"weights[{weight}] is made by refits[{owners.made[weight]}], and no refit depends on another"
    elif owners.given.get(weight, index) != index:
        yield f"weights[{weight}] is given to refits[{owners.given[weight]}]"


def _accesses(refit: Program, *, written: bool) -> Iterator[tuple[str, Access]]:
    """Yield the writes or reads of the commands, each with its path in the plan."""
    of = writes if written else reads
    for i, command in refit.work:
        for access in of(command):
            if access.nbytes:
                yield f"commands[{i}].{'writes' if written else 'reads'}", access
