"""nimblec compared with torch's modes, each model in each mode in a process of its own.

Usage: python -m bench.peers [--precision fp32 | --batches] [--markdown | --plot FILE.svg] [MODEL ...], a model being
package.module:callable. Figures of the processes (bench/running.py) are written as they come, to peers.json,
peers_fp32.json (TF32 off on both sides) or batches.json (four of the networks at batch sizes 1, 4, 16, 64) in
bench/results/gpu, or to --output. --add keeps the rows of the file, and measures only those that it lacks of this
commit. --markdown prints the table, --plot draws it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import environment, peers_table, running
from bench.peers_table import TORCH_MODES, level_name
from bench.running import Table
from bench.turns import Job

TUNED = (
    "bench.models.resnet50:fp16",
    "bench.models.mobilenet_v2:fp16",
    "bench.models.inception_v3:fp16",
    "bench.models.bert_base:fp16",
    "bench.models.gpt2:bf16",
)
"""The networks that torch also tunes, which takes minutes each."""
_TUNING = ("env", "TORCHINDUCTOR_COMPILE_THREADS=8")
"""Max-autotune compiles hundreds of candidates, and is what everything waits for in the end."""

MODELS = (
    "bench.models.resnet50:fp16",
    "bench.models.resnet101:fp16",
    "bench.models.mobilenet_v2:fp16",
    "bench.models.mobilenet_v3_large:fp16",
    "bench.models.efficientnet_b0:fp16",
    "bench.models.efficientnet_b5:fp16",
    "bench.models.inception_v3:fp16",
    "bench.models.nasnet_a_large:fp16",
    "bench.models.nasnet_a_mobile:fp16",
    "bench.models.densenet121:fp16",
    "bench.models.convnext_tiny:fp16",
    "bench.models.vit_b_16:fp16",
    "bench.models.bert_base:fp16",
    "bench.models.gpt2:bf16",
    "bench.models.t5_encoder:bf16",
    "bench.models.unet:fp16",
)
BATCHED = tuple(f"bench.models.{name}:fp16" for name in ("resnet50", "mobilenet_v2", "vit_b_16", "bert_base"))
BATCH_SIZES = (4, 16, 64)
"""In addition to 1."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = running.table_parser(__doc__, "MODEL", limit_s=300)
    made.add_argument("--precision", choices=("keep", "fp32"), default="keep")
    made.add_argument("--batches", action="store_true")
    made.add_argument("--modes", help=f"modes of torch, from {','.join(TORCH_MODES)}")
    made.add_argument("--tune", choices=("some", "all", "none"), default="some", help="the models that torch tunes")
    made.add_argument("--levels", default="2", help="levels of nimblec, such as 0,1,2")
    made.add_argument("--tuning-limit", type=float, default=480, help="seconds that a process may take if torch tunes")
    made.add_argument("--plot", type=Path, metavar="FILE.svg")
    return made


def models(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the models named on the command line, or those of the table."""
    if options.models:
        return tuple(options.models)
    if options.batches:
        return tuple(spec + suffix for spec in BATCHED for suffix in ("", *(f"_batch_{n}" for n in BATCH_SIZES)))
    if options.precision == "fp32":
        return tuple(spec.partition(":")[0] + ":fp32" for spec in MODELS)
    return MODELS


def table(options: argparse.Namespace) -> Table:
    """Return the jobs by model; those that torch tunes come first, as they take longest."""
    default = "compile,freeze" if options.batches else "eager,graph,compile,freeze"
    modes = [mode for mode in (default if options.modes is None else options.modes).split(",") if mode]
    fp32 = ("--fp32",) if options.precision == "fp32" else ()
    tuned = {"some": () if options.batches else TUNED, "all": models(options), "none": ()}[options.tune]
    programs = {}
    for spec in sorted(models(options), key=lambda spec: spec not in tuned):
        theirs = dict.fromkeys([*(["autotune"] if spec in tuned else []), *modes])
        programs[spec] = {mode: ("bench.torch_peer", mode, spec, *fp32) for mode in theirs}
        levels = [n for n in options.levels.split(",") if n]
        programs[spec] |= {level_name(int(n)): ("bench.nimblec_peer", n, spec, *fp32) for n in levels}
    name = "batches" if options.batches else "peers_fp32" if options.precision == "fp32" else "peers"
    made = running.table(f"{name}.json", programs, options)

    def tuning(job: Job) -> Job:
        return replace(job, command=(*_TUNING, *job.command), limit_s=options.tuning_limit)

    return replace(
        made, jobs=tuple(tuple(tuning(job) if job.mode == "autotune" else job for job in jobs) for jobs in made.jobs)
    )


def main(arguments: Sequence[str]) -> None:
    """Measure, or show or plot the results."""
    options = parser().parse_args(arguments)
    if options.plot:
        from bench import peers_plot

        peers_plot.draw(environment.read(table(options).path), options.plot, batches=options.batches)
    else:
        running.main(arguments, parser(), table, peers_table.markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
