"""Observing calls, for traces and metrics: samples/telemetry has adapters for NVTX and OpenTelemetry."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from nimblert.calls.entries import Signature
from nimblert.errors import InputError
from nimblert.plan import Plan, Program
from nimblert.plan.dimensions import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCall:
    """A call that is about to begin.

    ``program`` is the one that serves it, the last one of a call in several runs, or None where it will be refused;
    ``shapes`` are those of the arrays given, by input name.
    """

    plan: Plan
    entry: str
    program: Program | None
    shapes: dict[str, Shape]


Observer: TypeAlias = Callable[[ObservedCall], AbstractContextManager[object]]
"""Return a context manager that is around the call, in its thread; it leaves with the call's error, if there is one."""

observer: Observer | None = None
"""The observer of this process. Without one, a call only tests this."""


def observe(function: Observer | None) -> None:
    """Have every later call of every plan in this process observed by ``function`` instead of the last one; None: none.

    Raises InputError where it cannot be called.
    """
    global observer  # noqa: PLW0603 - there is one for the process
    if not (function is None or callable(function)):
        raise InputError(f"observer: got {type(function).__name__}, expected a function that returns a context manager")
    observer = function


def observed_call(plan: Plan, signature: Signature, arrays: Any, bound: Program | None) -> ObservedCall:
    """Describe a call with ``arrays`` that are not checked yet; ``bound`` is the program that has bound arrays."""
    items = arrays.items() if isinstance(arrays, Mapping) else ()
    shapes = {name: tuple(array.shape) for name, array in items if isinstance(getattr(array, "shape", None), tuple)}
    names = [tensor.name for tensor in signature.programs[0].inputs]
    program = bound or signature.program(tuple(shapes[name] for name in names if name in shapes))
    return ObservedCall(plan=plan, entry=signature.name, program=program, shapes=shapes)


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
    """Return each launch, copy and fill of a program with its time, in issue order."""
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
