"""The three figures of the README, from the committed results.

Usage: python -m bench.headline --markdown
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from bench import environment, onnx_coverage, peers, peers_table, schedules, training
from bench.peers_table import COMPARISONS, Figures


def speedup(results: Mapping[str, Any]) -> tuple[float, int]:
    """torch.compile's GPU time over that of ``-O2`` at batch 1: the geometric mean, and the number of networks."""
    models: list[Figures] = [curve[1][1] for curve in peers_table.by_batch(results).values() if 1 in curve]
    ratios = [found for figures in models if (found := peers_table.ratio(figures, COMPARISONS[0])) is not None]
    mean = peers_table.geometric_mean(ratios)
    assert mean is not None, "no network was measured on both sides"
    return mean, len(ratios)


def training_speedup(results: Mapping[str, Any]) -> float:
    """torch.compile's call of a training step over a plan's: the geometric mean over its networks at batch 32."""
    mean = dict(training.means(results["models"]))["batch_32"][training.CALLS]
    assert mean is not None, "no network was measured on both sides"
    return mean


def scheduling(results: Mapping[str, Any]) -> tuple[float, int]:
    """One stream's GPU time over that of the chosen schedule: the geometric mean, and the number of networks."""
    gains = [gain for figures in results["models"].values() if (gain := schedules.gain(figures)) is not None]
    mean = peers_table.geometric_mean(gains)
    assert mean is not None, "no network was measured"
    return mean, len(gains)


def gpu(results: Mapping[str, Any]) -> str:
    """The GPU that figures were taken on, such as H200."""
    return environment.gpu_name(results["environment"]).removeprefix("NVIDIA ").split()[0]


def coverage(results: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """The numbers of ONNX's core backend cases that pass, and of all."""
    core = [result for result in results if result["core"]]
    return sum(result["status"] == "pass" for result in core), len(core)


def markdown() -> str:
    """Three list items."""
    inference, steps = (environment.read(peers.FOLDER / name) for name in ("peers.json", "training.json"))
    faster, networks = speedup(inference)
    trained = training_speedup(steps)
    elsewhere = "" if gpu(steps) == gpu(inference) else f" on an {gpu(steps)}"
    gain, scheduled = scheduling(environment.read(peers.FOLDER / "schedules.json"))
    passed, cases = coverage(environment.read(onnx_coverage.RESULTS / onnx_coverage.RESULT_NAMES["aten"])["results"])
    return (
        f"- **{faster:.2f}x** the speed of torch.compile: GPU time of all kernels at `-O2` and batch 1 on an "
        f"{gpu(inference)},\n"
        f"  geometric mean over {networks} networks; {trained:.2f}x for calls of training steps of "
        f"{len(training.NETWORKS)} at batch 32{elsewhere}.\n"
        f"- **{gain:.2f}x** from scheduling alone: the framework's own kernels on several streams instead of one,\n"
        f"  geometric mean over {scheduled} networks.\n"
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
