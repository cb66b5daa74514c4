"""Compile for the CPU target: a model file in, a checked plan file out."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from nimblec.base.errors import CompileError
from nimblec.base.installation import VERSION, processor
from nimblec.base.ir import Graph, KernelWork, Part, ProgramKey, program_name
from nimblec.base.options import InputSpec, Options, sample_range
from nimblec.base.source import Source
from nimblec.base.stages import Observer, stage
from nimblec.cpu import capture
from nimblec.cpu.agreement import Agreed, optimize_agreeing
from nimblec.cpu.ort_worker import trim_memory
from nimblec.cpu.reference import SEED, ReferenceModel
from nimblec.cpu.refit_programs import assemble_refittable
from nimblec.cpu.refittable import Model, Refittable, make_refittable
from nimblec.cpu.sources import sources_of
from nimblec.cpu.state_check import refuse_differing_steps
from nimblec.cpu.stretches import Joiner
from nimblec.cpu.timing import CpuTimer
from nimblec.onnx_import import model_file
from nimblec.padding.fits import Proofs, find_fits, mark_masks
from nimblec.padding.onnx_graph import prove_onnx
from nimblec.plan import encoder
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.lean import LeanProcess, run_seconds
from nimblec.plan.planning import choose_schedule
from nimblec.plan.timing_cache import CachedTimer, TimingCache
from nimblert import golden
from nimblert.cpu.onnx_session import onnxruntime
from nimblert.plan import Device, Plan, Profile, Program, Target
from nimblert.plan.dimensions import Axes

if TYPE_CHECKING:
    # Imports torch.
    from nimblec.onnx_export.export import ExportedModel


def compile_cpu(source: Source, options: Options, output: Path, observer: Observer) -> tuple[str, ...]:
    """Write the plan of a model to ``output`` and check it; returns notes for the user.

    Raises CompileError if the model cannot be compiled, or if the plan computes something else than the model.
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
        # The call's mappings of files end with it.
        run_s, notes = _write_plan(source, options, output, observer)
    except MemoryError as exc:
        raise CompileError(f"the model needs more memory than there is: {exc}") from exc
    # The process that checks needs what the sessions that were timed have left.
    trim_memory()
    # With several threads ONNX Runtime splits some sums, and rounds otherwise.
    with stage(observer, "check"), LeanProcess(Target.CPU, threads=1) as lean:
        problem = lean.differing_output(output, run_s=run_s)
        if problem:
            raise CompileError(problem.sentence)
    return notes


def _write_plan(source: Source, options: Options, output: Path, observer: Observer) -> tuple[float, tuple[str, ...]]:
    """Write the plan; returns the seconds that a run takes, and notes for the user."""
    # The output's disk has room for a plan.
    with tempfile.TemporaryDirectory(prefix="nimblec-", dir=output.parent) as scratch:
        exported: dict[ProgramKey, ExportedModel] = {}
        if source.kind != "onnx":
            with stage(observer, "export to ONNX"):
                exported = _exported(source, options, Path(scratch))
        notes = tuple(dict.fromkeys(chain.from_iterable(model.notes for model in exported.values())))
        with stage(observer, "read"):
            models = [
                _read(source, options, entry, profile, exported.get((entry, profile)))
                for entry, profile in exported or [("main", profile) for profile in options.profiles]
            ]
            _refuse_equal_shapes(models)
        with stage(observer, "optimise"):
            agreed = list(_agreed(models, exported, options, Path(scratch)))
            notes += tuple(dict.fromkeys(chain.from_iterable(one.notes for one in agreed)))
            notes += tuple(_pass_notes(agreed)) if options.print_passes else ()
            refittable: list[Refittable] = []
            graphs = [one.built for one in agreed]
            if options.refittable:
                refittable = _refittable(agreed, exported, Path(scratch))
                graphs = [_refittable_graph(one, made) for one, made in zip(agreed, refittable, strict=True)]
        with stage(observer, "schedule"):
            cache = TimingCache(None if options.reproducible else options.timing_cache)
            parts = _scheduled(models, graphs, options, cache)
            cache.save()
            plan, found = _assembled(parts, refittable)
            plan = mark_masks(plan, options.pad_masks)
            notes += tuple(dict.fromkeys(chain.from_iterable(part.notes for part in parts)))
            notes += (*cache.notes, *found)
        with stage(observer, "golden run"):
            programs = (_with_golden(p, one) for p, one in zip(plan.programs, agreed, strict=True))
            plan = replace(plan, programs=tuple(programs))
            if plan.state:
                refuse_differing_steps(plan, agreed)
        names = ", ".join(name for name, _ in options.sizes)
        if names and source.live is not None and source.live.module is not None:
            notes += (f"{names}: calls of other sizes than the plan's are refused, since the module's code fixes one",)
        elif names:
            with stage(observer, "padding"):
                plan, found = find_fits(plan, _proofs(plan, agreed))
                notes += found
    with stage(observer, "write"):
        encoder.write(plan, output)
    return run_seconds(plan), notes


