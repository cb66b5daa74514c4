"""The process that compiles for a GPU that is not there: ``python -m nimblec.cuda.absent.worker REQUEST EVENTS_FD``.

It replaces functions of torch (`nimblec.cuda.absent.inductor`), so every compilation has a fresh process.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nimblec.base.errors import CompileError
from nimblec.cuda.check import report
from nimblec.cuda.common_state import refuse_folded_state, with_common_state
from nimblec.cuda.given_weights import with_weights
from nimblec.cuda.load import choose_without_timing, load_models
from nimblec.cuda.reports import Reports
from nimblec.cuda.request import CompileRequest
from nimblec.cuda.selection import half, refuse_without_fp8
from nimblec.cuda.worker import serve
from nimblec.kernels.gpu import GPU, KNOWN
from nimblec.padding.fits import mark_masks
from nimblec.plan import encoder
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.planning import choose_schedule
from nimblec.plan.timing_cache import TimingCache
from nimblert import golden
from nimblert.plan import Device, Program, Target

if TYPE_CHECKING:
    from nimblec.base.ir import Part
    from nimblec.pytorch.model import TorchModel

_SEED = 0
_TOLERANCES = {"float32": 5e-3, "float16": 2e-2, "fp16": 2e-2, "bfloat16": 8e-2, "bf16": 8e-2, "fp8": 8e-2}
"""The largest difference from the CPU's results to allow on the GPU, relative to an output's largest magnitude."""


def find_gpu(name: str) -> GPU:
    """Return the record of a GPU by its architecture's name, such as "sm_90". Raises CompileError for another."""
    known = {f"sm_{gpu.architecture}": gpu for gpu in KNOWN}
    if name not in known:
        raise CompileError(f"--target {name}: is not known here: give one of {', '.join(known)}, cuda or cpu")
    return known[name]


