"""The checks of `nimblec verify`, in order."""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nimblec.cuda.capture.cubin_reading import entry_symbols
from nimblec.inspect import certificate
from nimblec.padding.fits import differences
from nimblert import golden
from nimblert.check import hazards
from nimblert.check.verify import check, read_plan
from nimblert.errors import DeviceMismatchError, PlanFormatError, PlanInvalidError
from nimblert.golden import Verdict
from nimblert.loading import load
from nimblert.plan import Plan, Program, Target, parts
from nimblert.plan.external import filled
from nimblert.plan.signatures import Trust

CPU_ROUNDING = 1e-4
"""ONNX Runtime chooses its kernels by the CPU's instruction set, so another CPU may round otherwise."""


class Result(enum.Enum):
    """The outcome of a check; SKIPPED where this machine or this plan gives it nothing to check."""

    PASSED = "ok"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: what it looked at, and a sentence for each thing it found."""

    name: str
    result: Result
    sentences: tuple[str, ...]


def verify(path: Path, trust: Trust | None = None, weights: Path | None = None) -> Iterator[Check]:
    """Check a plan file: first without running it, then by its golden record if this machine can run it.

    A plan that was stripped of its weights is run if ``weights`` names their file. Stops at a failure that makes later
    checks meaningless. Raises PlanError if the file cannot be read, PlanSignatureError if no key of ``trust`` has
    signed it, InputError for weights that are not its own.
    """
    try:
        plan = read_plan(path, trust=trust, fat=True)
        if weights is not None:
            plan = filled(plan, weights, copy=trust is not None)
            check(plan)
    except PlanInvalidError as exc:
        yield _passed("format", "decodes, undamaged")
        yield Check(name="rules", result=Result.FAILED, sentences=exc.problems)
        return
    except PlanFormatError as exc:
        yield Check(name="format", result=Result.FAILED, sentences=(str(exc),))
        return
    if trust is not None:
        yield _passed("signature", "a trusted key has signed the file")
    yield _passed("format", "decodes, undamaged")
    yield _passed("rules", "references, bounds and launch limits are in order")
    if plan.target is not Target.FAT:
        yield from _checks(plan)
        return
    for index in range(len(plan.parts)):
        part = parts.filled(parts.read(plan, index, str(path)), plan)
        yield from (replace(check, name=f"part {index + 1}, {check.name}") for check in _checks(part))


def _checks(plan: Plan) -> Iterator[Check]:
    """Check a plan that follows the rules, and run it if this machine can."""
    found = (
        f"program {program.name!r}: {hazard}"
        for program in (*plan.programs, *plan.refits)
        for hazard in hazards.hazards(program, target=plan.target, bodies=plan.bodies)
    )
    yield _judged("hazards", found, "conflicting accesses are ordered, also between buffers that share memory")
    for program in plan.programs:
        yield _schedule(plan, program)
    yield _symbols(plan)
    if plan.is_stripped:
        yield Check(name="golden", result=Result.SKIPPED, sentences=("the plan is stripped: give --weights FILE",))
        return
    for program in plan.programs:
        yield from _golden(plan, program)
    if any(program.profile for program in plan.programs):
        yield _padding(plan)


def _passed(name: str, sentence: str) -> Check:
    return Check(name=name, result=Result.PASSED, sentences=(sentence,))


def _judged(name: str, problems: Iterable[str], sentence: str) -> Check:
    found = tuple(problems)
    return Check(name=name, result=Result.FAILED, sentences=found) if found else _passed(name, sentence)


def _schedule(plan: Plan, program: Program) -> Check:
    name, record = check_name("schedule", plan, program), program.schedule
    if record is None:
        return Check(name=name, result=Result.SKIPPED, sentences=("the plan does not say how it was made",))
    count = len(record.antichain)
    if certificate.is_widest(record.policy):
        proof = f"streams: {program.stream_count}, the fewest possible, since no event orders {count} of its commands"
    else:
        proof = f"streams for full concurrency: {count}, the largest number of mutually independent commands"
    return _judged(name, certificate.problems(program, record), f"policy {record.policy!r}; {proof}")


def check_name(name: str, plan: Plan, program: Program) -> str:
    """Return the name of a check of one of a plan's programs."""
    return name if len(plan.programs) == 1 else f"{name} of {program.name!r}"


def _symbols(plan: Plan) -> Check:
    if plan.target is not Target.CUDA:
        return Check(name="symbols", result=Result.SKIPPED, sentences=("the plan holds no cubins",))
    sentence = f"{len(plan.modules)} cubins hold the {len(plan.kernels)} kernels"
    return _judged("symbols", missing_symbols(plan), sentence)


def missing_symbols(plan: Plan) -> Iterator[str]:
    """Yield every kernel whose symbol is not an entry point of its cubin, and every module that is not a cubin."""
    entries: dict[int, frozenset[str]] = {}
    for index, module in enumerate(plan.modules):
        try:
            entries[index] = entry_symbols(module.code)
        except PlanFormatError as exc:
            yield f"modules[{index}]: {exc}"
    for index, kernel in enumerate(plan.kernels):
        if kernel.module in entries and kernel.symbol not in entries[kernel.module]:
            yield f"kernels[{index}].symbol: {kernel.symbol!r} is not in modules[{kernel.module}]"


def _golden(plan: Plan, program: Program) -> Iterator[Check]:
    name = check_name("golden", plan, program)
    if program.golden is None:
        yield Check(name=name, result=Result.SKIPPED, sentences=("the plan holds no golden record",))
        return
    try:
        executable = load(plan, program=program.name)
    except DeviceMismatchError as exc:
        yield Check(name=name, result=Result.SKIPPED, sentences=(str(exc),))
        return
    with executable:
        outputs = executable.run(golden.draw_inputs(program, program.golden.seed))
    rounding = CPU_ROUNDING if plan.target is Target.CPU else 0.0
    compared = golden.check(program.golden, tuple(outputs.values()), rounding=rounding)
    for output, comparison in zip(outputs, compared, strict=True):
        result = Result.FAILED if comparison.verdict is Verdict.DIFFERENT else Result.PASSED
        yield Check(name=name, result=result, sentences=(f"output {output!r}: {comparison}",))


def _padding(plan: Plan) -> Check:
    if not any(any(program.fits) for program in plan.programs):
        return Check(name="padding", result=Result.SKIPPED, sentences=("the programs serve no sizes but their own",))
    try:
        agree = "runs that are padded or split give what the programs of those sizes give"
        return _judged("padding", differences(plan), agree)
    except DeviceMismatchError as exc:
        return Check(name="padding", result=Result.SKIPPED, sentences=(str(exc),))
