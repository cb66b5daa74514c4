"""One model in ONNX Runtime's CUDA provider; prints one JSON object of figures and nothing else.

Usage: python -m bench.onnxruntime_peer MODEL [--fp32] [--nchw] [--cpu] [--turns]; MODEL is package.module:callable, as
for torch, exported by torch.onnx.export. Needs the package onnxruntime-gpu. A run is one CUDA graph, its inputs and
outputs are bound, and convolutions are NHWC unless --nchw is given. --fp32 switches TF32 off; --cpu takes the CPU
provider instead; --turns takes turns with other processes at measuring.

call_us: the wall clock of a synchronised run, inputs in the GPU's memory. numpy_us: the same from arrays to arrays.
kernels_us: from the start of a run's first kernel to the end of its last, in a profiler's trace; busy_us: the part of
that time in which a kernel runs.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from bench import environment, peer_calls, reference
from bench.turns import Scenario, peer_parser, run_peer

Providers = Sequence[tuple[str, Mapping[str, str]]]

CPU: Providers = (("CPUExecutionProvider", {}),)


def cuda(*, tf32: bool, nhwc: bool) -> Providers:
    """Return the CUDA provider: a session's runs are one CUDA graph, recorded in the first."""
    flags = {"enable_cuda_graph": True, "use_tf32": tf32, "prefer_nhwc": nhwc}
    options = {name: str(int(flag)) for name, flag in flags.items()} | {"cudnn_conv_algo_search": "EXHAUSTIVE"}
    return (("CUDAExecutionProvider", options),)


class Bound:
    """A session whose inputs and outputs are bound to memory of its device."""

    def __init__(
        self, path: Path, providers: Providers, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
    ) -> None:
        """Bind copies of ``inputs``, and memory for outputs with the dtypes and shapes of ``outputs``.

        The process ends if ONNX Runtime falls back from the first of ``providers`` to another.
        """
        self._session = onnxruntime.InferenceSession(path, providers=[*providers])
        asked, found = providers[0][0], self._session.get_providers()[0]
        if found != asked:
            sys.exit(f"ONNX Runtime takes {found}: {asked} cannot be loaded (its warning says why)")
        device = "cuda" if asked == "CUDAExecutionProvider" else "cpu"
        self._binding = self._session.io_binding()
        self._inputs, self._outputs = (
            [onnxruntime.OrtValue.ortvalue_from_numpy(array.copy(), device, 0) for array in arrays]
            for arrays in (inputs, outputs)
        )
        for place, value in zip(self._session.get_inputs(), self._inputs, strict=True):
            self._binding.bind_ortvalue_input(place.name, value)
        for place, value in zip(self._session.get_outputs(), self._outputs, strict=True):
            self._binding.bind_ortvalue_output(place.name, value)

    def run(self) -> None:
        """Compute the outputs, and wait for them."""
        self._session.run_with_iobinding(self._binding)

    def run_on(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the outputs on the host for inputs of the same dtypes and shapes."""
        for value, array in zip(self._inputs, inputs, strict=True):
            value.update_inplace(array)
        self.run()
        return [value.numpy() for value in self._outputs]


def prepare(options: argparse.Namespace, folder: Path, _: ExitStack) -> Scenario:
    """Export the model, and open a session."""
    providers = CPU if options.cpu else cuda(tf32=not options.fp32, nhwc=not options.nchw)
    module, args, kwargs = reference.seeded(options.model)
    with torch.no_grad():
        returned = module(*args, **kwargs)
    expected = reference.floats(returned) if options.cpu else reference.exact(module, args, kwargs)
    inputs = reference.host_arrays((args, kwargs))
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = folder / "model.onnx"
        torch.onnx.export(module, args, path, kwargs=kwargs, dynamo=True, verbose=False)
        bound = Bound(path, providers, inputs, reference.host_arrays(returned))
    found = bound.run_on(inputs)
    figures = {
        "prepare_s": time.perf_counter() - begin,
        "error": reference.error([array for array in found if array.dtype.kind == "f"], expected),
        "provider": providers[0][0],
        "environment": environment.describe(),
    }

    def measure() -> dict[str, Any]:
        times = peer_calls.quietest_calls(bound.run, lambda: bound.run_on(inputs))
        traced = {} if options.cpu else peer_calls.figures(peer_calls.by_torch(bound.run))
        return {**figures, **times, **traced}

    return Scenario(measure=measure)


def main() -> None:
    """Measure the model named ``package.module:callable``."""
    parser = peer_parser(__doc__)
    parser.add_argument("--nchw", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    run_peer(parser, prepare)


if __name__ == "__main__":
    main()
