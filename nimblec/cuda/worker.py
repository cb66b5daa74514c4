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
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from nimblec.cache.timing_cache import CachedTimer, TimingCache
from nimblec.cuda import accuracy
from nimblec.cuda.timing import CudaTimer
from nimblec.errors import CompileError, TraceError, UnsupportedModelError, described, missing_package, unforeseen
from nimblec.ir import Graph
from nimblec.lean import LeanProcess, run_seconds
from nimblec.options import InputSpec, Options
from nimblec.planning import Provenance, make_plan
from nimblec.source import Source
from nimblec.stages import stage
from nimblert import container, driver, golden
from nimblert.errors import NimbleError
from nimblert.plan import Device, Plan, Target

if TYPE_CHECKING:
    import torch

    from nimblec.cuda.record import ModelRecorder, Recorders, Recording
    from nimblec.cuda.variants import Variant
    from nimblec.frontend.pytorch.model import TorchModel

_SEED = 0
_NEW_OBJECTS = 100_000
"""Between two collections of garbage: imports and graphs are a million objects, which live on."""


def main(request_path: str, events_fd: int) -> int:
    """Serve one request; 0 where the plan file was written."""
    request = json.loads(Path(request_path).read_text())
    sys.path[:0] = request["sys_path"]
    with os.fdopen(events_fd, "w", buffering=1) as events:
        try:
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
    plan: Plan
    duration_ns: int


