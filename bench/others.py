"""Peers other than torch.compile: AOTInductor, XLA through JAX, ONNX Runtime's CUDA provider, IREE.

Usage: python -m bench.others [--gpus N] [--jobs J] [--add] | --markdown. Each peer is a process of its own (one of
bench/*_peer.py), which measures while everything else is stopped (bench/turns.py). The figures are in
bench/results/gpu/others.json; ours are those of peers.json. A peer that cannot run has a row with the reason. IREE
measures the result of `bench.iree_peer compile` in the folder $IREE_RESNET50.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from bench import environment, peers, peers_table, running
from bench.running import Table, short
from bench.tables import header, number, row
from bench.turns import Job

PATH = peers.FOLDER / "others.json"
RESNET, BERT = "bench.models.resnet50:fp16", "bench.models.bert_base:fp16"
_LIMIT_S = 300


def programs() -> dict[tuple[str, str], tuple[str, ...]]:
    """The program of each model and peer."""
    found: dict[tuple[str, str], tuple[str, ...]]
    found = {(spec, "AOTInductor"): ("bench.torch_peer", "aoti", spec) for spec in peers.TUNED}
    found |= {(spec, "ONNX Runtime CUDA"): ("bench.onnxruntime_peer", spec) for spec in (RESNET, BERT)}
    found[RESNET, "JAX"] = ("bench.jax_peer", "bench.models.jax_resnet50:fp16")
    found[BERT, "JAX"] = ("bench.jax_peer", "bench.models.jax_bert_base:fp16")
    found[BERT, "JAX, cuDNN attention"] = ("bench.jax_peer", "bench.models.jax_bert_base:fp16_cudnn_attention")
    found[RESNET, "IREE"] = ("bench.iree_peer", "measure", os.environ.get("IREE_RESNET50", "iree_resnet50"))
    return found


def table() -> Table:
    """A job for each model and peer."""

    def job(spec: str, peer: str, program: tuple[str, ...]) -> Job:
        command = (sys.executable, "-m", *program, "--turns")
        return Job(table=str(PATH), model=spec, mode=peer, command=command, limit_s=_LIMIT_S)

    return Table(path=PATH, jobs=tuple((job(spec, peer, program),) for (spec, peer), program in programs().items()))


def markdown(results: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """A line for each model and peer: its times, ours, and their ratio."""
    below = environment.provenance(dict(results))
    head = ["model", "peer", "kernels: peer / ours, us", "call / our replay, us", "call from numpy, us", "error"]
    lines = header(head)
    for spec, peer in programs():
        found = results["models"].get(spec, {}).get(peer, {"failed": "not tried"})
        if "failed" in found:
            lines.append(row([short(spec), peer, f"does not run: {found['failed'][:100]}", "", "", ""]))
            continue
        figures = {**ours["models"].get(spec, {}), peer: found}
        pairs = [
            _pair(figures, peer, theirs, own)
            for theirs, own in (("kernels_us", "kernels_us"), ("call_us", "replay_us"), ("numpy_us", "numpy_us"))
        ]
        lines.append(row([short(spec), peer, *pairs, f"{found['error']:.1e}" if "error" in found else "-"]))
    return "\n".join([*lines, "", below])


def _pair(figures: peers_table.Figures, peer: str, theirs: str, own: str) -> str:
    ours = peers_table.fastest(figures, peers_table.levels(figures), own)
    ratio = peers_table.ratio(figures, peers_table.Comparison(title="", modes=(peer,), theirs=theirs, ours=own))
    times = f"{peers_table.cell(figures, peer, theirs)} / {peers_table.cell(figures, ours, own)}"
    return f"{times} ({number(ratio, 2)})"


def main(arguments: list[str]) -> None:
    """Measure, or show the results."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--markdown", action="store_true")
    running.add_options(made)
    options = made.parse_args(arguments)
    if options.markdown:
        ours = environment.read(peers.FOLDER / "peers.json")
        print(markdown(environment.read(PATH), ours))
    else:
        running.measure([table()], options)
        print(running.summary(table()))


if __name__ == "__main__":
    main(sys.argv[1:])
