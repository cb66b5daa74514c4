"""Delays between the commands of a plan, which expose missing dependencies."""

import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from nimblert.plan import Command, Kernel, Launch, Module, Op, Parameter, Plan, Record, Wait

CUBIN = Path(__file__).parents[1] / "data" / "delay.sm_90.cubin"
"""The delay kernel, compiled from delay.cu for compute capability 9.0."""

_LONGEST_NS = 50_000


def with_delays(plan: Plan, seed: int, cubin: bytes) -> Plan:
    """Return the plan with delays of up to 50 us before about half of its commands, on their streams.

    These include records and waits, so that events are late. The logarithms of the lengths are uniform.
    """
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    program = plan.programs[0]
    lengths = {
        position: round(_LONGEST_NS ** generator.random())
        for position in range(len(program.commands))
        if generator.random() < 0.5
    }
    return with_delays_before(plan, lengths, cubin)


def with_delays_before(plan: Plan, lengths: Mapping[int, int], cubin: bytes) -> Plan:
    """Return the plan with a delay of ``lengths[position]`` ns before each of these commands, on its stream."""
    program = plan.programs[0]
    kernel = Kernel(module=len(plan.modules), symbol="delay", parameters=(Parameter(offset=0, nbytes=8),))
    delayed = replace(
        program,
        ops=(*program.ops, Op(name="delay", source="")),
        commands=tuple(_commands(program.commands, lengths, op=len(program.ops), kernel=len(plan.kernels))),
        schedule=None,  # its positions count the commands that were
    )
    return replace(
        plan,
        modules=(*plan.modules, Module(origin="test", code=memoryview(cubin))),
        kernels=(*plan.kernels, kernel),
        programs=(delayed,),
    )


def _commands(commands: tuple[Command, ...], lengths: Mapping[int, int], *, op: int, kernel: int) -> Iterator[Command]:
    delayed: set[int] = set()  # streams whose last work is a delay
    for position, command in enumerate(commands):
        stream = command.stream
        if position in lengths:
            delayed.add(stream)
            yield Launch(
                stream=stream,
                op=op,
                kernel=kernel,
                params=struct.pack("<Q", lengths[position]),
                relocations=(),
                reads=(),
                writes=(),
            )
        if isinstance(command, Launch) and command.programmatic and stream in delayed:
            command = replace(command, programmatic=False)  # noqa: PLW2901 - its edge is from the delay now
        if not isinstance(command, Record | Wait):
            delayed.discard(stream)
        yield command
