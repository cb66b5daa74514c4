"""The pipeline: a model as a user gives it becomes a checked plan."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from nimblec.base.errors import CompileError, missing_package
from nimblec.base.options import MOST_PROFILES, Options, SizeRange, TargetChoice
from nimblec.base.source import Source
from nimblec.base.stages import Observer, Stopwatch, stage
from nimblec.find_source import find_source
from nimblec.plan import encoder
from nimblec.plan.plan_cache import compile_once
from nimblec.plan.stripping import strip
from nimblert.check.verify import read_plan
from nimblert.cuda import driver
from nimblert.errors import CudaError, DeviceMismatchError
from nimblert.plan import Fit, Plan, Target
from nimblert.plan.files import destination, scratch_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A plan, the seconds each stage took, and notes for the user."""

    plan: Plan
    stages: tuple[tuple[str, float], ...]
    notes: tuple[str, ...]


def choose_target(choice: TargetChoice) -> tuple[Target, str]:
    """Return the target to compile for, and why in a few words.

    Raises DeviceMismatchError if CUDA is requested and not available.
    """
    if choice == "cpu":
        return Target.CPU, "asked for"
    if choice.startswith("sm_"):
        return Target.CUDA, f"{choice}, by its record"
    try:
        driver.initialise()
        found = driver.describe().name
    except DeviceMismatchError as exc:
        reason = str(exc).removeprefix("this plan needs a GPU, and ")
        if choice == "cuda":
            raise DeviceMismatchError(f"target cuda needs a GPU to compile on, and {reason}") from exc
        return Target.CPU, reason
    except CudaError as exc:
        if choice == "cuda":
            raise
        return Target.CPU, str(exc)
    return Target.CUDA, f"found {found}"


def compile_model(
    model: Any,
    example_inputs: Any = None,
    kwargs: Any = None,
    *,
    options: Options,
    output: Path | None = None,
    weights: Path | None = None,
    compress_weights: bool = False,
    observer: Observer,
    dynamic_shapes: Any = None,
) -> Compiled:
    """Compile a model to a plan, in the file ``output`` where one is named.

    ``model``, ``example_inputs``, ``kwargs`` and ``dynamic_shapes`` are what `nimblec.compile` takes. The
    file is written under another name, checked, and renamed: whatever goes wrong, an older file is still
    there. A symbolic link stays, and what it leads to is replaced. ``weights`` is a file for the weights, of which the
    plan is then stripped; ``compress_weights`` compresses those that shrink instead. Raises ArgumentError,
    CompileError, DeviceMismatchError.
    """
    target, _ = choose_target(options.target)
    stopwatch = Stopwatch(observer)
    with _folder(output) as folder:
        written = folder / "model.plan"
        try:
            source = find_source(model, example_inputs, kwargs, folder, dynamic_shapes)
            _refuse_for_pytorch(source, options)
            compiler = partial(_compile, target)
            notes = compile_once(compiler, source, target, options, written, stopwatch)
            chooses_kernels = target is Target.CUDA and (options.level == 2 or options.is_for_absent)
            # Kernels are chosen anew for each size, in minutes.
            if not chooses_kernels and (every := _every_size(options, written)) is not None:
                # A size between those of a range may not suit the model.
                with suppress(CompileError):
                    notes = compile_once(compiler, source, target, every, folder / "every.plan", stopwatch)
                    notes += ("every size of a range has a program, since calls cannot be padded",)
                    (folder / "every.plan").replace(written)
        except ModuleNotFoundError as exc:
            raise missing_package(exc) or exc from exc
        if weights is not None:
            strip(written, weights)
        elif compress_weights:
            encoder.write(read_plan(written), written, compress_weights=True)
        if output is not None:
            written.replace(destination(output))
        # The mapping outlives the temporary file.
        plan = read_plan(output or written, check_digest=False)
    return Compiled(plan=plan, stages=tuple(stopwatch.stages), notes=notes)


_MOST_OPS = 4096
"""The most ops, of all programs together, of a plan with a program for every size of a range."""


def _every_size(options: Options, path: Path) -> Options | None:
    """Return options with every size of the ranges within which calls cannot be padded; None if there are too many.

    ``path`` is the plan for the ends of the ranges.
    """
    if not any(isinstance(sizes, SizeRange) for _, sizes in options.sizes):
        return None
    plan = read_plan(path, check_digest=False)
    fits = [dict(zip((name for name, _ in p.profile), p.fits, strict=False)) for p in plan.programs]
    ranges = {name for name, sizes in options.sizes if isinstance(sizes, SizeRange)}
    refused = {name for name in ranges if any(of.get(name, Fit.EXACT) is Fit.EXACT for of in fits)}
    every = options.filling(refused)
    count = prod(len(sizes) for _, sizes in every.sizes)
    ops = max(len(program.ops) for program in (*plan.programs, *plan.bodies))
    return every if refused and count <= MOST_PROFILES and count * ops <= _MOST_OPS else None


def _refuse_for_pytorch(source: Source, options: Options) -> None:
    """Raise CompileError for options that only an ONNX model takes, where the model is another."""
    if source.kind == "onnx":
        return
    if options.constants:
        raise CompileError(
            f"--constant {options.constants[0][0]}: only inputs of an ONNX model become constants; an argument of a "
            "PyTorch model that is no tensor is a constant already: give a number in its example, or set it in a "
            "function around the model"
        )
    if options.named_inputs:
        spec = options.named_inputs[0]
        name = next(given for given in spec.shape if isinstance(given, str))
        raise CompileError(
            f"--input {spec.name}: {name!r} is no size, and only dimensions of an ONNX model get names there; those of "
            "a PyTorch model get theirs in Python, by dynamic_shapes"
        )


def _compile(target: Target, source: Source, options: Options, output: Path, observer: Observer) -> tuple[str, ...]:
    """Write a plan with the target's compiler, which brings in the frameworks it needs."""
    if source.live is not None and source.live.dynamic_shapes is not None:
        from nimblec.pytorch.dynamic_export import export_dynamic

        with stage(observer, "export"):
            source = export_dynamic(source.live, options)
    if target is Target.CUDA:
        from nimblec.cuda.compile import compile_cuda

        notes: tuple[str, ...] = ()
        if source.kind in {"live", "entries"}:
            from nimblec.onnx_export.value_sizes import as_onnx
            from nimblec.pytorch.handover import ValueSizesError, hand_over

            with stage(observer, "export"):
                try:
                    source, options, notes = hand_over(source, options, output.parent)
                except ValueSizesError as exc:
                    source, options, notes = as_onnx(exc.call, options, output.parent)
        return (*notes, *compile_cuda(source, options, output, observer))
    from nimblec.cpu.ort_process import own_process

    with own_process():
        # Imports onnx while the lean process starts.
        with stage(observer, "import"):
            from nimblec.cpu.compile import compile_cpu

        return compile_cpu(source, options, output, observer)


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """Yield a folder to build the file in, beside its final place, so that renaming it is atomic."""
    parent = destination(output).parent if output else None
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder(parent))
        except OSError as exc:
            raise CompileError(f"{output}: nothing can be written in {parent}: {exc.strerror}") from exc
        yield folder