def _exported(source: Source, options: Options, scratch: Path) -> "dict[ProgramKey, ExportedModel]":
    """Return each entry as an ONNX file, for all profiles; one for each where runs write state or code fixes a size."""
    from nimblec.onnx_export import dynamic as dynamic_onnx
    from nimblec.onnx_export import export as onnx_export

    # Imports torch.
    from nimblec.pytorch import sources

    if not options.sizes:
        files = onnx_export.export(
            sources.load(source, options), scratch, refittable=options.refittable, max_error=options.max_error
        )
        return {(entry, ()): model for entry, model in files.items()}
    dynamic = sources.dynamic_program(source, options)
    if dynamic.module is not None or dynamic.writes_state:
        by_profile = dynamic.calls(options)
        calls = {program_name("main", profile): call for profile, call in by_profile.items()}
        files = onnx_export.export(calls, scratch, refittable=options.refittable, max_error=options.max_error)
        return {("main", profile): files[program_name("main", profile)] for profile in by_profile}
    return dict.fromkeys(
        (("main", profile) for profile in options.profiles), dynamic_onnx.export(dynamic, options, scratch)
    )


def _read(
    source: Source, options: Options, entry: str, profile: Profile, exported: "ExportedModel | None"
) -> ReferenceModel:
    """Return the model of a program; ``exported`` where it is not a file of the user."""
    path = Path(source.model) if exported is None else exported.path
    if exported is None or exported.is_dynamic:
        proto = capture.read(
            path, options.inputs, options.dims, _examples(options), profile, options.named_inputs, options.constants
        )
    else:
        proto = capture.read(path)
    outputs = [value.name for value in proto.graph.output]
    if unknown := next((name for name, _ in options.bounds if name not in outputs), None):
        raise CompileError(f"--bound {unknown}: is not one of the model's outputs {outputs}")
    state, ranges, examples = ((), {}, {}) if exported is None else (exported.state, exported.ranges, exported.examples)
    return ReferenceModel(
        entry=entry,
        profile=profile,
        folder=path.parent,
        proto=proto,
        state=state,
        ranges={**ranges, **_sample_ranges(options)},
        examples={**examples, **dict(options.examples)},
        trip_limit=options.trip_limit,
        bounds=dict(options.bounds),
    )


def _agreed(
    models: Sequence[ReferenceModel], exported: "Mapping[ProgramKey, ExportedModel]", options: Options, scratch: Path
) -> Iterator[Agreed[Graph]]:
    """Yield the graph of each model in its optimised form."""
    without: frozenset[str] = frozenset()
    contents: dict[bytes, memoryview] = {}
    for model in models:
        capture.refuse_random(model.proto.graph)
        agreed = optimize_agreeing(
            model,
            scratch,
            partial(capture.capture_model, weights=_weights(model, exported)),
            without=without,
            approximate=options.approximate,
            max_error=options.max_error,
        )
        without |= agreed.rewriting.without
        if options.sizes and not options.refittable and not model.state:
            # Each size has a copy of the weights on disk: keep the first.
            nothing = replace(agreed.optimized, arrays={})
            agreed = replace(agreed, built=_with_contents(agreed.built, contents), optimized=nothing)
            shutil.rmtree(nothing.folder)
        yield agreed


def _with_contents(graph: Graph, contents: dict[bytes, memoryview]) -> Graph:
    """Return a graph that has equal constants where graphs before it have them; ``contents`` are those by digest.

    Constants of its own are copied, unless it is the first: the file that holds them holds all others, too.
    """
    is_first = not contents

    def content(data: memoryview) -> memoryview:
        digest = sha256(data).digest()
        if digest not in contents:
            contents[digest] = data if is_first else memoryview(bytes(data))
        return contents[digest]

    buffers = (replace(buffer, data=content(buffer.data)) if buffer.data else buffer for buffer in graph.buffers)
    bodies = tuple(replace(body, graph=_with_contents(body.graph, contents)) for body in graph.bodies)
    return replace(graph, buffers=tuple(buffers), bodies=bodies)


