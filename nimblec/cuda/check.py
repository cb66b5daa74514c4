"""Record the framework's results, write the plan, and check that it gives the same results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from nimblec.base.difference import difference, numbers
from nimblec.base.errors import CompileError
from nimblec.base.ir import ProgramKey
from nimblec.cuda.proofs import prove_programs
from nimblec.cuda.reports import Reports
from nimblec.cuda.request import CompileRequest
from nimblec.cuda.selection import Recorded
from nimblec.padding.fits import find_fits
from nimblec.plan import encoder
from nimblec.plan.lean import DifferingOutput, LeanProcess, run_seconds
from nimblert import golden
from nimblert.errors import CudaError
from nimblert.plan import Plan, Program, Target

if TYPE_CHECKING:
    from nimblec.cuda.capture.cupti import CodeRecorder
    from nimblec.pytorch.model import TorchModel

_SEED = 0


def write_checked(
    plan: Plan,
    request: CompileRequest,
    reports: Reports,
    recorded: Mapping[ProgramKey, Recorded],
    originals: "Mapping[ProgramKey, TorchModel]",
    code: "CodeRecorder",
) -> None:
    """Write the plan of the ``recorded`` variants to the request's file, with golden records.

    Raises CompileError if the plan's results are not the framework's, or if the variants differ from the ``originals``
    by more than the request allows.
    """
    with LeanProcess(Target.CUDA) as lean:
        with reports.stage("run the framework"):
            runs = zip(plan.programs, recorded.values(), originals.values(), strict=True)
            plan = replace(plan, programs=tuple(_with_golden(*run, request, reports) for run in runs))
        if request.options.sizes and request.source.kind != "sizes":
            with reports.stage("padding"), code.ignoring():
                plan, notes = find_fits(plan, prove_programs(plan, originals.values()))
            reports.note(notes)
        with reports.stage("write"):
            encoder.write(plan, request.output)
        with reports.stage("check"):
            problem = lean.differing_output(request.output, run_s=run_seconds(plan))
            if problem:
                # The search below may end the process.
                reports.problem(problem.sentence)
                raise CompileError(f"{problem.sentence}; {_diagnosis(plan, problem, recorded)}")


def _with_golden(
    program: Program, recorded: Recorded, original: "TorchModel", request: CompileRequest, reports: Reports
) -> Program:
    """Return the program with the framework's results for seeded inputs, and the difference between two runs."""
    inputs = golden.draw_inputs(program, _SEED)
    first, second = recorded.recorder.compute(inputs), recorded.recorder.compute(inputs)
    tolerance = spread(first, second)
    if tolerance:
        apart = f"two runs of the framework on equal inputs differ by {tolerance:.2g} of the largest magnitude"
        reports.note([f"{apart}: the plan is checked within that spread"])
    if recorded.model is not original:
        reference = partial(recorded.recorder.compute, model=original)
        beside = None
        if request.options.precision == "fp8":
            from nimblec.optimize.variants import in_float16

            beside = partial(recorded.recorder.compute, model=in_float16(original))
        reports.note(report(program, reference, recorded.recorder.compute, request.options.max_error, fp16=beside))
    return replace(program, golden=golden.record(_SEED, first, tolerance))


def _diagnosis(plan: Plan, problem: DifferingOutput, recorded: Mapping[ProgramKey, Recorded]) -> str:
    """Return the place where the replay of a program departs from the framework."""
    from nimblec.cuda.diagnosis import first_difference

    program = next(p for p in plan.programs if p.name == problem.program)
    assert program.golden is not None
    inputs = golden.draw_inputs(program, _SEED)
    recording = recorded[program.entry, program.profile].recording
    try:
        return first_difference(recording, plan.device, inputs, program.golden)
    except CudaError as exc:
        return f"the first op whose result differs could not be found: {exc}"


_SEEDS = 3

Compute: TypeAlias = Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]
"""A model: its outputs in program order, from inputs by name."""


def spread(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    """Return the largest difference of two runs, relative to the largest magnitude of an output."""
    return max((difference(a, b).relative for a, b in zip(first, second, strict=True)), default=0.0)


def report(
    program: Program,
    original: Compute,
    changed: Compute,
    allowed: float | None,
    *,
    seeds: int = _SEEDS,
    fp16: Compute | None = None,
) -> Iterator[str]:
    """Yield a sentence for each output with the largest and the mean of its relative differences, and fp16's beside.

    Raises CompileError for one that differs by more than ``allowed``.
    """
    computed = (original, changed) if fp16 is None else (original, changed, fp16)
    drawn = (golden.draw_inputs(program, seed) for seed in range(seeds))
    runs = [[compute(inputs) for compute in computed] for inputs in drawn]
    for position, output in enumerate(program.outputs):
        arrays = [[outputs[position] for outputs in run] for run in runs]
        largest, mean = _errors([(expected, found) for expected, found, *_ in arrays])
        sentence = (
            f"output {output.name!r} differs from -O0 by at most {largest:.2g}, {mean:.2g} on average, of its largest "
            "magnitude"
        )
        if allowed is not None and not largest <= allowed:
            raise CompileError(f"{sentence}; --max-error allows {allowed:.2g}: use -O0 and --precision keep")
        if fp16 is not None:
            beside = _errors([(expected, found) for expected, _, found in arrays])
            sentence += f" (fp16: {beside[0]:.2g}, {beside[1]:.2g})"
        yield sentence


def _errors(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Return the largest and the mean of the relative differences of pairs of arrays."""
    return max(difference(a, b).relative for a, b in pairs), sum(_mean_error(a, b) for a, b in pairs) / len(pairs)


def _mean_error(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the mean difference of values finite in both, relative to the largest magnitude expected; 0 for none."""
    if expected.shape != found.shape:
        return float("inf")
    a, b = numbers(expected), numbers(found)
    finite = np.isfinite(a) & np.isfinite(b)
    scale = float(np.abs(a[finite]).max(initial=0.0))
    return float(np.abs(a[finite] - b[finite]).mean()) / scale if scale > 0 else 0.0
