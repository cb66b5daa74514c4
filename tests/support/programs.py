"""Programs written by hand, command by command."""

from dataclasses import replace
from typing import Any, TypeVar

from nimblert.plan import Access, Command, Device, Launch, Op, Plan, Pointer, Program, Record, Region, Target

Frozen = TypeVar("Frozen")
EMPTY = Plan(
    producer="tests",
    versions=(),
    target=Target.CPU,
    device=Device(name="cpu"),
    modules=(),
    kernels=(),
    weights_nbytes=0,
    weights=(),
    state_nbytes=0,
    state=(),
    programs=(),
)


def with_program(record: Frozen, **changes: Any) -> Frozen:
    """Return a plan or program with other fields."""
    return replace(record, **changes)  # type: ignore[type-var]


def bare(*programs: Program, **fields: Any) -> Plan:
    """Return a plan without code and weights, for the CPU unless ``fields`` tell otherwise."""
    return replace(EMPTY, programs=programs, **fields)


def at(region: Region, offset: int, nbytes: int = 64) -> Access:
    """Return an access to ``nbytes`` bytes of a region."""
    return Access(pointer=Pointer(region=region, offset=offset), nbytes=nbytes)


def work(
    stream: int, duration_ns: int = 0, *, op: int = 0, reads: tuple[Access, ...] = (), writes: tuple[Access, ...] = ()
) -> Launch:
    """Return a launch of kernel 0 that needs no parameters."""
    return Launch(
        stream=stream, op=op, kernel=0, params=b"", relocations=(), reads=reads, writes=writes, duration_ns=duration_ns
    )


def planned(*commands: Command, **fields: Any) -> Program:
    """Return a program of these commands, with as many streams and events as they use, and other ``fields``."""
    made = Program(
        name="main",
        inputs=(),
        outputs=(),
        input_nbytes=(),
        output_nbytes=(),
        arena_nbytes=1024,
        stream_count=max((command.stream + 1 for command in commands), default=0),
        event_count=sum(isinstance(command, Record) for command in commands),
        ops=(Op(name="aten.add.Tensor", source="layer.1"),),
        commands=commands,
    )
    return replace(made, **fields)
