"""Compile for the CPU target: a model file in, a checked plan file out."""

import tempfile
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import ModelProto

from nimblec import __version__
from nimblec.cache.timing_cache import CachedTimer, TimingCache
from nimblec.cpu import capture
from nimblec.cpu.reference import refused_inputs, run_reference
from nimblec.cpu.timing import CpuTimer, processor
from nimblec.errors import CompileError
from nimblec.lean import LeanProcess, run_seconds
from nimblec.options import InputSpec, Observer, Options
from nimblec.planning import Provenance, make_plan
from nimblec.source import Source
from nimblec.stages import stage
from nimblert import container, golden
from nimblert.errors import InputError
from nimblert.onnx_session import onnxruntime
from nimblert.plan import Device, Plan, Target

_SEED = 0


def compile_cpu(source: Source, options: Options, output: Path, observer: Observer) -> tuple[str, ...]:
    """Write the plan of a model to ``output`` and check it; what the user should know comes back.

    Raises CompileError where the model cannot be compiled, or where the replay is not what a plain
    ONNX Runtime session computes.
    """
    if options.level:
        raise CompileError(
            f"-O{options.level}: only CUDA plans have levels; a CPU plan is what ONNX Runtime's optimiser makes of the "
            "model, as -O0 is: leave -O out, or compile for --target cuda"
        )
    if options.precision not in {"keep", "fp32"}:
        raise CompileError(
            f"--precision {options.precision}: only CUDA plans have it; a CPU plan computes in the model's own types: "
            "convert the model itself, or compile for --target cuda"
        )
    try:
        run_s, notes = _write_plan(source, options, output, observer)  # and let go of all it mapped
    except MemoryError as exc:
        raise CompileError(f"the model needs more memory than there is: {exc}") from exc
    with stage(observer, "check"), LeanProcess(Target.CPU) as lean:
        problem = lean.differing_output(output, run_s=run_s)
        if problem:
            raise CompileError(problem)
    return notes


def _write_plan(source: Source, options: Options, output: Path, observer: Observer) -> tuple[float, tuple[str, ...]]:
    """Write the plan; the seconds that a run takes, and what the user should know."""
    with tempfile.TemporaryDirectory(prefix="nimblec-", dir=output.parent) as scratch:  # where room for a plan is
        path, notes = Path(source.model), tuple[str, ...]()
        specs, dims, examples = options.inputs, options.dims, _examples(options)
        if source.kind != "onnx":
            with stage(observer, "export to ONNX"):
                from nimblec.frontend.pytorch import onnx_export, sources  # which bring in torch

                call = sources.load(source, options)
                path, notes = onnx_export.export(call, Path(scratch))
                specs, dims, examples = (), (), ()  # the file has the shapes of the call
        with stage(observer, "read"):
            model = capture.read(path, specs, dims, examples)
        with stage(observer, "optimise"):
            graph = capture.capture_model(model, path.parent, _sample_ranges(options), Path(scratch))
        with stage(observer, "schedule"):
            provenance = Provenance(target=Target.CPU, device=Device(name="cpu"), versions=_versions())
            cache = TimingCache(options.timing_cache)
            timer = CachedTimer(CpuTimer(), cache, replace(provenance.device, name=processor()))
            try:
                plan = make_plan(graph, provenance, timer, streams=options.streams, memory_limit=options.memory_limit)
            except InputError as exc:
                raise refused_inputs(exc) from exc
            cache.save()
            notes += cache.notes
        with stage(observer, "golden run"):
            plan = _with_golden(plan, model, path.parent)
    with stage(observer, "write"):
        container.write(plan, output)
    return run_seconds(plan.programs[0]), notes


def _examples(options: Options) -> tuple[InputSpec, ...]:
    """What the examples say of their inputs."""
    return tuple(InputSpec(name=name, shape=array.shape, dtype=array.dtype.name) for name, array in options.examples)


def _sample_ranges(options: Options) -> dict[str, tuple[int, int]]:
    integers = {name: array for name, array in options.examples if array.dtype.kind in "iu" and array.size}
    return {name: (int(array.min()), int(array.max())) for name, array in integers.items()}


def _versions() -> tuple[tuple[str, str], ...]:
    return (("nimblec", __version__), ("onnx", onnx.__version__), ("onnxruntime", onnxruntime().__version__))


def _with_golden(plan: Plan, model: ModelProto, folder: Path) -> Plan:
    """The plan with the record of what a plain ONNX Runtime session makes of random inputs."""
    (program,) = plan.programs
    outputs = run_reference(model, folder, golden.draw_inputs(program, _SEED))
    return replace(plan, programs=(replace(program, golden=golden.record(_SEED, outputs, 0.0)),))
