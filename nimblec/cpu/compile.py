"""Compile for the CPU target: a model file in, a checked plan file out."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from nimblec.assembly import Provenance, assemble
from nimblec.cache.timing_cache import CachedTimer, TimingCache
from nimblec.cpu import capture
from nimblec.cpu.reference import ReferenceModel, refused_inputs
from nimblec.cpu.refit.programs import assemble_refittable
from nimblec.cpu.refit.refittable import Model, Refittable, make_refittable
from nimblec.cpu.sources import sources_of
from nimblec.cpu.state_check import DifferenceError, refuse_differing_steps
from nimblec.cpu.timing import CpuTimer
from nimblec.errors import CompileError
from nimblec.fits import find_fits, mark_masks
from nimblec.frontend.onnx import model_file
from nimblec.installation import VERSION
from nimblec.ir import Graph, KernelWork, Part, ProgramKey, program_name
from nimblec.lean import LeanProcess, run_seconds
from nimblec.machine import processor
from nimblec.options import InputSpec, Options, sample_range
from nimblec.planning import choose_schedule
from nimblec.source import Source
from nimblec.stages import Observer, stage
from nimblert import golden
from nimblert.arrays.dtypes import numpy_dtype
from nimblert.cpu.onnx_session import onnxruntime
from nimblert.errors import InputError
from nimblert.files import container
from nimblert.plan import Device, Plan, Profile, Program, Target

if TYPE_CHECKING:
    from nimblec.frontend.pytorch.onnx_export import ExportedModel  # which brings in torch

_SEED = 0
_ROUNDED_BY_THREADS = (
    "compared with ONNX Runtime on one thread: it splits sums of this model by the number of its threads, and rounds "
    "differently with another number"
)


def compile_cpu(source: Source, options: Options, output: Path, observer: Observer) -> tuple[str, ...]:
    """Write the plan of a model to ``output`` and check it; returns notes for the user.

    Raises CompileError if the model cannot be compiled, or if the replay differs from a plain ONNX Runtime
    session.
    """
    if options.level:
        raise CompileError(
            f"-O{options.level}: only CUDA plans have levels; a CPU plan is the model as ONNX Runtime's optimiser "
            "leaves it: leave -O out, or compile for --target cuda"
        )
    if options.precision not in {"keep", "fp32"}:
        raise CompileError(
            f"--precision {options.precision}: only CUDA plans have it; a CPU plan computes in the model's own types: "
            "convert the model itself, or compile for --target cuda"
        )
    try:
        return _write_checked(source, options, output, observer)
    except DifferenceError:
        notes = _write_checked(source, options, output, observer, threads=1)
    return (*notes, _ROUNDED_BY_THREADS)


def _write_checked(
    source: Source, options: Options, output: Path, observer: Observer, threads: int | None = None
) -> tuple[str, ...]:
    """Write a plan and compare it with a plain session, both on ``threads`` or on as many as they like (None).

    Returns notes for the user. Raises DifferenceError where it computes something else.
    """
    try:
        run_s, notes = _write_plan(source, options, output, observer, threads)  # and unmap everything
    except MemoryError as exc:
        raise CompileError(f"the model needs more memory than there is: {exc}") from exc
    with stage(observer, "check"), LeanProcess(Target.CPU, threads=threads) as lean:
        problem = lean.differing_output(output, run_s=run_s)
        if problem:
            raise DifferenceError(problem.sentence)
    return notes


def _write_plan(
    source: Source, options: Options, output: Path, observer: Observer, threads: int | None
) -> tuple[float, tuple[str, ...]]:
    """Write the plan; returns the seconds that a run takes, and notes for the user."""
    with tempfile.TemporaryDirectory(prefix="nimblec-", dir=output.parent) as scratch:  # a disk with room for a plan
        exported: dict[ProgramKey, ExportedModel] = {}
        if source.kind != "onnx":
            with stage(observer, "export to ONNX"):
                exported = _exported(source, options, Path(scratch))
        notes = tuple(dict.fromkeys(chain.from_iterable(model.notes for model in exported.values())))
        with stage(observer, "read"):
            models = [
                replace(_read(source, options, entry, profile, exported.get((entry, profile))), threads=threads)
                for entry, profile in exported or [("main", profile) for profile in options.profiles]
            ]
            _refuse_equal_shapes(models)
        with stage(observer, "optimise"):
            weights = [exported[m.entry, m.profile].weights if exported else None for m in models]
            graphs, refittable = _optimised(models, weights, options, Path(scratch))
            notes += tuple(_pass_notes(models, graphs)) if options.print_passes else ()
        with stage(observer, "schedule"):
            cache = TimingCache(None if options.reproducible else options.timing_cache)
            parts = _scheduled(models, graphs, options, cache)
            cache.save()
            plan, found = _assembled(parts, refittable)
            plan = mark_masks(plan, options.pad_masks)
            notes += tuple(dict.fromkeys(chain.from_iterable(part.notes for part in parts)))
            notes += (*cache.notes, *found)
        with stage(observer, "golden run"):
            programs = (_with_golden(p, model) for p, model in zip(plan.programs, models, strict=True))
            plan = replace(plan, programs=tuple(programs))
            if plan.state:
                refuse_differing_steps(plan, models)
        if options.sizes:
            with stage(observer, "padding"):
                plan, found = find_fits(plan)
                notes += found
    with stage(observer, "write"):
        container.write(plan, output)
    return run_seconds(plan), notes


def _exported(source: Source, options: Options, scratch: Path) -> "dict[ProgramKey, ExportedModel]":
    """Each entry as an ONNX file, for all profiles; one for each where runs write state."""
    from nimblec.frontend.pytorch import dynamic_onnx, onnx_export, sources  # which bring in torch

    if not options.sizes:
        files = onnx_export.export(sources.load(source, options), scratch, refittable=options.refittable)
        return {(entry, ()): model for entry, model in files.items()}
    dynamic = sources.dynamic_program(source, options)
    if dynamic.writes_state:
        by_profile = dynamic.calls(options)
        calls = {program_name("main", profile): call for profile, call in by_profile.items()}
        files = onnx_export.export(calls, scratch, refittable=options.refittable)
        return {("main", profile): files[program_name("main", profile)] for profile in by_profile}
    return dict.fromkeys(
        (("main", profile) for profile in options.profiles), dynamic_onnx.export(dynamic, options, scratch)
    )


def _read(
    source: Source, options: Options, entry: str, profile: Profile, exported: "ExportedModel | None"
) -> ReferenceModel:
    """The model of a program; ``exported`` where it is not a file of the user."""
    path = Path(source.model) if exported is None else exported.path
    if exported is None or exported.is_dynamic:
        proto = capture.read(
            path, options.inputs, options.dims, _examples(options), profile, options.named_inputs, options.constants
        )
    else:
        proto = capture.read(path)
    state = () if exported is None else exported.state
    ranges = {**({} if exported is None else exported.ranges), **_sample_ranges(options)}
    return ReferenceModel(entry=entry, profile=profile, folder=path.parent, proto=proto, state=state, ranges=ranges)


def _optimised(
    models: Sequence[ReferenceModel], weights: Sequence[frozenset[str] | None], options: Options, scratch: Path
) -> tuple[list[Graph], list[Refittable]]:
    """The models as graphs, and how they were made refittable, if they were.

    ``weights`` are the names of the weights of each that a module holds under the same name; None if no module.
    """
    if not options.refittable:
        return [
            capture.capture_model(m.proto, m.folder, m.ranges, scratch, m.state, names)
            for m, names in zip(models, weights, strict=True)
        ], []
    given = [Model(proto=m.proto, folder=m.folder, names=names) for m, names in zip(models, weights, strict=True)]
    made = make_refittable(given, scratch)
    graphs = [
        capture.graph_of(one.optimized, m.ranges, m.state, sources=sources_of(m.proto, one.optimized.proto.graph.node))
        for m, one in zip(models, made, strict=True)
    ]
    return graphs, made


def _pass_notes(models: Sequence[ReferenceModel], graphs: Sequence[Graph]) -> Iterator[str]:
    """The nodes of each program before and after ONNX Runtime's optimiser, the only pass of this target."""
    for model, graph in zip(models, graphs, strict=True):
        program = f" of {program_name(model.entry, model.profile)}" if models[1:] else ""
        after = sum(isinstance(task.work, KernelWork) for task in graph.tasks)
        yield f"optimise: ONNX Runtime{program}: {len(model.proto.graph.node)} nodes -> {after}"


