"""Selection among the variants of a model: each is recorded and scheduled, and the fastest is kept."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nimblec.base.errors import CompileError, TraceError, UnsupportedModelError, forget_locals, unforeseen
from nimblec.base.ir import Graph, Part
from nimblec.cuda.reports import Reports
from nimblec.cuda.request import CompileRequest
from nimblec.cuda.timing import CudaTimer
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.planning import choose_schedule
from nimblec.plan.timing_cache import CachedTimer, TimingCache
from nimblert.cuda import driver
from nimblert.plan import Device, Target

if TYPE_CHECKING:
    import torch

    from nimblec.cuda.capture.record import ModelRecorder, Recorders, Recording
    from nimblec.optimize.variants import Variant
    from nimblec.pytorch.model import TorchModel
    from nimblert.errors import NimbleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A variant of a model, recorded and scheduled; ``duration_ns`` is its plan's time on the GPU."""

    name: str
    model: "TorchModel"
    recorder: "ModelRecorder"
    recording: "Recording"
    part: Part
    duration_ns: int


class Selector:
    """Selects variants for a request. ``times`` caches the times of kernels and plans."""

    def __init__(
        self, request: CompileRequest, reports: Reports, times: TimingCache, recorders: "Recorders"
    ) -> None:
        self._request = request
        self._reports = reports
        self._times = times
        self._recorders = recorders

    def variants(self, model: "TorchModel") -> "Iterator[Variant]":
        """Return the variants of a model at the requested level."""
        from nimblec.optimize.variants import variants

        report = (lambda step: self._reports.note([str(step)])) if self._request.options.print_passes else None
        precision = self._request.options.precision
        return variants(model, self._request.level, half(precision), self._times, report, fp8=precision == "fp8")

    def fastest(self, original: "TorchModel", tried: "Iterable[Variant]") -> Recorded:
        """Return the variant of a model whose plan takes the least GPU time."""
        from nimblec.optimize.variants import as_it_runs

        level, dtype = self._request.level, half(self._request.options.precision)
        best: Recorded | None = None
        times: list[str] = []
        failures: dict[str, NimbleError] = {}
        for variant in tried:
            if variant.is_fallback and best is not None:
                continue
            try:
                with nullcontext() if variant.is_original else unforeseen():
                    recorded = self._record(variant)
                times.append(f"{recorded.name} {recorded.duration_ns / 1e3:.0f} us")
                if best is None or recorded.duration_ns < best.duration_ns:
                    best = recorded
                # The slower recording must not keep its memory.
                del recorded
            except (TraceError, UnsupportedModelError) as exc:
                forget_locals(exc)
                failures[variant.name] = exc
        if best is None:
            if level == 0 or dtype is not None:
                raise next(iter(failures.values()))
            try:
                best = self._record(as_it_runs(original))
            except TraceError:
                # A model with loops cannot be captured as it runs.
                raise next(iter(failures.values())) from None
            self._reports.note([f"-O{level} is not possible for this model, which is compiled as by -O0"])
        self._reports.note(f"not possible for this model: {name}: {exc}" for name, exc in failures.items())
        if len(times) > 1:
            self._reports.note([f"tried {', '.join(times)}: kept the fastest"])
        return best

    def _record(self, variant: "Variant") -> Recorded:
        """Record a variant, and schedule it."""
        from nimblec.optimize.torch_compile import forget_kernels

        forget_kernels()
        with nullcontext() if variant.is_original else self._reports.stage("optimize"):
            model = variant.make()
        if not variant.is_original:
            self._reports.note(model.notes)
        with self._reports.stage("warm up"):
            recorder = self._recorders.of(model)
            recorder.warm_up()
        with self._reports.stage("capture"):
            recording = recorder.record()
        with self._reports.stage("schedule"), self._recorders.code.ignoring():
            part, duration_ns = self._schedule(recording.graph)
        self._reports.note(part.notes)
        self._recorders.add(model)
        return Recorded(
            name=variant.name, model=model, recorder=recorder, recording=recording, part=part, duration_ns=duration_ns
        )

    def _schedule(self, graph: Graph) -> tuple[Part, int]:
        """Return a variant with its schedule, and the nanoseconds it takes on the GPU, 0 if no times decide."""
        provenance = provenance_of(self._request)
        streams, memory_limit = self._request.options.streams, self._request.options.memory_limit
        if self._request.options.reproducible:
            return choose_schedule(graph, provenance, None, streams=streams, memory_limit=memory_limit), 0
        with closing(CudaTimer()) as timer:
            cached = CachedTimer(timer, self._times, provenance.device)
            part = choose_schedule(graph, provenance, cached, streams=streams, memory_limit=memory_limit)
            duration = cached.duration(assemble([part], provenance))
        self._times.save()
        return part, duration.ns


def half(precision: str) -> "torch.dtype | None":
    """Return the dtype of a half precision, of fp8 that of all but products; None for the others."""
    import torch

    return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float16}.get(precision)


def refuse_without_fp8(precision: str, capability: tuple[int, int]) -> None:
    """Raise CompileError for fp8 on a GPU that has no kernels which multiply e4m3."""
    if precision == "fp8" and capability < (9, 0):
        found = ".".join(map(str, capability))
        raise CompileError(
            f"--precision fp8: products of e4m3 need compute capability 9.0, the GPU has {found}: give --precision fp16"
        )


def provenance_of(request: CompileRequest, variants: Mapping[str, str] | None = None) -> Provenance:
    """Return the provenance of a plan of this compilation; ``variants`` are the selected ones' names, by entry."""
    kept = list((variants or {}).values())
    how = kept[0] if len(kept) == 1 else ", ".join(f"{entry}: {name}" for entry, name in (variants or {}).items())
    made_how = (("level", f"-O{request.level}, {how}"), ("precision", request.options.precision))
    return Provenance(target=Target.CUDA, device=_needed_device(), versions=(*_versions(), *made_how))


def _needed_device() -> Device:
    found = driver.describe()
    # Within a major version of CUDA a driver runs the cubins of every minor one.
    return replace(found, driver_version=found.driver_version // 1000 * 1000)


def _versions() -> tuple[tuple[str, str], ...]:
    import torch

    found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version())}
    return tuple(sorted(found.items()))