class _Worker:
    def __init__(self, request: CompileRequest, reports: Reports) -> None:
        self._request = request
        self._reports = reports
        self._gpu = find_gpu(request.options.target)

    def compile(self) -> None:
        request, reports = self._request, self._reports
        with reports.stage("import the framework"):
            import torch

            if torch.version.cuda is None:
                raise CompileError(
                    f"--target {request.options.target} needs PyTorch's CUDA build, which needs no GPU for it: this is "
                    f"torch {torch.__version__}"
                )
            from nimblec.cuda.absent.inductor import pretend
            from nimblec.kernels import triton_start

            triton_start.choose_assembler_and_cache()
            # It names files of this machine.
            os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
            pretend(self._gpu)
            refuse_without_fp8(request.options.precision, self._gpu.capability)
        with reports.stage("load the model"):
            originals = load_models(request, device="cpu")
            choose_without_timing()
            if len(originals) > 1:
                originals = with_common_state(originals)
        parts, rewritten = [], []
        for (entry, profile), original in originals.items():
            reports.note(original.notes)
            kernels, part = self._compiled(original)
            graph = with_weights(part.graph, original, as_it_runs=False)
            parts.append(replace(part, graph=graph, entry=entry, profile=profile))
            rewritten.append(kernels)
        refuse_folded_state(
            {part.name: original.module for part, original in zip(parts, originals.values(), strict=True)},
            {part.name: part.graph for part in parts},
            as_they_run=(),
            kept={part.name: model.written_elsewhere for part, model in zip(parts, rewritten, strict=True)},
        )
        plan = mark_masks(assemble(parts, self._provenance()), request.options.pad_masks)
        with reports.stage("run on the CPU"):
            programs = zip(plan.programs, rewritten, originals.values(), strict=True)
            plan = replace(plan, programs=tuple(self._with_golden(*each) for each in programs))
        if request.options.sizes:
            names = ", ".join(name for name, _ in request.options.sizes)
            reports.note([f"{names}: calls of other sizes are refused: only runs on the GPU show which can be padded"])
        with reports.stage("write"):
            encoder.write(plan, request.output)

    def _compiled(self, original: "TorchModel") -> "tuple[TorchModel, Part]":
        """Return a model after the rewrites that the CPU can compute, and its scheduled graph for the GPU."""
        from nimblec.cuda.absent.layout import LAYOUT
        from nimblec.cuda.absent.tracer import trace
        from nimblec.kernels.compiling import compile_all
        from nimblec.kernels.launch import jobs
        from nimblec.optimize import o2
        from nimblec.optimize.passes import inductor
        from nimblec.optimize.pipeline import Runs, Setting

        options, gpu = self._request.options, self._gpu
        tell = (lambda step: self._reports.note([str(step)])) if options.print_passes else None
        inductor.device.set("cuda")
        with self._reports.stage("optimize"):
            setting = Setting(
                device="cuda",
                dtype=half(options.precision),
                use=o2.first(gpu, TimingCache(options.timing_cache)),
                fp8=options.precision == "fp8",
            )
            runs = Runs(original, setting, tell)
            rewrites, *others = o2.TRITON
            pipelines = (rewrites, LAYOUT, *others)
            kernels, final = runs(*pipelines[:-1]), runs(*pipelines)
        with self._reports.stage("compile kernels"):
            compile_all(jobs(final.module.graph.nodes), gpu=gpu)
        with self._reports.stage("trace"):
            graph = trace(final, gpu)
        with self._reports.stage("schedule"):
            part = choose_schedule(
                graph, self._provenance(), None, streams=options.streams, memory_limit=options.memory_limit
            )
        self._reports.note(part.notes)
        return kernels, part

    def _with_golden(self, program: Program, kernels: "TorchModel", original: "TorchModel") -> Program:
        """Return the program with what the CPU computes by the same rewrites, and a tolerance for rounding."""
        import torch

        from nimblec.graph.state import slots
        from nimblec.optimize.variants import in_float16

        inputs = golden.draw_inputs(program, _SEED)
        # Neither graph writes the state, which a run of the model itself does.
        outputs = _compute(kernels, inputs)
        halves = _compute(in_float16(original), inputs) if self._request.options.precision == "fp8" else None
        state = [slot.tensor for slot in slots(kernels.module).values()]
        before = [tensor.clone() for tensor in state]
        compute = partial(_compute, original), lambda _: outputs
        fp16 = None if halves is None else lambda _: halves
        self._reports.note(report(program, *compute, self._request.options.max_error, seeds=1, fp16=fp16))
        with torch.no_grad():
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        dtypes = [tensor.dtype for tensor in (*program.inputs, *program.outputs)]
        tolerance = max(_TOLERANCES.get(name, 0.0) for name in (*dtypes, self._request.options.precision))
        return replace(program, golden=golden.record(_SEED, outputs, tolerance))

    def _provenance(self) -> Provenance:
        import torch
        import triton
        from triton.backends.nvidia.compiler import get_ptxas

        gpu, options = self._gpu, self._request.options
        device = Device(
            name=f"sm_{gpu.architecture} by record",
            compute_capability=gpu.capability,
            multiprocessor_count=gpu.multiprocessors,
            # Within a major version of CUDA a driver runs the cubins of every minor one.
            driver_version=1000 * int(str(get_ptxas(gpu.architecture).version).partition(".")[0]),
        )
        versions = (("torch", torch.__version__), ("triton", triton.__version__))
        how = (("level", "-O2, by record"), ("precision", options.precision))
        return Provenance(target=Target.CUDA, device=device, versions=(*versions, *how))


def _compute(model: "TorchModel", inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    """Return a model's results on the CPU."""
    import torch

    from nimblec.pytorch.outputs import name_outputs
    from nimblec.pytorch.tensors import as_array, as_tensor

    with torch.no_grad():
        for name, tensor in model.inputs:
            tensor.copy_(as_tensor(inputs[name]))
        return [as_array(tensor) for _, tensor in name_outputs(model.run(lambda _: None))]


if __name__ == "__main__":
    # torch would start a GPU that is here, whatever the plan is for.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    status = serve(sys.argv[1], int(sys.argv[2]), lambda request, reports: _Worker(request, reports).compile())
    sys.stdout.flush()
    os._exit(status)
