"""Run all benchmarks of the GPU target, the most important first, within a time limit.

Usage: python -m bench.all [--gpus N] [--jobs J] [--stop-after SECONDS] [--only NAME,...]. The first part is one queue
of processes, which prepare side by side and measure alone (bench/running.py): the tables of networks (peers, schedules,
batches, fp32), of a decoder step (decoder), of training steps (training and its namesakes, and bits, which compares
them with eager's), of plans for any size (sizes) and of new weights (refit). The second part needs a GPU and its share
of the cores exclusively: max-autotune, which times candidates for minutes (tuned, in peers.json), and programs that
time kernels, compilations and starts or measure memory (singles, in singles.json). Figures are written to
bench/results/gpu as they come.

Figures of this commit and kind of GPU that the files already hold are kept, so the same command resumes an interrupted
run. On a machine without the repository, NIMBLEC_COMMIT names the commit.
"""

import argparse
import copy
import sys
import time

from bench import decoder, peers, refit, running, schedules, sizes, training, training_bits
from bench.running import Table
from bench.turns import Job

SINGLES = (
    ("compile_time",),
    ("cold_start",),
    ("resume",),
    ("conv_kernels", "--model", "efficientnet_b0"),
    ("conv_kernels", "--model", "mobilenet_v3"),
    ("attention_kernel",),
    ("conv_kernels", "--model", "resnet50", "--float32", "tf32"),
    ("conv_kernels", "--model", "resnet50", "--float32", "tf32x3"),
    ("conv_kernels", "--model", "vit", "--float32", "tf32x3"),
    ("grouped_convolutions",),
    ("arenas",),
)
_SINGLE_LIMIT_S = 400
NAMES = (
    *("peers", "schedules", "batches", "fp32", "decoder"),
    *("training", "training_bf16", "training_nasnet", "training_batches", "training_bf16_batches"),
    *("bits", "sizes", "refit", "tuned", "singles"),
)


def networks() -> dict[str, Table]:
    """The tables of networks by name."""
    largest = ("--limit", "480")  # seconds that NASNet-A large may take on its share of the cores
    return {
        "peers": peers.table(peers.parser().parse_args(["--tune", "none", *largest])),
        "schedules": schedules.table(schedules.parser().parse_args([])),
        "batches": peers.table(peers.parser().parse_args(["--batches"])),
        "fp32": peers.table(peers.parser().parse_args(["--precision", "fp32", "--modes", "eager,freeze"])),
        "decoder": decoder.table(decoder.parser().parse_args([])),
        **_training(),
        "bits": training_bits.table(training_bits.parser().parse_args([])),
        "sizes": sizes.table(sizes.parser().parse_args([])),
        "refit": refit.table(refit.parser().parse_args([])),
    }


def _training() -> dict[str, Table]:
    """The tables of training steps, each a file of its own name."""
    beside = ("--modes", "O2,compile,eager")
    largest = ("--limit", "900")  # seconds that EfficientNet-B0 may take beside others
    asked = {
        "training": (*beside, *training.models(32)),
        "training_bf16": ("--autocast", "bf16", *beside, *training.models(32)),
        "training_nasnet": ("--modes", "O0,eager", training.WIDEST),
        "training_batches": ("--modes", "O2,compile", *training.models(128, 8, 2)),
        "training_bf16_batches": ("--autocast", "bf16", "--modes", "O2,compile", *training.models(128, 8)),
    }
    paths = {name: ("--output", str(peers.FOLDER / f"{name}.json")) for name in asked}
    parser = training.parser()
    return {name: training.table(parser.parse_args([*asked[name], *paths[name], *largest])) for name in asked}


def tuned() -> Table:
    """Max-autotune of the networks that torch also tunes."""
    return peers.table(peers.parser().parse_args(["--tune", "all", "--modes", "", "--levels", "", *peers.TUNED]))


def singles() -> Table:
    """The programs that need a GPU exclusively from beginning to end."""
    path = peers.FOLDER / "singles.json"

    def job(program: tuple[str, ...]) -> Job:
        command = (sys.executable, "-m", "bench.single", *program)
        return Job(table=str(path), model=" ".join(program), mode="single", command=command, limit_s=_SINGLE_LIMIT_S)

    return Table(path=path, jobs=tuple((job(program),) for program in SINGLES))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default=",".join(NAMES), metavar="NAME,...")
    running.add_options(made)
    made.set_defaults(add=True)
    return made


def main(arguments: list[str]) -> None:
    """Measure what is missing, until time is up."""
    options = parser().parse_args(arguments)
    begin = time.monotonic()
    names = options.only.split(",")
    alone = {"tuned": tuned(), "singles": singles()}
    tables = {**networks(), **alone}
    if unknown := set(names) - tables.keys():
        raise SystemExit(f"--only {min(unknown)}: expected names from {', '.join(tables)}")
    running.measure([tables[name] for name in names if name not in alone], options)
    one_by_one = copy.copy(options)
    one_by_one.jobs = 1
    for name in names:
        one_by_one.stop_after = options.stop_after - (time.monotonic() - begin)
        if name in alone and one_by_one.stop_after > 0:
            running.measure([tables[name]], one_by_one)
    print("\n".join(running.summary(tables[name]) for name in names))


if __name__ == "__main__":
    main(sys.argv[1:])
