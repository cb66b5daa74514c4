"""The capture process: ``python -m nimblec.cuda.worker REQUEST.json EVENTS_FD``.

CUPTI must be subscribed and torch's allocator replaced before CUDA starts, so every compilation has a
fresh process. It reads one request, writes the plan file, and reports on a pipe (`nimblec.cuda.reports`).
"""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nimblec.base.ir import Part, ProgramKey, program_name
from nimblec.cuda.check import write_checked
from nimblec.cuda.common_state import refuse_folded_state, with_common_state
from nimblec.cuda.load import choose_without_timing, let_torch_draw, load_files, load_models
from nimblec.cuda.reports import Reports
from nimblec.cuda.request import CompileRequest
from nimblec.cuda.selection import Recorded, Selector, half, provenance_of, refuse_without_fp8
from nimblec.kernels.compiling import compiler
from nimblec.padding.fits import mark_masks
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.timing_cache import TimingCache
from nimblert.cuda import driver
from nimblert.plan import Plan

if TYPE_CHECKING:
    from nimblec.cuda.capture.record import Recorders
    from nimblec.cuda.refittable import Refittable
    from nimblec.onnx_import.importer import Weigh
    from nimblec.pytorch.model import TorchModel

_NEW_OBJECTS = 100_000
"""New objects before a garbage collection: imports and graphs make a million that stay alive."""


def main(request_path: str, events_fd: int) -> int:
    """Serve one request by capture; 0 where the plan file was written."""
    return serve(request_path, events_fd, lambda request, reports: _Worker(request, reports).compile())


def serve(request_path: str, events_fd: int, compiled: Callable[[CompileRequest, Reports], None]) -> int:
    """Serve one request by ``compiled``; 0 where the plan file was written."""
    os.set_inheritable(events_fd, False)
    with os.fdopen(events_fd, "w", buffering=1) as pipe:
        # A fork that outlives this process would keep the pipe open.
        os.register_at_fork(after_in_child=pipe.close)
        reports = Reports(pipe)
        try:
            request = CompileRequest.load(Path(request_path))
            sys.path[:0] = request.sys_path
            compiled(request, reports)
        except Exception as exc:  # noqa: BLE001 - frameworks raise anything, and the user is to be told
            reports.failure(exc)
            return 2
        return 0


