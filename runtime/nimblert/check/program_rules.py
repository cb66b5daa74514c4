"""The rules of entries, bodies, refits and state: what programs must agree in, and what they may access."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from nimblert.arrays import layouts
from nimblert.check.bounds import under
from nimblert.plan import (
    ITEM_NBYTES,
    Access,
    Crop,
    Fit,
    Plan,
    Profile,
    Program,
    Region,
    Role,
    Switch,
    Target,
    Tensor,
    Weight,
    While,
    Work,
)
from nimblert.plan.dimensions import Axes, Shapes, profile_text, shapes_of
from nimblert.plan.pieces import bodies_of, reads, writes
from nimblert.plan.records import MAX_RANK

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
            yield f"{path}.role: {program.role.name}, expected ENTRY"
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
        why = why_exact(plan.state, program)
        for (name, size), fit in zip(program.profile, program.fits, strict=True):
            if fit is Fit.EXACT:
                continue
            if name not in taken or name in axes.bound or size < 1:
                yield f"{path}: {name}={size} is {fit.name}, and no axis of an input is {name!r} in all programs alike"
            elif fit is Fit.SPLIT and any(of.count(name) != 1 for of in axes.outputs):
                yield f"{path}: {name!r} is SPLIT, expected one axis of it in each output"
            elif why:
                yield f"{path}: {name!r} is {fit.name}, and the program {why}"


def why_exact(state: Sequence[Weight], program: Program) -> str:
    """Return what keeps a program from serving calls of other sizes, as the end of a sentence; "" if nothing does."""
    if writes_state(state, program):
        return "writes the state"
    return "crops an output" if any(isinstance(work, Crop) for _, work in program.work) else ""


_MOST_DEPTH = 16
"""How deep loops and branches may be nested."""


def roots(plan: Plan) -> dict[int, Program]:
    """Return the entry that runs each body, directly or from within other bodies, by the body's index."""
    found: dict[int, Program] = {}
    for program in plan.programs:
        waiting = [program]
        while waiting:
            for _, work in waiting.pop().work:
                for body in bodies_of(work):
                    if 0 <= body < len(plan.bodies) and body not in found:
                        found[body] = program
                        waiting.append(plan.bodies[body])
    return found


def body_problems(plan: Plan, trips: int) -> Iterator[str]:
    """Yield a sentence for each rule of bodies, and of the commands that run them, that the plan breaks.

    Each body is run by one command, of an entry or of a body before it, and accesses nothing but what that command
    declares. A loop may make as many ``trips``, and its body writes the condition.
    """
    depth: dict[int, int] = {}
    for path, programs in (("programs", plan.programs), ("bodies", plan.bodies)):
        for i, program in enumerate(programs):
            first, outer = (i + 1, depth.get(i, 0)) if path == "bodies" else (0, 0)
            for j, work in program.work:
                of_runs = _run_problems(work, plan, first, depth, outer + 1)
                for problem in chain(of_runs, _control_problems(work, trips)):
                    yield f"{path}[{i}].commands[{j}].{problem}"
    for i, refit in enumerate(plan.refits):
        if any(isinstance(work, While | Switch) for _, work in refit.work):
            yield f"refits[{i}]: runs a body, which a refit may not"
    for i, body in enumerate(plan.bodies):
        if i not in depth:
            yield f"bodies[{i}]: no command runs it"
        elif depth[i] > _MOST_DEPTH:
            yield f"bodies[{i}]: is nested {depth[i]} deep, expected at most {_MOST_DEPTH}"
        yield from under(f"bodies[{i}]", _body_problems(body))


def _run_problems(work: Work, plan: Plan, first: int, depth: dict[int, int], own: int) -> Iterator[str]:
    """Yield a sentence for each body that a command may not run; set the ``depth`` of the others to ``own``."""
    for body in bodies_of(work):
        if not first <= body < len(plan.bodies):
            yield f"bodies: runs bodies[{body}], expected one from {first} to {len(plan.bodies) - 1}"
        elif body in depth:
            yield f"bodies: runs bodies[{body}], which another command runs too"
        else:
            depth[body] = own
            yield from _access_problems(work, plan.bodies[body])


