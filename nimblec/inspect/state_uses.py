"""The use of the state by programs: whether they write a tensor in place, copy it or only read it."""

from collections.abc import Iterator

from nimblert.plan import Access, Command, Launch, Memcpy, Memset, Plan, Pointer, Program, Region, Weight

Span = tuple[int, int]
"""The first byte in the STATE region, and the one after the last."""


def state_uses(plan: Plan) -> list[dict[str, str]]:
    """For each tensor of the state its use in each program that uses it, by the program's name.

    "in place": commands write it where it lies, a part of it or over what they read; "copied": its next value
    is made elsewhere and copied there; "read".
    """
    return [{p.name: how for p in plan.programs if (how := _use(p, tensor)) is not None} for tensor in plan.state]


def _use(program: Program, tensor: Weight) -> str | None:
    start, end = tensor.offset, tensor.offset + tensor.data.nbytes
    found = None
    for command in program.commands:
        reads, writes = (
            any(first < end and start < last for first, last in spans) for spans in (_reads(command), _writes(command))
        )
        if writes and isinstance(command, Memcpy):
            return "copied"
        if writes:
            found = "in place"
        elif reads and found is None:
            found = "read"
    return found


def _reads(command: Command) -> Iterator[Span]:
    if isinstance(command, Launch):
        yield from _spans(command.reads)
    elif isinstance(command, Memcpy):
        yield from _span(command.src, command.nbytes)


def _writes(command: Command) -> Iterator[Span]:
    if isinstance(command, Launch):
        yield from _spans(command.writes)
    elif isinstance(command, Memcpy):
        yield from _span(command.dst, command.nbytes)
    elif isinstance(command, Memset):
        yield from _span(command.dst, command.count * command.element_nbytes)


def _spans(accesses: tuple[Access, ...]) -> Iterator[Span]:
    for access in accesses:
        yield from _span(access.pointer, access.nbytes)


def _span(pointer: Pointer, nbytes: int) -> Iterator[Span]:
    if pointer.region is Region.STATE:
        yield pointer.offset, pointer.offset + nbytes
