"""The rules of limits: a plan asks for no more than the caller allows."""

from collections.abc import Iterator

from nimblert.plan import Plan, Program, Target, Wait
from nimblert.plan.limits import Limits


def problems(plan: Plan, limits: Limits) -> Iterator[str]:
    """Yield a sentence for each limit that ``plan`` exceeds; `verify` checks single tensors."""
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
