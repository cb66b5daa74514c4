"""One network written in JAX, compiled by XLA; prints one JSON object of figures and nothing else.

Usage: python -m bench.jax_peer MODEL [--fp32] [--turns]; MODEL is package.module:callable, which returns (function,
(weights, input, ...)) as those of bench.models.jax_resnet50 do. --fp32 switches TF32 off; --turns takes turns with
other processes at measuring.

The weights are constants of the compiled function: as arguments they would cost 0.2 ms per call. XLA puts kernels in
CUDA graphs by itself. call_us: the wall clock of a synchronised call, inputs in the GPU's memory. back_to_back_us: the
wall clock of a hundred calls with one synchronisation, divided by a hundred. numpy_us: as call_us, from arrays to
arrays. kernels_us: from the start of a call's first kernel to the end of its last, in a profiler's trace of
synchronised calls; busy_us: the part of that time in which a kernel runs.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # most of the GPU's memory, otherwise

import jax
import numpy as np
from jax import numpy as jnp
from jax.profiler import ProfileData

from bench import clocks, peer_calls, reference
from bench.environment import describe
from bench.turns import Scenario, peer_parser, run_peer

_IN_A_ROW = 100


def back_to_back_us(call: peer_calls.Call) -> list[float]:
    """Return the microseconds per call of a hundred calls with one synchronisation, many times."""

    def calls() -> None:
        for _ in range(_IN_A_ROW - 1):
            call()
        jax.block_until_ready(call())

    return [time_us / _IN_A_ROW for time_us in peer_calls.wall_us(calls)]


def kernels(call: peer_calls.Call) -> list[peer_calls.Span]:
    """Return the kernels of `peer_calls.apart` calls, by JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            peer_calls.apart(call)
        profiles = [ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
        return [span for profile in profiles for span in kernel_spans(profile)]


def kernel_spans(profile: ProfileData) -> Iterator[peer_calls.Span]:
    """Yield the kernels on the streams of GPUs, without copies and fills."""
    for plane in profile.planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            if line.name.startswith("Stream"):
                for event in line.events:
                    if not event.name.lower().startswith(("memcpy", "memset")):
                        yield event.start_ns / 1e3, event.end_ns / 1e3


def floats(outputs: Any) -> list[np.ndarray]:
    """Return the arrays of a result, in their order, on the host, in single precision."""
    return [np.asarray(leaf).astype(np.float32) for leaf in jax.tree.leaves(outputs)]


def exact(function: Callable[..., Any], weights: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the outputs in float32 without TF32, with the same weights and inputs."""

    def widened(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array

    with jax.default_matmul_precision("highest"):
        return floats(jax.jit(function)(*jax.tree.map(widened, (weights, *inputs))))


def prepare(options: argparse.Namespace, _: Path, __: ExitStack) -> Scenario:
    """Compile the network."""
    if options.fp32:
        jax.config.update("jax_default_matmul_precision", "highest")
    function, (weights, *inputs), ___ = reference.seeded(options.model)
    expected = exact(function, weights, inputs)
    placed, given = jax.device_put((weights, inputs))
    begin = time.perf_counter()
    compiled = jax.jit(lambda *arrays: function(placed, *arrays))
    found = jax.block_until_ready(compiled(*given))
    figures = {"prepare_s": time.perf_counter() - begin, "error": reference.error(floats(found), expected)}

    def launch() -> Any:
        return compiled(*given)

    def call() -> None:
        jax.block_until_ready(launch())

    def measure() -> dict[str, Any]:
        times = clocks.quietest(
            {
                "call": lambda: {"call_us": peer_calls.wall_us(call)},
                "back to back": lambda: {"back_to_back_us": back_to_back_us(launch)},
                "numpy": lambda: {"numpy_us": peer_calls.wall_us(lambda: floats(compiled(*inputs)))},
            }
        )
        traced = peer_calls.figures(kernels(call)) if jax.default_backend() == "gpu" else {}
        return {**figures, **times, **traced, "backend": jax.default_backend(), "environment": describe()}

    return Scenario(measure=measure)


def main() -> None:
    """Measure the network named ``package.module:callable``."""
    run_peer(peer_parser(__doc__), prepare)


if __name__ == "__main__":
    main()
