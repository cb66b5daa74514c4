"""The capture process: ``python -m nimblec.cuda.worker REQUEST.json EVENTS_FD``.

CUPTI must be subscribed before CUDA starts, and torch's allocator exchanged, so every capture has a
fresh process. It reads one request, writes the plan file, and reports on a pipe: one JSON object a
line, {"stage", "seconds"}, {"note"}, {"problem"}, or as the last {"error", "message"} or
{"unforeseen", "traceback"}.
"""

import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nimblec.assembly import Provenance, assemble
from nimblec.cache.timing_cache import CachedTimer, TimingCache
from nimblec.cuda import accuracy
from nimblec.cuda.common_state import refuse_folded_state
from nimblec.cuda.request import CompileRequest
from nimblec.cuda.timing import CudaTimer
from nimblec.errors import CompileError, TraceError, UnsupportedModelError, described, missing_package, unforeseen
from nimblec.fits import find_fits, mark_masks
from nimblec.ir import Graph, Part, program_name
from nimblec.lean import LeanProcess, run_seconds
from nimblec.options import Options
from nimblec.planning import choose_schedule
from nimblec.stages import stage
from nimblert import container, driver, golden
from nimblert.errors import NimbleError
from nimblert.plan import Device, Plan, Profile, Program, Target

if TYPE_CHECKING:
    import torch

    from nimblec.cuda.recording.record import ModelRecorder, Recorders, Recording
    from nimblec.cuda.refit.refittable import Refittable
    from nimblec.frontend.onnx.importer import Weigh
    from nimblec.frontend.pytorch.model import ModelCall, TorchModel
    from nimblec.levels.variants import Variant
    from nimblec.optimize.pipeline import Step

_Key: TypeAlias = tuple[str, Profile]
"""An entry and a profile."""

_SEED = 0
_NEW_OBJECTS = 100_000
"""Between two collections of garbage: imports and graphs are a million objects, which live on."""


def main(request_path: str, events_fd: int) -> int:
    """Serve one request; 0 where the plan file was written."""
    with os.fdopen(events_fd, "w", buffering=1) as events:
        try:
            request = CompileRequest.from_json(Path(request_path).read_text())
            sys.path[:0] = request.sys_path
            _Worker(request, events).compile()
        except NimbleError as exc:
            _send(events, error=type(exc).__name__, message=str(exc))
        except Exception as exc:  # noqa: BLE001 - frameworks raise anything, and the user is to be told
            missing = missing_package(exc) if isinstance(exc, ModuleNotFoundError) else None
            if missing is not None:
                _send(events, error=type(missing).__name__, message=str(missing))
            else:
                _send(events, unforeseen=described(exc), traceback=traceback.format_exc())
        else:
            return 0
    return 2


