"""Record the framework's results, write the plan, and check that it gives the same results."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nimblec.base.errors import CompileError
from nimblec.base.ir import ProgramKey
from nimblec.cuda import accuracy
from nimblec.cuda.reports import Reports
from nimblec.cuda.request import CompileRequest
from nimblec.cuda.selection import Recorded
from nimblec.plan import encoder
from nimblec.plan.fits import find_fits
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
        if request.options.sizes:
            with reports.stage("padding"), code.ignoring():
                plan, notes = find_fits(plan)
            reports.note(notes)
        with reports.stage("write"):
            encoder.write(plan, request.output)
        with reports.stage("check"):
            problem = lean.differing_output(request.output, run_s=run_seconds(plan))
            if problem:
                reports.problem(problem.sentence)  # in case the search below ends the process
                raise CompileError(f"{problem.sentence}; {_diagnosis(plan, problem, recorded)}")


def _with_golden(
    program: Program, recorded: Recorded, original: "TorchModel", request: CompileRequest, reports: Reports
) -> Program:
    """The program with the framework's results for seeded inputs, and the difference between two runs."""
    inputs = golden.draw_inputs(program, _SEED)
    first, second = recorded.recorder.compute(inputs), recorded.recorder.compute(inputs)
    tolerance = accuracy.spread(first, second)
    if tolerance:
        apart = f"two runs of the framework on equal inputs differ by {tolerance:.2g} of the largest magnitude"
        reports.note([f"{apart}: the plan is checked within that spread"])
    if recorded.model is not original:
        reference = partial(recorded.recorder.compute, model=original)
        reports.note(accuracy.report(program, reference, recorded.recorder.compute, request.options.max_error))
    return replace(program, golden=golden.record(_SEED, first, tolerance))


def _diagnosis(plan: Plan, problem: DifferingOutput, recorded: Mapping[ProgramKey, Recorded]) -> str:
    """The place where the replay of a program departs from the framework."""
    from nimblec.cuda.diagnosis import first_difference

    program = next(p for p in plan.programs if p.name == problem.program)
    assert program.golden is not None
    inputs = golden.draw_inputs(program, _SEED)
    recording = recorded[program.entry, program.profile].recording
    try:
        return first_difference(recording, plan.device, inputs, program.golden)
    except CudaError as exc:
        return f"the first op whose result differs could not be found: {exc}"
