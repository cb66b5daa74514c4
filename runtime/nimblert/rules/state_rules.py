"""The rules of a plan's state: tensors that a user can ask for by name, and that a reset gives back whole."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from nimblert.plan import Access, Command, Launch, Memcpy, Memset, Plan, Program, Region


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
    """What each command of a program, by its index, touches of the state."""
    for index, command in enumerate(program.commands):
        for access in _touched(command):
            if access.pointer.region is Region.STATE and access.nbytes > 0:
                yield index, access


def _touched(command: Command) -> tuple[Access, ...]:
    match command:
        case Launch():
            return (*command.reads, *command.writes)
        case Memcpy():
            return tuple(Access(pointer=pointer, nbytes=command.nbytes) for pointer in (command.dst, command.src))
        case Memset():
            return (Access(pointer=command.dst, nbytes=command.count * command.element_nbytes),)
    return ()


def writes_state(program: Program) -> bool:
    """Whether a run changes the state, which later runs read: it may not hold what stands for nothing."""
    return any(region is Region.STATE for region in _written(program))


def _written(program: Program) -> Iterable[Region]:
    for tensor in program.inputs:
        yield tensor.pointer.region
    for command in program.commands:
        match command:
            case Launch():
                yield from (access.pointer.region for access in command.writes)
            case Memcpy() | Memset():
                yield command.dst.region
