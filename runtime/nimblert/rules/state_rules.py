"""The rules of a plan's state: its tensors have distinct names, and every access is within one of them."""

from bisect import bisect_right
from collections.abc import Iterator

from nimblert.ordering.pieces import reads, writes
from nimblert.plan import Access, Plan, Program, Region


def problems(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each rule that the state of a plan breaks."""
    named = [tensor.name for tensor in plan.state if tensor.name]
    if len(set(named)) != len(named):
        yield "state: two have the same name"
    for i, tensor in enumerate(plan.state):
        if not tensor.name.isprintable():
            yield f"state[{i}].name: {tensor.name!r} is not printable"
    starts = [tensor.offset for tensor in plan.state]
    ends = [tensor.offset + tensor.data.nbytes for tensor in plan.state]
    for i, program in enumerate(plan.programs):
        for j, access in _accesses(program):
            start, end = access.pointer.offset, access.pointer.offset + access.nbytes
            first = bisect_right(starts, start) - 1
            in_region = start >= 0 and end <= plan.state_nbytes  # else that is said elsewhere
            if in_region and (first < 0 or end > ends[first]):
                where = f"programs[{i}].commands[{j}]"
                yield f"{where}: {access.nbytes} bytes at {start} of STATE lie in no one tensor of it"


def _accesses(program: Program) -> Iterator[tuple[int, Access]]:
    """The accesses of each command of a program, by its index, to the state."""
    for index, command in program.work:
        for access in (*reads(command), *writes(command)):
            if access.pointer.region is Region.STATE and access.nbytes > 0:
                yield index, access


def writes_state(program: Program) -> bool:
    """Whether a run changes the state: padding must not get into what later runs read."""
    return any(tensor.pointer.region is Region.STATE for tensor in program.inputs) or any(
        access.pointer.region is Region.STATE for _, command in program.work for access in writes(command)
    )
