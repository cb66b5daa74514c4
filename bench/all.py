"""Run all benchmarks of the GPU target, the most important first, within a time limit.

Usage: python -m bench.all [--gpus N] [--jobs J] [--stop-after SECONDS] [--only NAME,...]. Processes are one queue: they
prepare side by side and measure alone (bench/running.py). The tables are those of networks (zoo, peers, schedules,
batches, fp32), of a decoder (a step, and prefill), of training steps (training and its namesakes, and bits, which
compares them with eager's), of plans for any size (sizes) and of new weights (refit). Max-autotune, which times
candidates for minutes (tuned, in peers.json), comes last, one process at a time. `bench.arenas` and `bench.resume` need
the machine to themselves.

The files keep figures of this commit and kind of GPU, so the same command resumes an interrupted run. On a machine
without the repository, NIMBLEC_COMMIT names the commit.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from bench import decoder, peers, refit, running, schedules, sizes, training, training_bits, zoo

_TWO = ("--modes", "O2,compile")
_THREE = ("--modes", "O2,compile,eager")
_BF16 = ("--autocast", "bf16")
_SLOWEST = ("--limit", "900")
"""Seconds that EfficientNet-B0 may take beside others."""

_AT_SIZE = ("imagenet_resnet50_batch_64", "bert_base_batch_32", "cyclegan_batch_1")

COMMANDS = {
    "zoo": (zoo, "zoo", ("--limit", "420")),
    # NASNet-A large takes long on its share of the cores.
    "peers": (peers, "peers", ("--tune", "none", "--limit", "480")),
    "schedules": (schedules, "schedules", ()),
    "batches": (peers, "batches", ("--batches",)),
    "fp32": (peers, "peers_fp32", ("--precision", "fp32", "--modes", "eager,freeze")),
    "decoder": (decoder, "decoder", ()),
    "prefill": (peers, "prefill", ("--tune", "none", "--modes", "compile,freeze", "bench.models.tiny_llama:bf16")),
    "training_at_size": (training, "training_at_size", (*_THREE, *_SLOWEST, *_AT_SIZE)),
    "training": (training, "training", (*_THREE, *_SLOWEST, *training.models(32))),
    "training_bf16": (training, "training_bf16", (*_BF16, *_THREE, *_SLOWEST, *training.models(32))),
    "training_nasnet": (training, "training_nasnet", ("--modes", "O0,eager", *_SLOWEST, training.WIDEST)),
    "training_batches": (training, "training_batches", (*_TWO, *_SLOWEST, *training.models(128, 8, 2))),
    "training_bf16_batches": (
        training,
        "training_bf16_batches",
        (*_BF16, *_TWO, *_SLOWEST, *training.models(128, 8)),
    ),
    "bits": (training_bits, "training_bits", ()),
    "sizes": (sizes, "sizes", ()),
    "refit": (refit, "refit", ()),
    "tuned": (peers, "peers", ("--tune", "all", "--modes", "", "--levels", "", *peers.TUNED)),
}
"""The module, the file of figures and the arguments of each table."""


def table(name: str) -> running.Table:
    """Return a table of `COMMANDS`."""
    module, file, arguments = COMMANDS[name]
    path = running.FOLDER / f"{file}.json"
    return module.table(module.parser().parse_args([*arguments, "--output", str(path)]))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default=",".join(COMMANDS), metavar="NAME,...")
    running.add_options(made)
    made.set_defaults(add=True)
    return made


def main(arguments: Sequence[str]) -> None:
    """Measure what is missing, until time is up."""
    options = parser().parse_args(arguments)
    begin = time.monotonic()
    names = options.only.split(",")
    if unknown := set(names) - COMMANDS.keys():
        raise SystemExit(f"--only {min(unknown)}: expected names from {', '.join(COMMANDS)}")
    tables = {name: table(name) for name in names}
    running.measure([tables[name] for name in names if name != "tuned"], options)
    left_s = options.stop_after - (time.monotonic() - begin)
    if "tuned" in names and left_s > 0:
        running.measure([tables["tuned"]], argparse.Namespace(**{**vars(options), "jobs": 1, "stop_after": left_s}))
    print("\n".join(running.summary(tables[name]) for name in names))


if __name__ == "__main__":
    main(sys.argv[1:])
