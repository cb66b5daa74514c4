"""Run ONNX's backend cases by one of several targets, each case in a worker process that may crash or hang.

``aten``: import a case as ATen calls and run these with torch on the CPU. ``optimized``: the same calls after the
rewrites of ``-O1``. ``fused``: with their regions compiled as well, on the GPU if there is one. ``cpu``: compile it for
the CPU target, save the plan, load it and run it; a plain ONNX Runtime session of the same model is the reference. The
first input of a case stays an input, the others become initializers.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto
from onnx_cases import Case, cases, difference, static_form

from nimblec.base.errors import CompileError
from nimblert.errors import NimbleError

if TYPE_CHECKING:
    import torch

SECONDS_A_CASE = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a case: pass, refused, wrong, error, crash or hang.

    ``onnxruntime`` is its outcome in a plain session, for the CPU target.
    """

    name: str
    core: bool
    status: str
    message: str
    onnxruntime: str = ""


def run_aten(model: ModelProto, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Import a model and run its ATen calls with torch."""
    from nimblec.onnx_import.importer import import_model
    from nimblec.pytorch.outputs import cut_outputs

    program = import_model(model)
    results = program.module(*(_to_tensor(array) for array in inputs))
    return [_to_array(tensor) for tensor in cut_outputs(results, program.cropped)]


def run_optimized(model: ModelProto, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Import a model, rewrite its calls as ``-O1`` does for a GPU, and run them with torch on the CPU."""
    import torch
    from rewriting import optimize

    from nimblec.graph.definitions import Interpreter
    from nimblec.onnx_import.importer import import_model
    from nimblec.pytorch.outputs import cut_outputs

    program = import_model(model)
    module = optimize(program.module, device="cuda")
    with torch.no_grad():
        results = Interpreter(module).run(*map(_to_tensor, inputs))
        return [_to_array(tensor) for tensor in cut_outputs(results, program.cropped)]


def run_fused(model: ModelProto, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run regions compiled by Inductor, all of the model on the GPU where there is one."""
    import torch
    from rewriting import compile_regions, optimize

    from nimblec.onnx_import.importer import import_model
    from nimblec.pytorch.outputs import cut_outputs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    program = import_model(model, device=device)
    module = compile_regions(optimize(program.module, device=device))
    with torch.no_grad():
        results = module(*(_to_tensor(array).to(device) for array in inputs))
        return [_to_array(tensor.cpu()) for tensor in cut_outputs(results, program.cropped)]


def _to_tensor(array: np.ndarray) -> "torch.Tensor":
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _to_array(tensor: "torch.Tensor") -> np.ndarray:
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def run_cpu(model: ModelProto, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compile a model for the CPU target; save, load and run the plan."""
    import nimblec
    import nimblert

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "model.plan"
        source.write_bytes(model.SerializeToString())
        nimblec.compile(source, target="cpu", plan_cache=None).save(target)
        with nimblert.load(target) as executable:
            outputs = executable(*inputs)
        return [np.array(output) for output in (outputs if isinstance(outputs, tuple) else (outputs,))]


def run_onnxruntime(model: ModelProto, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run a model in a session of default options."""
    from nimblert.cpu.onnx_session import onnxruntime

    options = onnxruntime().SessionOptions()
    options.log_severity_level = 4  # failures come as exceptions
    session = onnxruntime().InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    fed = {value.name: array for value, array in zip(session.get_inputs(), inputs, strict=True)}
    return [np.asarray(output) for output in session.run(None, fed)]


Runner = Callable[[ModelProto, Sequence[np.ndarray]], list[np.ndarray]]
RUNNERS: dict[str, Runner] = {"aten": run_aten, "optimized": run_optimized, "fused": run_fused, "cpu": run_cpu}


def run_case(case: Case, target: str) -> Result:
    """Run every data set of a case."""
    status, message = outcome(case, RUNNERS[target])
    result = Result(name=case.name, core=case.core, status=status, message=message)
    return replace(result, onnxruntime=outcome(case, run_onnxruntime)[0]) if target == "cpu" else result


def outcome(case: Case, runner: Runner) -> tuple[str, str]:
    """Return the outcome of a case, and its message."""
    try:
        for data in case.data_sets():
            model, inputs = static_form(case.model, data.inputs)
            if message := difference(runner(model, inputs), data.outputs):
                return "wrong", message
    except (CompileError, NimbleError) as exc:
        return "refused", str(exc)
    except Exception as exc:  # noqa: BLE001 - any other exception is an outcome
        return "error", f"{type(exc).__name__}: {exc}"
    return "pass", ""


def _work(connection: Connection, target: str) -> None:
    """Receive indices of cases and send their results, until None comes."""
    if target != "cpu":
        import torch

        torch.set_num_threads(1)
    every = cases()
    while (index := connection.recv()) is not None:
        connection.send(run_case(every[index], target))


class Worker:
    """A process that runs cases, one at a time."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.case: int | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, self.target), daemon=True)
        self.process.start()
        other.close()

    def give(self, case: int) -> None:
        """Start a case."""
        self.case, self.since = case, time.monotonic()
        self.connection.send(case)

    def take(self) -> Result | None:
        """Return the result of the case, a crash or a hang; None while it runs."""
        assert self.case is not None
        if self.connection.poll():
            try:
                result: Result = self.connection.recv()
            except EOFError:
                return self._lost("crash", "the process died")
            self.case = None
            return result
        if time.monotonic() - self.since > SECONDS_A_CASE:
            return self._lost("hang", f"no answer in {SECONDS_A_CASE} s")
        return None

    def _lost(self, status: str, message: str) -> Result:
        assert self.case is not None
        case, self.case = cases()[self.case], None
        self.process.kill()
        self.process.join()
        message = f"{message} (exit code {self.process.exitcode})"
        self._start()
        return Result(name=case.name, core=case.core, status=status, message=message)

    def stop(self) -> None:
        """End the process."""
        if self.case is None:
            self.connection.send(None)
            self.process.join(timeout=5)
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(indices: Sequence[int], target: str, worker_count: int) -> list[Result]:
    """Run cases on ``worker_count`` processes; return their results in the order of the cases."""
    waiting = list(reversed(indices))
    results: list[Result] = []
    workers = [Worker(target) for _ in range(min(worker_count, max(1, len(waiting))))]
    try:
        while len(results) < len(indices):
            for worker in workers:
                if worker.case is None and waiting:
                    worker.give(waiting.pop())
            wait([worker.connection for worker in workers if worker.case is not None], timeout=1)
            results += [result for worker in workers if worker.case is not None and (result := worker.take())]
    finally:
        for worker in workers:
            worker.stop()
    order = {cases()[index].name: place for place, index in enumerate(indices)}
    return sorted(results, key=lambda result: order[result.name])


def is_excused(result: Result) -> bool:
    """Return whether ONNX Runtime fails, too, and the CPU target refuses the case."""
    return result.onnxruntime not in ("", "pass") and result.status == "refused"


def known_failures(path: Path) -> dict[str, str]:
    """Read a file of lines ``case: reason``; lines that start with # are headings."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines)