def _assembled(parts: Sequence[Part], refittable: Sequence[Refittable]) -> tuple[Plan, tuple[str, ...]]:
    """The plan without golden records, and notes for the user."""
    if refittable:
        return assemble_refittable(parts, _provenance(), refittable)
    return assemble(parts, _provenance()), ()


def _refuse_equal_shapes(models: Sequence[ReferenceModel]) -> None:
    """Raise CompileError where two profiles of an entry take inputs of the same shapes."""
    found: dict[tuple[object, ...], ReferenceModel] = {}
    for model in models:
        shapes = tuple(tensor.shape for tensor in model_file.inputs(model.proto))
        other = found.setdefault((model.entry, shapes), model)
        if other is not model:
            raise CompileError(
                f"--dim: inputs have the same shapes for {_text(other.profile)} and {_text(model.profile)}: give one "
                "size for a dimension that --input fixes"
            )


def _text(profile: Profile) -> str:
    return " ".join(f"{name}={size}" for name, size in profile)


def _provenance() -> Provenance:
    return Provenance(target=Target.CPU, device=Device(name="cpu"), versions=_versions())


def _scheduled(
    models: Sequence[ReferenceModel], graphs: Sequence[Graph], options: Options, cache: TimingCache
) -> list[Part]:
    """Each graph in the schedule chosen for it."""
    provenance = _provenance()
    parts = []
    for model, graph in zip(models, graphs, strict=True):
        device = replace(provenance.device, name=processor())
        timer = None if options.reproducible else CachedTimer(CpuTimer(), cache, device)
        try:
            part = choose_schedule(
                graph, provenance, timer, streams=options.streams, memory_limit=options.memory_limit
            )
        except InputError as exc:
            raise refused_inputs(exc, (numpy_dtype(view.dtype) for view in graph.inputs)) from exc
        parts.append(replace(part, entry=model.entry, profile=model.profile))
    return parts


def _examples(options: Options) -> tuple[InputSpec, ...]:
    """Shapes and dtypes of the examples."""
    return tuple(InputSpec(name=name, shape=array.shape, dtype=array.dtype.name) for name, array in options.examples)


def _sample_ranges(options: Options) -> dict[str, tuple[int, int]]:
    return {name: found for name, array in options.examples if (found := sample_range(name, array)) is not None}


def _versions() -> tuple[tuple[str, str], ...]:
    return (("nimblec", VERSION), ("onnx", onnx.__version__), ("onnxruntime", onnxruntime().__version__))


def _with_golden(program: Program, model: ReferenceModel) -> Program:
    """The program with the record of what a plain ONNX Runtime session computes from random inputs."""
    outputs, _ = model.step(golden.draw_inputs(program, _SEED), model.first_state())
    return replace(program, golden=golden.record(_SEED, outputs, 0.0))
