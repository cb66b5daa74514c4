"""The time of each command of a program, and the operator that it was made of."""

from collections.abc import Sequence
from dataclasses import dataclass

from nimblert.plan import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTime:
    """One launch, copy or fill, and how long it takes alone.

    ``command`` indexes `Program.commands`; ``kind`` is "launch", "memcpy" or "memset"; ``op`` and
    ``source`` are those of its `Op`.
    """

    command: int
    kind: str
    op: str
    source: str
    stream: int
    nanoseconds: int


def command_times(program: Program, nanoseconds: Sequence[int]) -> tuple[CommandTime, ...]:
    """Each launch, copy and fill of a program with its time, in issue order."""
    return tuple(
        CommandTime(
            command=index,
            kind=type(command).__name__.lower(),
            op=program.ops[command.op].name,
            source=program.ops[command.op].source,
            stream=command.stream,
            nanoseconds=duration,
        )
        for (index, command), duration in zip(program.work, nanoseconds, strict=True)
    )
