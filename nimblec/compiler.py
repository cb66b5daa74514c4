"""The pipeline: a model as a user gives it becomes a checked plan."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nimblec.errors import CompileError, missing_package
from nimblec.options import Observer, Options, TargetChoice
from nimblec.plan_cache import compile_once
from nimblec.scratch import scratch_folder
from nimblec.source import Source, find_source
from nimblec.stages import stage
from nimblert import container, driver
from nimblert.errors import CudaError, DeviceMismatchError
from nimblert.plan import Plan, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A plan, the seconds of each stage that made it, and what the user should know."""

    plan: Plan
    stages: tuple[tuple[str, float], ...]
    notes: tuple[str, ...]


def choose_target(choice: TargetChoice) -> tuple[Target, str]:
    """The target to compile for, and why in a few words.

    Raises DeviceMismatchError where CUDA is asked for and not here.
    """
    if choice == "cpu":
        return Target.CPU, "asked for"
    try:
        driver.initialise()
        found = driver.describe().name
    except (DeviceMismatchError, CudaError) as exc:
        if choice == "cuda":
            raise
        return Target.CPU, str(exc).removeprefix("this plan needs a GPU, and ")
    return Target.CUDA, f"found {found}"


class _Stopwatch:
    """Passes stages on to an observer and keeps their seconds."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.stages: list[tuple[str, float]] = []

    def __call__(self, stage: str, seconds: float | None) -> None:
        if seconds is not None:
            self.stages.append((stage, seconds))
        self._observer(stage, seconds)


def compile_model(
    model: Any,
    example_inputs: Any = None,
    kwargs: Any = None,
    *,
    options: Options,
    output: Path | None = None,
    observer: Observer,
) -> Compiled:
    """Compile a model to a plan, in the file ``output`` where one is named.

    ``model``, ``example_inputs`` and ``kwargs`` are what `nimblec.compile` takes. The file is written
    under another name, checked, and renamed: whatever goes wrong, an older file is still there.
    Raises ArgumentError, CompileError, DeviceMismatchError.
    """
    target, _ = choose_target(options.target)
    stopwatch = _Stopwatch(observer)
    with scratch_folder(_folder(output)) as folder:
        written = folder / "model.plan"
        try:
            source = find_source(model, example_inputs, kwargs, folder)
            notes = compile_once(partial(_compile, target), source, target, options, written, stopwatch)
        except ModuleNotFoundError as exc:
            raise missing_package(exc) or exc from exc
        if output is not None:
            os.replace(written, output)  # noqa: PTH105 - one call that cannot leave half a file
        plan = container.read(output or written)  # the mapping outlives the temporary file
    return Compiled(plan=plan, stages=tuple(stopwatch.stages), notes=notes)


def _compile(target: Target, source: Source, options: Options, output: Path, observer: Observer) -> tuple[str, ...]:
    """Write a plan with the target's compiler, which brings in the frameworks it needs."""
    if target is Target.CUDA:
        from nimblec.cuda.compile import compile_cuda

        notes: tuple[str, ...] = ()
        if source.live is not None:
            from nimblec.frontend.handover import hand_over  # brings in torch

            with stage(observer, "export"):
                source, notes = hand_over(source, options, output.parent)
            options = replace(options, inputs=(), dims=(), examples=())  # which the exported model has
        return (*notes, *compile_cuda(source, options, output, observer))
    from nimblec.cpu.compile import compile_cpu

    return compile_cpu(source, options, output, observer)


def _folder(output: Path | None) -> Path | None:
    """Where to build the file: beside its final place, so that renaming it is atomic."""
    if output is None:
        return None
    folder = output.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CompileError(f"{output}: the folder {folder} does not exist or cannot be written")
    if output.is_dir():
        raise CompileError(f"{output}: is a folder, expected the name of a file")
    return folder
