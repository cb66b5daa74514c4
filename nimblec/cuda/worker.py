"""The capture process: ``python -m nimblec.cuda.worker REQUEST.json EVENTS_FD``.

CUPTI must be subscribed before CUDA starts, and torch's allocator exchanged, so every capture has a
fresh process. It reads one request, writes the plan file, and reports on a pipe: one JSON object a
line, {"stage", "seconds"}, {"note"}, or {"error", "message"} as the last.
"""

import ctypes
import json
import os
import sys
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from nimblec.cuda import accuracy
from nimblec.cuda.timing import CudaTimer
from nimblec.errors import CompileError, missing_package
from nimblec.ir import Graph
from nimblec.lean import differing_output, run_seconds
from nimblec.options import InputSpec
from nimblec.planning import Provenance, make_plan
from nimblec.stages import stage
from nimblec.timing_cache import CachedTimer, TimingCache
from nimblert import container, driver, golden
from nimblert.errors import NimbleError
from nimblert.plan import Device, Plan, Target

if TYPE_CHECKING:
    from nimblec.cuda.record import ModelRecorder
    from nimblec.frontend.pytorch import TorchModel

_ADDR_NO_RANDOMIZE = 0x0040000
_SEED = 0


def main(request_path: str, events_fd: int) -> int:
    """Serve one request; 0 where the plan file was written."""
    _fix_addresses()
    request = json.loads(Path(request_path).read_text())
    sys.path[:0] = request["sys_path"]
    with os.fdopen(events_fd, "w", buffering=1) as events:
        try:
            _Worker(request, events).compile()
        except ModuleNotFoundError as exc:
            missing = missing_package(exc)
            if missing is None:
                raise
            _send(events, error=type(missing).__name__, message=str(missing))
            return 2
        except NimbleError as exc:
            _send(events, error=type(exc).__name__, message=str(exc))
            return 2
    return 0


def _fix_addresses() -> None:
    """Start again without address randomisation, once.

    Kernels are handed padding from the host's stack; at equal addresses it is equal in every build.
    """
    libc = ctypes.CDLL(None)
    now = libc.personality(0xFFFFFFFF)
    if now & _ADDR_NO_RANDOMIZE or libc.personality(now | _ADDR_NO_RANDOMIZE) < 0:
        return
    if libc.personality(0xFFFFFFFF) & _ADDR_NO_RANDOMIZE:
        os.execv(sys.executable, [sys.executable, "-m", "nimblec.cuda.worker", *sys.argv[1:]])


def _send(events: IO[str], **message: Any) -> None:
    events.write(json.dumps(message) + "\n")


class _Worker:
    def __init__(self, request: dict[str, Any], events: IO[str]) -> None:
        self._request = request
        self._events = events

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return stage(lambda stage, seconds: _send(self._events, stage=stage, seconds=seconds), name)

    def compile(self) -> None:
        with self._stage("import the framework"):
            from nimblec.cuda.allocator import BumpAllocator
            from nimblec.cuda.capture import SourceTracker
            from nimblec.cuda.cupti import CodeRecorder
            from nimblec.cuda.diagnosis import first_difference
            from nimblec.cuda.record import ModelRecorder
        driver.bindings()
        code = CodeRecorder()
        code.start()
        driver.initialise()
        allocator = BumpAllocator()
        allocator.install()
        with self._stage("load the model"):
            original = model = self._load_model()
            if self._request["level"] and not original.is_compiled:
                from nimblec.frontend.compiled import compiled

                model = compiled(original, self._request["level"])
            sources = SourceTracker(model.module)
            recorder = ModelRecorder(model, sources, code, allocator)
        for note in model.notes:
            _send(self._events, note=note)
        with self._stage("warm up"):
            recorder.warm_up()
        with self._stage("capture"):
            recording = recorder.record()
        for note in recording.notes:
            _send(self._events, note=note)
        with self._stage("schedule"):
            plan = self._schedule(recording.graph)
        with self._stage("run the framework"):
            plan = self._with_golden(plan, recorder)
            if model is not original:
                program, allowed = plan.programs[0], self._request["max_error"]
                reference = partial(recorder.compute, model=original)
                for note in accuracy.report(program, reference, recorder.compute, allowed):
                    _send(self._events, note=note)
        output = Path(self._request["output"])
        with self._stage("write"):
            container.write(plan, output)
        with self._stage("check"):
            problem = differing_output(output, run_s=run_seconds(plan.programs[0]))
            if problem:
                (program,) = plan.programs
                inputs, expected = golden.draw_inputs(program, _SEED), program.golden
                assert expected is not None
                raise CompileError(f"{problem}; {first_difference(recording, plan.device, inputs, expected)}")

    def _schedule(self, graph: Graph) -> Plan:
        provenance = Provenance(target=Target.CUDA, device=_needed_device(), versions=_versions())
        cache = TimingCache(Path(self._request["timing_cache"]))
        streams, memory_limit = self._request["streams"], self._request["memory_limit"]
        with closing(CudaTimer()) as timer:
            cached = CachedTimer(timer, cache, provenance.device)
            plan = make_plan(graph, provenance, cached, streams=streams, memory_limit=memory_limit)
        cache.save()
        return plan

    def _load_model(self) -> "TorchModel":
        import torch

        from nimblec.frontend import pytorch

        torch.manual_seed(_SEED)
        if self._request["precision"] != "keep":
            arithmetic = {"fp32": "ieee", "tf32": "tf32"}[self._request["precision"]]
            backends = torch.backends
            for backend in (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul):
                backend.fp32_precision = arithmetic
        specs = tuple(InputSpec(**{**s, "shape": tuple(s["shape"])}) for s in self._request["inputs"])
        examples = dict(np.load(self._request["examples"])) if self._request["examples"] else {}
        dims = tuple((name, size) for name, size in self._request["dims"])
        model, kind = self._request["model"], self._request["kind"]
        if dims and kind != "onnx":
            raise CompileError(f"--dim {dims[0][0]}: only an ONNX file has named dimensions; use --input NAME:SHAPE")
        match kind:
            case "callable":
                module, example_inputs = pytorch.import_callable(model)
            case "exported":
                module, example_inputs = pytorch.load_exported(Path(model))
            case "saved":
                module, example_inputs = pytorch.load_saved(Path(model))
            case "onnx":
                from nimblec.frontend.onnx_model import load_onnx

                return load_onnx(Path(model), device="cuda", specs=specs, dims=dims, examples=examples)
            case _:
                raise CompileError(f"request of kind {kind!r} is not known")
        return pytorch.place(module, example_inputs, device="cuda", specs=specs, examples=examples)

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


def _needed_device() -> Device:
    found = driver.describe()
    # Within a major version of CUDA a driver runs the cubins of every minor one.
    return replace(found, driver_version=found.driver_version // 1000 * 1000)


def _versions() -> tuple[tuple[str, str], ...]:
    import torch

    found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version())}
    return tuple(sorted(found.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