def _weights(model: ReferenceModel, exported: "Mapping[ProgramKey, ExportedModel]") -> frozenset[str] | None:
    """Return the names of the weights that a module holds under the same name; None if there is no module."""
    return exported[model.entry, model.profile].weights if exported else None


def _refittable(
    agreed: Sequence[Agreed[Graph]], exported: "Mapping[ProgramKey, ExportedModel]", scratch: Path
) -> list[Refittable]:
    given = [
        Model(
            proto=one.source.proto,
            folder=one.source.folder,
            plain=one.optimized,
            rewriting=one.rewriting,
            names=_weights(one.source, exported),
        )
        for one in agreed
    ]
    return make_refittable(given, scratch)


def _refittable_graph(agreed: Agreed[Graph], made: Refittable) -> Graph:
    source = agreed.source
    sources = sources_of(source.proto, made.optimized.proto.graph.node)
    return capture.graph_of(
        made.optimized,
        source.ranges,
        source.state,
        sources=sources,
        trip_limit=source.trip_limit,
        bounds=source.bounds,
    )


def _pass_notes(agreed: Sequence[Agreed[Graph]]) -> Iterator[str]:
    """Yield the nodes of each program before and after ONNX Runtime's optimiser, the only pass of this target."""
    for one in agreed:
        model = one.source
        program = f" of {program_name(model.entry, model.profile)}" if agreed[1:] else ""
        after = sum(isinstance(task.work, KernelWork) for task in one.built.tasks)
        yield f"optimise: ONNX Runtime{program}: {len(model.proto.graph.node)} nodes -> {after}"


def _assembled(parts: Sequence[Part], refittable: Sequence[Refittable]) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan without golden records, and notes for the user."""
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
    versions = (("nimblec", VERSION), ("onnx", onnx.__version__), ("onnxruntime", onnxruntime().__version__))
    return Provenance(target=Target.CPU, device=Device(name="cpu"), versions=versions)


def _scheduled(
    models: Sequence[ReferenceModel], graphs: Sequence[Graph], options: Options, cache: TimingCache
) -> list[Part]:
    """Return each graph in the schedule chosen for it."""
    provenance, joiner = _provenance(), Joiner()
    parts = []
    for model, graph in zip(models, graphs, strict=True):
        device = replace(provenance.device, name=processor())
        timer = None if options.reproducible else CachedTimer(CpuTimer(), cache, device)
        part = choose_schedule(
            graph, provenance, timer, streams=options.streams, memory_limit=options.memory_limit, join=joiner.join
        )
        parts.append(replace(part, entry=model.entry, profile=model.profile))
    return parts


def _examples(options: Options) -> tuple[InputSpec, ...]:
    """Return the shapes and dtypes of the examples."""
    return tuple(InputSpec(name=name, shape=array.shape, dtype=array.dtype.name) for name, array in options.examples)


def _sample_ranges(options: Options) -> dict[str, tuple[int, int]]:
    return {name: found for name, array in options.examples if (found := sample_range(name, array)) is not None}


def _proofs(plan: Plan, agreed: Sequence[Agreed[Graph]]) -> Proofs:
    """Return what the model of each program proves about other sizes, before ONNX Runtime's optimiser."""
    axes = Axes(plan.programs)
    return {
        program.name: prove_onnx(
            one.source.proto,
            {tensor.name: of for tensor, of in axes.of_inputs(program)},
            {tensor.name: of for tensor, of in axes.of_outputs(program)},
            dict(program.profile),
            [tensor.name for tensor in program.inputs if tensor.mask],
        )
        for program, one in zip(plan.programs, agreed, strict=True)
    }


def _with_golden(program: Program, agreed: Agreed[Graph]) -> Program:
    """Return the program with the record of what the optimised model computes from random inputs."""
    state = {tensor.output for tensor in agreed.source.state}
    named = zip((value.name for value in agreed.source.proto.graph.output), agreed.outputs, strict=True)
    return replace(program, golden=golden.record(SEED, [a for name, a in named if name not in state], 0.0))
