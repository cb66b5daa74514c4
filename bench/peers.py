"""nimblec and torch's modes side by side, each model in each mode in a process of its own.

Usage: python -m bench.peers [--precision fp32 | --batches] [--markdown | --plot FILE.svg] [MODEL ...], a model being
package.module:callable. Processes get ready side by side (--jobs) and measure alone (bench/turns.py), on each of
--gpus with its share of the cores, all of a model on one of them. What they measure is written as it comes, to
peers.json, peers_fp32.json (TF32 off on both sides) or batches.json (four of the networks at batch sizes 1, 4, 16,
64) in bench/results/h200, or to --output. With --add what the file holds already stays, and what is measured now is
added. --markdown prints the table, --plot draws it.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from bench import environment, peers_table
from bench.peers_table import TORCH_MODES, level_name
from bench.turns import Job, Place, Result, take_turns
from nimblec import processes
from nimblert.replacing import replacing

FOLDER = Path(__file__).parent / "results" / "h200"
TUNED = (
    "bench.models.resnet50:fp16",
    "bench.models.mobilenet_v2:fp16",
    "bench.models.inception_v3:fp16",
    "bench.models.bert_base:fp16",
    "bench.models.gpt2:bf16",
)
"""For these torch also tunes, minutes each."""

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
BATCHED = tuple(f"bench.models.{name}:fp16" for name in ("resnet50", "mobilenet_v2", "inception_v3", "bert_base"))
BATCH_SIZES = (4, 16, 64)  # beside 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="*", metavar="MODEL")
    made.add_argument("--precision", choices=("keep", "fp32"), default="keep")
    made.add_argument("--batches", action="store_true")
    made.add_argument("--modes", help=f"of torch, among {','.join(TORCH_MODES)}")
    made.add_argument("--tune", choices=("some", "all", "none"), default="some", help="for which models torch tunes")
    made.add_argument("--levels", default="0,1,2", help="of nimblec")
    made.add_argument("--jobs", type=int, default=8, help="processes of a GPU that get ready side by side")
    made.add_argument("--gpus", type=int, default=1, help="of those in CUDA_VISIBLE_DEVICES, where it is set")
    made.add_argument("--limit", type=float, default=300, help="seconds that a process may take")
    made.add_argument("--tuning-limit", type=float, default=400, help="the same where torch tunes")
    made.add_argument("--stop-after", type=float, default=3600, help="seconds after which nothing starts")
    made.add_argument("--output", type=Path, help="where the figures are")
    made.add_argument("--add", action="store_true")
    made.add_argument("--markdown", action="store_true")
    made.add_argument("--plot", type=Path, metavar="FILE.svg")
    return made


def results_path(options: argparse.Namespace) -> Path:
    """The file of a table's figures."""
    name = "batches" if options.batches else "peers_fp32" if options.precision == "fp32" else "peers"
    return options.output or FOLDER / f"{name}.json"


def models(options: argparse.Namespace) -> tuple[str, ...]:
    """Those named, or those of the table."""
    if options.models:
        return tuple(options.models)
    if options.batches:
        return tuple(spec + batch for spec in BATCHED for batch in ("", *(f"_batch_{n}" for n in BATCH_SIZES)))
    if options.precision == "fp32":
        return tuple(spec.partition(":")[0] + ":fp32" for spec in MODELS)
    return MODELS


def jobs(options: argparse.Namespace) -> Iterator[list[Job]]:
    """What to run, by model: those that torch tunes first, as they take longest."""
    default = "compile,freeze" if options.batches else "eager,graph,compile,freeze"
    modes = [mode for mode in (default if options.modes is None else options.modes).split(",") if mode]
    flags = ("--turns", *(["--fp32"] if options.precision == "fp32" else []))
    tuned = {"some": () if options.batches else TUNED, "all": models(options), "none": ()}[options.tune]
    for spec in sorted(models(options), key=lambda spec: spec not in tuned):
        own = dict.fromkeys([*(["autotune"] if spec in tuned else []), *modes])
        theirs = [(mode, ("bench.torch_peer", mode)) for mode in own]
        ours = [(level_name(int(n)), ("bench.nimblec_peer", n)) for n in filter(None, options.levels.split(","))]
        yield [_job(spec, mode, program, flags, options) for mode, program in theirs + ours]


def places(options: argparse.Namespace) -> Iterator[Place]:
    """The GPUs, each with its share of the cores, which takes on the next model when it is done with one."""
    cores = sorted(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if visible != [""] else [str(gpu) for gpu in range(options.gpus)]
    waiting = jobs(options)
    for gpu in range(options.gpus):
        own = cores[gpu * len(cores) // options.gpus : (gpu + 1) * len(cores) // options.gpus]
        yield Place(
            jobs=chain.from_iterable(waiting),
            environment=surroundings(len(own) // options.jobs) | {"CUDA_VISIBLE_DEVICES": names[gpu]},
            prefix=("taskset", "--cpu-list", ",".join(map(str, own))),
        )


def _job(spec: str, mode: str, program: tuple[str, str], flags: tuple[str, ...], options: argparse.Namespace) -> Job:
    limit_s = options.tuning_limit if mode == "autotune" else options.limit
    return Job(model=spec, mode=mode, command=(sys.executable, "-m", *program, spec, *flags), limit_s=limit_s)


def surroundings(cores: int) -> dict[str, str]:
    """The environment of a measuring process: its share of the cores for what it compiles."""
    share = str(max(1, cores))
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": share, "OMP_NUM_THREADS": share}
    return {**processes.environment(), **threads, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all jobs; the figures are in the file whenever one has ended."""
    path = results_path(options)
    results: dict[str, Any] = {
        "environment": environment.describe(),
        "settings": {"gpus": options.gpus, "jobs": options.jobs, "precision": options.precision},
        "models": json.loads(path.read_text())["models"] if options.add and path.exists() else {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)

    def done(job: Job, result: Result) -> None:
        results["models"].setdefault(job.model, {})[job.mode] = result | {"jobs": options.jobs}
        with replacing(path) as file:
            file.write((json.dumps(results, indent=1, sort_keys=True) + "\n").encode())
        wall = result.get("wall_us", {}).get("median")
        print(job.model, job.mode, f"{wall:.0f} us" if wall else "", result.get("failed", ""), flush=True)

    take_turns(
        places(options),
        side_by_side=options.jobs,
        stop_after_s=options.stop_after,
        done=done,
    )
    return results


def main(arguments: list[str]) -> None:
    """Measure, or show what was measured."""
    options = parser().parse_args(arguments)
    shown, path = options.markdown or options.plot, results_path(options)
    if shown and options.output and not path.exists():
        sys.exit(f"{path}: there is no such file")
    results = environment.read(path) if shown else measure(options)
    if options.plot:
        from bench import peers_plot

        peers_plot.draw(results, options.plot, batches=options.batches)
    else:
        print(peers_table.batches(results) if options.batches else peers_table.markdown(results))


if __name__ == "__main__":
    main(sys.argv[1:])
