"""The rules of a plan's state: its tensors have distinct names, and every access is within one of them."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from nimblert.plan import Access, Plan, Program, Region, Target, Weight, Work
from nimblert.plan.pieces import reads, writes


def problems(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each rule that the state of a plan breaks."""
    named = [tensor.name for tensor in plan.state if tensor.name]
    if len(set(named)) != len(named):
        yield "state: two have the same name"
    for i, tensor in enumerate(plan.state):
        if not tensor.name.isprintable():
            yield f"state[{i}].name: {tensor.name!r} is not printable"
        elif not tensor.name and plan.target is Target.CPU:
            yield f"state[{i}].name: is empty, as only that of scratch memory of a GPU's kernels may be"
    for i, program in enumerate(plan.programs):
        for j, access in _accesses(program, reads, writes):
            start, end = access.pointer.offset, access.pointer.offset + access.nbytes
            in_region = start >= 0 and end <= plan.state_nbytes  # else that is said elsewhere
            if in_region and _tensor(plan.state, access) is None:
                where = f"programs[{i}].commands[{j}]"
                yield f"{where}: {access.nbytes} bytes at {start} of STATE lie in no one tensor of it"


def _accesses(program: Program, *kinds: Callable[[Work], Iterable[Access]]) -> Iterator[tuple[int, Access]]:
    """The accesses of these kinds, of each command of a program, by its index, to the state."""
    for index, command in program.work:
        for access in chain.from_iterable(kind(command) for kind in kinds):
            if access.pointer.region is Region.STATE and access.nbytes > 0:
                yield index, access


def _tensor(state: Sequence[Weight], access: Access) -> Weight | None:
    """The tensor of the state that an access lies in, if it lies in one."""
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
    """Whether a run of a program changes what later runs read: tensors of the plan's ``state`` that have a name."""
    if any(tensor.pointer.region is Region.STATE for tensor in program.inputs):
        return True
    found = (_tensor(state, access) for _, access in _accesses(program, writes))
    return any(tensor is None or tensor.name for tensor in found)