def _body_problems(body: Program) -> Iterator[str]:
    if body.role is not Role.BODY:
        yield f"role: {body.role.name}, expected BODY"
    if body.inputs or body.outputs or body.input_nbytes or body.output_nbytes or body.arena_nbytes:
        yield "arena_nbytes: expected no memory and tensors of its own: it uses those of the entry that runs it"
    if body.golden or body.schedule or body.profile or body.fits:
        yield "profile: a body has no profile, golden record or schedule"


def _control_problems(work: Work, trips: int) -> Iterator[str]:
    match work:
        case While():
            if work.limit > trips:
                yield f"limit: {work.limit}, the limit is {trips}: raise it (nimblert.Limits) if you trust the plan"
            condition = Access(pointer=work.condition, nbytes=1)
            if not (_Ranges(work.reads).cover(condition) and _Ranges(work.writes).cover(condition)):
                yield "condition: expected a byte that is written before the loop and in its body"
        case Switch():
            if not work.bodies:
                yield "bodies: there are none"
            if not _Ranges(work.reads).cover(Access(pointer=work.index, nbytes=1)):
                yield "index: is not among the reads"


def _access_problems(work: Work, body: Program) -> Iterator[str]:
    """Yield a sentence for each access of a body that the command that runs it does not declare."""
    written = _Ranges(writes(work))
    used = _Ranges((*reads(work), *writes(work)))
    for i, inner in body.work:
        for what, accesses, declared in (("reads", reads(inner), used), ("writes", writes(inner), written)):
            for access in accesses:
                if access.nbytes > 0 and access.pointer.region is not Region.WEIGHTS and not declared.cover(access):
                    yield f"body: commands[{i}] {what} what the command that runs the body does not declare"
    if isinstance(work, While):
        condition = Access(pointer=work.condition, nbytes=1)
        if not _Ranges(access for _, inner in body.work for access in writes(inner)).cover(condition):
            yield "condition: the body never writes it, so the loop would not end"


class _Ranges:
    """The bytes of some accesses, by region: disjoint ranges in ascending order."""

    def __init__(self, accesses: Iterable[Access]) -> None:
        self._of: defaultdict[tuple[Region, int], list[tuple[int, int]]] = defaultdict(list)
        for access in sorted(accesses, key=lambda a: a.pointer.offset):
            start, end = access.pointer.offset, access.pointer.offset + access.nbytes
            ranges = self._of[access.pointer.region, access.pointer.index]
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            else:
                ranges.append((start, end))

    def cover(self, access: Access) -> bool:
        """Return whether all bytes of an access are among these."""
        start = access.pointer.offset
        ranges = self._of.get((access.pointer.region, access.pointer.index), [])
        at = bisect_right(ranges, start, key=lambda found: found[0]) - 1
        return at >= 0 and start + access.nbytes <= ranges[at][1]


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
    for path, programs in (("programs", plan.programs), ("bodies", plan.bodies)):
        for where, access in (
            (f"{path}[{i}].commands[{j}]", access)
            for i, program in enumerate(programs)
            for j, access in _state_accesses(program, reads, writes)
        ):
            start, end = access.pointer.offset, access.pointer.offset + access.nbytes
            # Another rule reports accesses outside of the region.
            in_region = start >= 0 and end <= plan.state_nbytes
            if in_region and _state_tensor(plan.state, access) is None:
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
    return tensor if start + access.nbytes <= tensor.offset + tensor.nbytes else None


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
    owners = _Owners(at={weight.offset: i for i, weight in enumerate(plan.weights) if weight.nbytes})
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
        there = plan.weights[weight] if weight >= 0 else None
        if there is None or (there.dtype, there.nbytes) != (tensor.dtype, tensor.span_nbytes):
            yield "pointer: no weight of this dtype and size lies there"
        elif owners.given.setdefault(weight, index) != index:
            yield f"pointer: weights[{weight}] is given to refits[{owners.given[weight]}] too"
    elif pointer.region is not Region.INPUT or pointer.offset:
        yield f"pointer: byte {pointer.offset} of {pointer.region.name}, expected a weight or an INPUT"


_NOT_WHOLE = "{} bytes at {} of WEIGHTS are no whole weight"


def _whole(access: Access, plan: Plan, owners: _Owners) -> int | None:
    """Return the index of the weight that has exactly these bytes, or None."""
    weight = owners.at.get(access.pointer.offset)
    return weight if weight is not None and plan.weights[weight].nbytes == access.nbytes else None


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
