"""How much a plan may ask of this machine: ceilings that `verify` holds a plan against."""

from collections.abc import Iterator
from dataclasses import dataclass

from nimblert.plan import Plan, Program, Target, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most of each thing that a plan may have; nothing is allocated before it is held against them.

    - ``memory_nbytes``: the arena, the state, inputs and outputs of all programs together, which is what
      an executable allocates beside the weights. ``tensor_nbytes``: one input, output, parameter or weight,
      its elements side by side.
    - Of the ONNX models of a CPU plan: ``model_nbytes``, one of them; ``model_fields``, the protobuf
      fields of all of them together, each of which is a Python object while it is checked.
    - ``modules``, ``kernels``, ``programs``; and of one program ``streams``, ``events``, ``commands``.
    - ``refits``, the groups of weights that are replaced together.
    - What the proof of order may take for one program: ``pieces``, the byte ranges that commands
      access, cut where others begin or end; ``clocks``, waits times streams.
    """

    memory_nbytes: int = 64 << 30
    tensor_nbytes: int = 16 << 30
    model_nbytes: int = 64 << 20
    model_fields: int = 1 << 22
    modules: int = 1 << 17
    kernels: int = 1 << 17
    programs: int = 1 << 10
    refits: int = 1 << 16
    streams: int = 1 << 10
    events: int = 1 << 20
    commands: int = 1 << 20
    pieces: int = 1 << 24
    clocks: int = 1 << 25


DEFAULT_LIMITS = Limits()
"""What a plan may have unless the caller says otherwise: far more than any model that nimblec is tested with."""


def problems(plan: Plan, limits: Limits) -> Iterator[str]:
    """Yield a sentence for each ceiling that ``plan`` goes beyond; `verify` judges single tensors."""
    yield from _beyond("modules", len(plan.modules), limits.modules)
    yield from _beyond("kernels", len(plan.kernels), limits.kernels)
    yield from _beyond("programs", len(plan.programs), limits.programs)
    yield from _beyond("refits", len(plan.refits), limits.refits)
    if plan.target == Target.CPU:
        for i, module in enumerate(plan.modules):
            yield from _beyond(f"modules[{i}].code", module.code.nbytes, limits.model_nbytes, " bytes")
    passed = sum(sum(program.input_nbytes) + sum(program.output_nbytes) for program in plan.programs)
    yield from _beyond("memory", plan.state_nbytes + plan.arena_nbytes + passed, limits.memory_nbytes, " bytes")
    for path, programs in (("programs", plan.programs), ("refits", plan.refits)):
        for i, program in enumerate(programs):
            for sentence in _program_problems(program, limits):
                yield f"{path}[{i}].{sentence}"
    for i, refit in enumerate(plan.refits):
        yield from _beyond(
            f"refits[{i}].memory", refit.arena_nbytes + sum(refit.input_nbytes), limits.memory_nbytes, " bytes"
        )


def _program_problems(program: Program, limits: Limits) -> Iterator[str]:
    yield from _beyond("stream_count", program.stream_count, limits.streams)
    yield from _beyond("event_count", program.event_count, limits.events)
    yield from _beyond("commands", len(program.commands), limits.commands)
    waits = sum(isinstance(command, Wait) for command in program.commands)
    yield from _beyond("commands", waits * program.stream_count, limits.clocks, " waits times streams")


def _beyond(what: str, found: int, limit: int, unit: str = "") -> Iterator[str]:
    if found > limit:
        yield f"{what}: {found}{unit}, the limit is {limit}: raise it (nimblert.Limits) if you trust the plan"