class _Worker:
    def __init__(self, request: CompileRequest, reports: Reports) -> None:
        self._request = request
        self._reports = reports
        self._times = TimingCache(None if request.options.reproducible else request.options.timing_cache)

    def compile(self) -> None:
        # --precision decides about TF32.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        recorders = self._start()
        refuse_without_fp8(self._request.options.precision, driver.describe().compute_capability)
        originals = self._load(recorders)
        selector = Selector(self._request, self._reports, self._times, recorders)
        refittable = self._made_refittable(originals, selector, recorders)
        tried = {key: selector.variants(original) for key, original in originals.items()}
        if refittable is not None:
            tried = {key: refittable.as_variants(key) for key in originals}
        recorded = {key: selector.fastest(original, tried[key]) for key, original in originals.items()}
        for each in recorded.values():
            self._reports.note(each.recording.notes)
        _refuse_folded_state(originals, recorded)
        parts = _parts(originals, recorded)
        provenance = provenance_of(self._request, {program_name(*key): each.name for key, each in recorded.items()})
        plan = (
            assemble(parts, provenance)
            if refittable is None
            else self._assembled(parts, provenance, refittable, [each.model for each in recorded.values()], recorders)
        )
        plan = mark_masks(plan, self._request.options.pad_masks)
        write_checked(plan, self._request, self._reports, recorded, originals, recorders.code)
        self._reports.note(self._times.notes)
        if self._request.level > 1 and (count := compiler().count):
            self._reports.note([f"compiled {count} Triton kernels to choose from"])

    def _start(self) -> "Recorders":
        """Import the framework, and begin to watch it before CUDA starts."""
        with self._reports.stage("import the framework"):
            from nimblec.kernels import triton_start

            triton_start.choose_assembler_and_cache()
            if self._request.level > 1:
                compiler()
            from nimblec.cuda.capture.allocator import BumpAllocator
            from nimblec.cuda.capture.cupti import CodeRecorder
            from nimblec.cuda.capture.record import Recorders

        with self._reports.stage("initialise CUDA"):
            driver.bindings()
            code = CodeRecorder()
            code.start()
            driver.initialise()
            allocator = BumpAllocator()
            allocator.install()
            if self._request.level > 1:
                triton_start.begin()
        return Recorders(code, allocator)

    def _load(self, recorders: "Recorders") -> "dict[ProgramKey, TorchModel]":
        """Return the requested models, each checked to give the same results twice."""
        with self._reports.stage("load the model"):
            originals = load_models(self._request)
            if self._request.options.reproducible:
                choose_without_timing()
            if len(originals) > 1 and self._request.level > 0:
                originals = with_common_state(originals)
            if self._request.level == 0 and half(self._request.options.precision) is None:
                let_torch_draw(originals.values())
            recorders.begin(originals.values())
        for original in originals.values():
            self._reports.note(original.notes)
            if not original.is_flat:
                with self._reports.stage("warm up"):
                    recorders.of(original).refuse_hidden_state()
        return originals

    def _made_refittable(
        self, originals: "Mapping[ProgramKey, TorchModel]", selector: Selector, recorders: "Recorders"
    ) -> "Refittable[ProgramKey] | None":
        """Return all variants of the models, made for any weights; None if that is not requested or not needed.

        A module that is captured as it runs reads its weights themselves.
        """
        request = self._request
        is_onnx = request.source.kind == "onnx"
        is_as_given = request.level == 0 and not is_onnx and half(request.options.precision) is None
        if is_as_given or not request.options.refittable:
            return None
        from nimblec.cuda.refittable import make_refittable, of_files, of_modules

        def load(weigh: "Weigh") -> "dict[ProgramKey, TorchModel]":
            models = load_files(request, weigh)
            return {key: replace(models[key], args=o.args, inputs=o.inputs) for key, o in originals.items()}

        with self._reports.stage("refittable"):
            found = make_refittable(of_files(load) if is_onnx else of_modules(originals), selector.variants)
        recorders.add(*(each.model for made in found.variants.values() for each in made))
        self._reports.note(found.failures)
        return found

    def _assembled(
        self,
        parts: Sequence[Part],
        provenance: Provenance,
        refittable: "Refittable[ProgramKey]",
        models: "Iterable[TorchModel]",
        recorders: "Recorders",
    ) -> Plan:
        """Return the plan of the parts captured from ``models``, with its refits."""
        from nimblec.cuda.refit_programs import assemble_refittable, recipes

        with self._reports.stage("recipes"):
            found = recipes(refittable, models, "cuda")
            made = None
            if found.model is not None:
                recorder = recorders.of(found.model)
                recorder.warm_up()
                made = recorder.record().graph
            plan = assemble_refittable([replace(p, graph=found.named(p.graph)) for p in parts], provenance, found, made)
        self._reports.note(refittable.notes(plan))
        return plan


def _refuse_folded_state(
    originals: "Mapping[ProgramKey, TorchModel]", recorded: Mapping[ProgramKey, Recorded]
) -> None:
    names = {key: program_name(*key) for key in recorded}
    refuse_folded_state(
        {names[key]: original.module for key, original in originals.items()},
        {names[key]: each.part.graph for key, each in recorded.items()},
        as_they_run=[names[key] for key, each in recorded.items() if each.model is originals[key]],
        kept={names[key]: each.model.written_elsewhere for key, each in recorded.items() if each.model.is_flat},
    )


def _parts(originals: "Mapping[ProgramKey, TorchModel]", recorded: Mapping[ProgramKey, Recorded]) -> list[Part]:
    """Return the recorded parts with their entries and profiles, and with the names of weights that may be replaced."""
    from nimblec.cuda.given_weights import with_weights

    parts = []
    for (entry, profile), each in recorded.items():
        original = originals[entry, profile]
        graph = with_weights(each.part.graph, original, as_it_runs=each.model is original)
        parts.append(replace(each.part, graph=graph, entry=entry, profile=profile))
    return parts


if __name__ == "__main__":
    gc.set_threshold(_NEW_OBJECTS)
    status = main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    # Exit at once: torch would free its memory through callbacks into a finalised interpreter.
    os._exit(status)