class _Worker:
    def __init__(self, request: dict[str, Any], events: IO[str]) -> None:
        self._request = request
        self._events = events
        self._cache = TimingCache(Path(request["timing_cache"]))

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return stage(lambda stage, seconds: _send(self._events, stage=stage, seconds=seconds), name)

    def compile(self) -> None:
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # --precision says that
        with self._stage("import the framework"):
            from nimblec.cuda.allocator import BumpAllocator
            from nimblec.cuda.cupti import CodeRecorder
            from nimblec.cuda.diagnosis import first_difference
            from nimblec.cuda.record import Recorders
            from nimblec.cuda.residents import storages
            from nimblec.kernels.core import triton_start
        with self._stage("initialise CUDA"):
            driver.bindings()
            code = CodeRecorder()
            code.start()
            driver.initialise()
            allocator = BumpAllocator()
            allocator.install()
            if self._request["level"] > 1:
                triton_start.begin()
        with self._stage("load the model"):
            original = self._load_model()
            recorders = Recorders(code=code, allocator=allocator, loaded=storages())
        self._note(original.notes)
        if not original.is_flat:
            with self._stage("warm up"):
                recorders.of(original).refuse_hidden_state()
        made = self._fastest(original, recorders)
        self._note(made.recording.notes)
        with LeanProcess(Target.CUDA) as lean:
            with self._stage("run the framework"):
                plan = self._with_golden(made.plan, made.recorder)
                if made.model is not original:
                    program, allowed = plan.programs[0], self._request["max_error"]
                    reference = partial(made.recorder.compute, model=original)
                    self._note(accuracy.report(program, reference, made.recorder.compute, allowed))
            output = Path(self._request["output"])
            with self._stage("write"):
                container.write(plan, output)
            with self._stage("check"):
                problem = lean.differing_output(output, run_s=run_seconds(plan.programs[0]))
                if problem:
                    _send(self._events, problem=problem)  # should the search below not live to tell it
                    (program,) = plan.programs
                    inputs, expected = golden.draw_inputs(program, _SEED), program.golden
                    assert expected is not None
                    raise CompileError(f"{problem}; {first_difference(made.recording, plan.device, inputs, expected)}")
        self._note(self._cache.notes)

    def _fastest(self, original: "TorchModel", recorders: "Recorders") -> "_Made":
        """The variant of the model at the level asked for whose plan takes the least GPU time."""
        from nimblec.cuda.variants import as_it_runs, variants

        level, dtype = self._request["level"], _half(self._request["precision"])
        made: list[_Made] = []
        closed: list[NimbleError] = []
        for way in variants(original, level, dtype, self._cache):
            try:
                others = [original, *(m.model for m in made)]
                with nullcontext() if way.is_original else unforeseen(way.name):
                    made.append(self._make(way, others, recorders))
            except (TraceError, UnsupportedModelError) as exc:
                closed.append(exc)
        if not made:
            if level == 0 or dtype is not None:
                raise closed[0]
            made.append(self._make(as_it_runs(original), [original], recorders))
            self._note([f"-O{level} is not open to this model, which is compiled as it runs, as by -O0"])
        self._note(str(exc) for exc in closed)
        if len(made) > 1:
            times = ", ".join(f"{m.name} {m.duration_ns / 1e3:.0f} us" for m in made)
            self._note([f"tried {times}: kept the fastest"])
        return min(made, key=lambda m: m.duration_ns)

    def _make(self, way: "Variant", others: list["TorchModel"], recorders: "Recorders") -> "_Made":
        """Record a variant, and schedule it; ``others`` are the models that are there already."""
        with nullcontext() if way.is_original else self._stage("optimize"):
            model = way.make()
        if not way.is_original:
            self._note(model.notes)
        with self._stage("warm up"):
            recorder = recorders.of(model, others)
            recorder.warm_up()
        with self._stage("capture"):
            recording = recorder.record()
        with self._stage("schedule"), recorders.code.ignoring():
            plan, duration_ns = self._schedule(recording.graph, way.name)
        return _Made(
            name=way.name, model=model, recorder=recorder, recording=recording, plan=plan, duration_ns=duration_ns
        )

    def _note(self, notes: Iterable[str]) -> None:
        for note in notes:
            _send(self._events, note=note)

    def _schedule(self, graph: Graph, way: str) -> tuple[Plan, int]:
        """The plan of a variant, and the nanoseconds it takes on the GPU."""
        made_how = (("level", f"-O{self._request['level']}, {way}"), ("precision", self._request["precision"]))
        provenance = Provenance(target=Target.CUDA, device=_needed_device(), versions=(*_versions(), *made_how))
        streams, memory_limit = self._request["streams"], self._request["memory_limit"]
        with closing(CudaTimer()) as timer:
            cached = CachedTimer(timer, self._cache, provenance.device)
            plan = make_plan(graph, provenance, cached, streams=streams, memory_limit=memory_limit)
            duration_ns = cached.duration(plan)
        self._cache.save()
        return plan, duration_ns

    def _load_model(self) -> "TorchModel":
        import torch

        from nimblec.frontend.pytorch import sources
        from nimblec.frontend.pytorch.model import place_call, set_arithmetic

        torch.manual_seed(_SEED)
        set_arithmetic(self._request["precision"])
        specs = tuple(InputSpec(**{**s, "shape": tuple(s["shape"])}) for s in self._request["inputs"])
        examples = dict(np.load(self._request["examples"])) if self._request["examples"] else {}
        dims = tuple((name, size) for name, size in self._request["dims"])
        source = Source(kind=self._request["kind"], model=self._request["model"])
        if source.kind == "onnx":
            from nimblec.frontend.onnx.torch_model import load_onnx

            return load_onnx(Path(source.model), device="cuda", specs=specs, dims=dims, examples=examples)
        options = Options(inputs=specs, dims=dims, examples=tuple(examples.items()))
        return place_call(sources.load(source, options, device="cuda"), device="cuda")

    def _with_golden(self, plan: Plan, recorder: "ModelRecorder") -> Plan:
        """The plan with what the framework computes from seeded inputs, and how far two runs differ."""
        (program,) = plan.programs
        inputs = golden.draw_inputs(program, _SEED)
        first, second = recorder.compute(inputs), recorder.compute(inputs)
        tolerance = accuracy.spread(first, second)
        if tolerance:
            _send(
                self._events,
                note=f"two runs of the framework on equal inputs differ by {tolerance:.2g} of the largest magnitude: "
                "the plan is checked within that spread",
            )
        record = golden.record(_SEED, first, tolerance)
        return replace(plan, programs=(replace(program, golden=record),))


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
