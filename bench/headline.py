"""The three figures of the README, from the committed results.

Usage: python -m bench.headline --markdown
"""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from bench import environment, onnx_coverage, running, schedules, training
from bench.peers_table import COMPARISONS, Figures, by_batch, geometric_mean, ratio


def speedup(results: Mapping[str, Any]) -> tuple[float, int]:
    """Return torch.compile's GPU time over that of ``-O2`` at batch 1: geometric mean and number of networks."""
    models: list[Figures] = [curve[1][1] for curve in by_batch(results).values() if 1 in curve]
    return _mean(ratio(figures, COMPARISONS[0]) for figures in models)


def _mean(values: Iterable[float | None]) -> tuple[float, int]:
    measured = [value for value in values if value is not None]
    mean = geometric_mean(measured)
    assert mean is not None, "no network was measured on both sides"
    return mean, len(measured)


def gpu(results: Mapping[str, Any]) -> str:
    """Return the GPU that figures were taken on, such as H200."""
    return environment.gpu_name(results["environment"]).removeprefix("NVIDIA ").split()[0]


def markdown() -> str:
    """Return three list items."""
    files = (environment.read(running.FOLDER / f"{name}.json") for name in ("peers", "training", "schedules"))
    inference, steps, scheduled = files
    faster, networks = speedup(inference)
    trained, _ = _mean([dict(training.means(steps["models"]))["batch_32"][training.CALLS]])
    elsewhere = "" if gpu(steps) == gpu(inference) else f" on an {gpu(steps)}"
    gain, branching = _mean(map(schedules.gain, scheduled["models"].values()))
    core = onnx_coverage.counts(environment.read(onnx_coverage.results_path("aten")), "core")
    passed, cases = core["pass"], core.total()
    return (
        f"- **{faster:.2f}x** the speed of torch.compile: GPU time of all kernels at `-O2` and batch 1 on an "
        f"{gpu(inference)},\n"
        f"  geometric mean over {networks} networks; {trained:.2f}x for calls of training steps, over "
        f"{len(training.NETWORKS)} networks at batch 32{elsewhere}.\n"
        f"- **{gain:.2f}x** from scheduling alone: the framework's own kernels on several streams instead of one,\n"
        f"  geometric mean over {branching} networks.\n"
        f"- **{passed:,} of {cases:,}** core cases of ONNX's backend tests pass on the CUDA target's import."
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", required=True)
    parser.parse_args()
    print(markdown())


if __name__ == "__main__":
    main()
