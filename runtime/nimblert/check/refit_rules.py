"""The rules of refits: the weights that each replaces, and those that it may read.

A weight is replaced by one refit at most: given, as an input that lies there, or made, by a command that writes all of
it. Of the weights, a refit reads only those given to it and those that none replaces. So no refit depends on another,
and their order does not matter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nimblert.arrays import layouts
from nimblert.check.extents import MAX_RANK, under
from nimblert.plan import ITEM_NBYTES, Access, Plan, Program, Region, Role, Tensor, Weight
from nimblert.plan.pieces import reads, writes


@dataclass(slots=True)
class _Owners:
    """The refits by the weight that they are given or make, and by the name of an input."""

    at: Mapping[int, int]
    """The index of each weight that has bytes, by its offset."""
    given: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)


def problems(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each rule of refits, besides those of all programs, that ``plan`` breaks."""
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
    """The index of the weight that has exactly these bytes, or None."""
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
    """The writes or reads of the commands, each with its path in the plan."""
    of = writes if written else reads
    for i, command in refit.work:
        for access in of(command):
            if access.nbytes:
                yield f"commands[{i}].{'writes' if written else 'reads'}", access