def _send(events: IO[str], **message: Any) -> None:
    events.write(json.dumps(message) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A variant of the model, recorded and scheduled; ``duration_ns`` is its plan's time on the GPU."""

    name: str
    model: "TorchModel"
    recorder: "ModelRecorder"
    recording: "Recording"
    part: Part
    duration_ns: int


def _with_weights(made: _Made, original: "TorchModel") -> Graph:
    from nimblec.cuda.given_weights import with_weights

    return with_weights(made.part.graph, original, as_it_runs=made.model is original)


class _Worker:
    def __init__(self, request: CompileRequest, events: IO[str]) -> None:
        self._request = request
        self._events = events
        self._cache = TimingCache(request.timing_cache)
        self._noted: set[str] = set()
        self._models: list[TorchModel] = []
        """All that are in this process: those asked for, and their variants."""

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return stage(lambda stage, seconds: _send(self._events, stage=stage, seconds=seconds), name)

    def compile(self) -> None:
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # --precision says that
        with self._stage("import the framework"):
            from nimblec.cuda.recording.allocator import BumpAllocator
            from nimblec.cuda.recording.cupti import CodeRecorder
            from nimblec.cuda.recording.record import Recorders
            from nimblec.cuda.recording.residents import storages
            from nimblec.kernels.core import triton_start
        with self._stage("initialise CUDA"):
            driver.bindings()
            code = CodeRecorder()
            code.start()
            driver.initialise()
            allocator = BumpAllocator()
            allocator.install()
            if self._request.level > 1:
                triton_start.begin()
        with self._stage("load the model"):
            originals = self._with_common_state(self._load_models())
            recorders = Recorders(code=code, allocator=allocator, loaded=storages())
        self._models += originals.values()
        for original in originals.values():
            self._note(original.notes)
            if not original.is_flat:
                with self._stage("warm up"):
                    recorders.of(original, self._models).refuse_hidden_state()
        refittable = self._made_refittable(originals)
        tried = {key: self._variants(original) for key, original in originals.items()}
        if refittable is not None:
            tried = {key: refittable.as_variants(key) for key in originals}
        made = {key: self._fastest(original, tried[key], recorders) for key, original in originals.items()}
        for each in made.values():
            self._note(each.recording.notes)
        names = {key: program_name(*key) for key in made}
        refuse_folded_state(
            {names[key]: original.module for key, original in originals.items()},
            {names[key]: each.part.graph for key, each in made.items()},
            as_they_run=[names[key] for key, each in made.items() if each.model is originals[key]],
            kept={names[key]: each.model.written_elsewhere for key, each in made.items() if each.model.is_flat},
        )
        parts = [
            replace(each.part, graph=_with_weights(each, originals[key]), entry=key[0], profile=key[1])
            for key, each in made.items()
        ]
        provenance = self._provenance({names[key]: each.name for key, each in made.items()})
        plan = (
            assemble(parts, provenance)
            if refittable is None
            else self._assembled(parts, provenance, refittable, [each.model for each in made.values()], recorders)
        )
        self._finish(mark_masks(plan, self._request.pad_masks), made, originals, recorders)
        self._note(self._cache.notes)

    def _finish(
        self,
        plan: Plan,
        made: "Mapping[_Key, _Made]",
        originals: "Mapping[_Key, TorchModel]",
        recorders: "Recorders",
    ) -> None:
        """Record what the framework computes, write the plan, and check it."""
        with LeanProcess(Target.CUDA) as lean:
            with self._stage("run the framework"):
                runs = zip(plan.programs, made.values(), originals.values(), strict=True)
                plan = replace(plan, programs=tuple(self._with_golden(*run) for run in runs))
            if self._request.sizes:
                with self._stage("padding"), recorders.code.ignoring():
                    plan, notes = find_fits(plan)
                self._note(notes)
            with self._stage("write"):
                container.write(plan, self._request.output)
            with self._stage("check"):
                problem = lean.differing_output(self._request.output, run_s=run_seconds(plan))
                if problem:
                    _send(self._events, problem=problem.sentence)  # should the search below not live to tell it
                    program = next(p for p in plan.programs if p.name == problem.program)
                    inputs, expected = golden.draw_inputs(program, _SEED), program.golden
                    assert expected is not None
                    recording = made[program.entry, program.profile].recording
                    from nimblec.cuda.diagnosis import first_difference

                    found = first_difference(recording, plan.device, inputs, expected)
                    raise CompileError(f"{problem.sentence}; {found}")

    def _variants(self, model: "TorchModel") -> "Iterator[Variant]":
        """The variants of a model at the level asked for."""
        from nimblec.levels.variants import variants

        report = self._note_pass if self._request.print_passes else None
        return variants(model, self._request.level, _half(self._request.precision), self._cache, report)

    def _made_refittable(self, originals: "Mapping[_Key, TorchModel]") -> "Refittable[_Key] | None":
        """All variants of the models, made for any weights; None where that is not asked for, or they run as they are.

        A module that runs as it is has its weights as they are.
        """
        request = self._request
        is_onnx = request.source.kind == "onnx"
        if not request.refittable or (request.level == 0 and not is_onnx and _half(request.precision) is None):
            return None
        from nimblec.cuda.refit.refittable import make_refittable, of_files, of_modules

        def load(weigh: "Weigh") -> "dict[_Key, TorchModel]":
            models = self._load_onnx(weigh)
            return {key: replace(models[key], args=o.args, inputs=o.inputs) for key, o in originals.items()}

        with self._stage("refittable"):
            found = make_refittable(of_files(load) if is_onnx else of_modules(originals), self._variants)
        self._models += (each.model for made in found.variants.values() for each in made)
        self._note(found.failures)
        return found

    def _assembled(
        self,
        parts: "Sequence[Part]",
        provenance: Provenance,
        refittable: "Refittable[_Key]",
        models: "Sequence[TorchModel]",
        recorders: "Recorders",
    ) -> Plan:
        """The plan of parts captured of ``models``, and its refits."""
        from nimblec.cuda.refit.programs import assemble_refittable, recipes

        with self._stage("recipes"):
            found = recipes(refittable, models, "cuda")
            made = None
            if found.model is not None:
                recorder = recorders.of(found.model, self._models)
                recorder.warm_up()
                made = recorder.record().graph
            plan = assemble_refittable([replace(p, graph=found.named(p.graph)) for p in parts], provenance, found, made)
        self._note(refittable.notes(plan))
        return plan

    def _fastest(self, original: "TorchModel", tried: "Iterable[Variant]", recorders: "Recorders") -> "_Made":
        """Of the variants of a model, the one whose plan takes the least GPU time."""
        from nimblec.levels.variants import as_it_runs

        level, dtype = self._request.level, _half(self._request.precision)
        made: list[_Made] = []
        failures: list[NimbleError] = []
        for variant in tried:
            try:
                with nullcontext() if variant.is_original else unforeseen(variant.name):
                    made.append(self._make(variant, recorders))
            except (TraceError, UnsupportedModelError) as exc:
                failures.append(exc)
        if not made:
            if level == 0 or dtype is not None:
                raise failures[0]
            made.append(self._make(as_it_runs(original), recorders))
            self._note([f"-O{level} is not open to this model, which is compiled as it runs, as by -O0"])
        self._note(str(exc) for exc in failures)
        if len(made) > 1:
            times = ", ".join(f"{m.name} {m.duration_ns / 1e3:.0f} us" for m in made)
            self._note([f"tried {times}: kept the fastest"])
        return min(made, key=lambda m: m.duration_ns)

    def _make(self, variant: "Variant", recorders: "Recorders") -> "_Made":
        """Record a variant, and schedule it."""
        with nullcontext() if variant.is_original else self._stage("optimize"):
            model = variant.make()
        if not variant.is_original:
            self._note(model.notes)
        with self._stage("warm up"):
            recorder = recorders.of(model, self._models)
            recorder.warm_up()
        with self._stage("capture"):
            recording = recorder.record()
        with self._stage("schedule"), recorders.code.ignoring():
            part, duration_ns = self._schedule(recording.graph)
        self._models.append(model)
        return _Made(
            name=variant.name, model=model, recorder=recorder, recording=recording, part=part, duration_ns=duration_ns
        )

    def _note_pass(self, step: "Step") -> None:
        self._note([str(step)])

    def _note(self, notes: Iterable[str]) -> None:
        for note in notes:
            if note not in self._noted:  # of another size
                self._noted.add(note)
                _send(self._events, note=note)

    def _provenance(self, variants: Mapping[str, str] | None = None) -> Provenance:
        """``variants`` are the names of the variants that were kept, by entry."""
        kept = list((variants or {}).values())
        how = kept[0] if len(kept) == 1 else ", ".join(f"{entry}: {name}" for entry, name in (variants or {}).items())
        made_how = (("level", f"-O{self._request.level}, {how}"), ("precision", self._request.precision))
        return Provenance(target=Target.CUDA, device=_needed_device(), versions=(*_versions(), *made_how))

    def _schedule(self, graph: Graph) -> tuple[Part, int]:
        """A variant with its schedule, and the nanoseconds it takes on the GPU."""
        provenance = self._provenance()
        streams, memory_limit = self._request.streams, self._request.memory_limit
        with closing(CudaTimer()) as timer:
            cached = CachedTimer(timer, self._cache, provenance.device)
            part = choose_schedule(graph, provenance, cached, streams=streams, memory_limit=memory_limit)
            duration_ns = cached.duration(assemble([part], provenance))
        self._cache.save()
        return part, duration_ns

    def _with_common_state(self, originals: "dict[_Key, TorchModel]") -> "dict[_Key, TorchModel]":
        """The models, each told what of its state others write, where they are to be rewritten."""
        from nimblec.frontend.pytorch.flat import written_storages

        if len(originals) == 1 or self._request.level == 0:
            return originals
        written = frozenset().union(*map(written_storages, originals.values()))
        return {key: replace(original, written_elsewhere=written) for key, original in originals.items()}

    def _load_models(self) -> "dict[_Key, TorchModel]":
        """The model of each entry, in the sizes of each profile."""
        import torch

        from nimblec.frontend.pytorch import sources
        from nimblec.frontend.pytorch.model import place_call, set_arithmetic
        from nimblec.frontend.pytorch.state import share

        request = self._request
        torch.manual_seed(_SEED)
        set_arithmetic(request.precision)
        options = self._options()
        if request.source.kind == "onnx":
            return self._load_onnx()
        calls: dict[_Key, ModelCall]
        if options.sizes:
            program = sources.dynamic_program(request.source, options, device="cuda")
            calls = {("main", profile): call for profile, call in program.calls(options).items()}
        else:
            calls = {(e, ()): call for e, call in sources.load(request.source, options, device="cuda").items()}
        placed = {key: place_call(call, device="cuda") for key, call in calls.items()}
        shared = {entry: part.shared for entry, part in request.source.entries}
        share({entry: model.module for (entry, _), model in placed.items()}, shared)
        return placed

    def _options(self) -> Options:
        """Those of the request that say of which sizes the inputs are."""
        request = self._request
        examples = () if request.examples is None else tuple(np.load(request.examples).items())
        return Options(inputs=request.inputs, dims=request.dims, sizes=request.sizes, examples=examples)

    def _load_onnx(self, weigh: "Weigh | None" = None) -> "dict[_Key, TorchModel]":
        from nimblec.frontend.onnx.torch_model import load_onnx

        options = self._options()
        return {
            ("main", profile): load_onnx(
                Path(self._request.source.model),
                device="cuda",
                specs=options.inputs,
                dims=options.dims,
                examples=dict(options.examples),
                profile=profile,
                weigh=weigh,
            )
            for profile in options.profiles
        }

    def _with_golden(self, program: Program, made: _Made, original: "TorchModel") -> Program:
        """The program with what the framework computes from seeded inputs, and how far two runs differ."""
        inputs = golden.draw_inputs(program, _SEED)
        first, second = made.recorder.compute(inputs), made.recorder.compute(inputs)
        tolerance = accuracy.spread(first, second)
        if tolerance:
            _send(
                self._events,
                note=f"two runs of the framework on equal inputs differ by {tolerance:.2g} of the largest magnitude: "
                "the plan is checked within that spread",
            )
        if made.model is not original:
            reference = partial(made.recorder.compute, model=original)
            self._note(accuracy.report(program, reference, made.recorder.compute, self._request.max_error))
        return replace(program, golden=golden.record(_SEED, first, tolerance))


def _half(precision: str) -> "torch.dtype | None":
    """The half precision to compute in."""
    import torch

    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)


def _needed_device() -> Device:
    found = driver.describe()
    # Within a major version of CUDA a driver runs the cubins of every minor one.
    return replace(found, driver_version=found.driver_version // 1000 * 1000)


def _versions() -> tuple[tuple[str, str], ...]:
    import torch

    found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version())}
    return tuple(sorted(found.items()))


if __name__ == "__main__":
    gc.set_threshold(_NEW_OBJECTS)
    status = main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    # No more: torch would free its memory through callbacks into an interpreter that is gone.
    os._exit(status)
