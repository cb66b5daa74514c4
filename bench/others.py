"""Peers other than torch.compile: AOTInductor, XLA through JAX, ONNX Runtime's CUDA provider, IREE.

Usage: python -m bench.others [--gpus N] [--jobs J] [--add] | --markdown. Each peer is a process (bench/*_peer.py) and
measures while everything else is stopped (bench/turns.py). bench/results/gpu/others.json has their figures, peers.json
ours. A peer's kernels are those of a trace, without gaps. IREE measures the result of `bench.iree_peer compile` in the
folder $IREE_RESNET50. A peer that cannot run has a row with the reason.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench import environment, peers, running
from bench.peers_table import Comparison, cell, fastest, levels, ratio
from bench.running import Table, short
from bench.tables import by_columns, number

RESNET, BERT = "bench.models.resnet50:fp16", "bench.models.bert_base:fp16"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    return running.table_parser(__doc__, "MODEL", limit_s=300)


def table(options: argparse.Namespace) -> Table:
    """Return a job for each model and peer."""
    programs: dict[str, dict[str, Sequence[str]]] = {
        spec: {"AOTInductor": ("bench.torch_peer", "aoti", spec)} for spec in options.models or peers.TUNED
    }
    for spec in programs.keys() & {RESNET, BERT}:
        programs[spec]["ONNX Runtime CUDA"] = ("bench.onnxruntime_peer", spec)
        jax = spec.replace("models.", "models.jax_")
        programs[spec]["JAX"] = ("bench.jax_peer", jax)
        if spec == BERT:
            programs[spec]["JAX, cuDNN attention"] = ("bench.jax_peer", f"{jax}_cudnn_attention")
        else:
            programs[spec]["IREE"] = ("bench.iree_peer", "measure", os.environ.get("IREE_RESNET50", "iree_resnet50"))
    return running.table("others.json", programs, options)


def _pair(theirs: str, own: str, _: str, peer: str, figures: Mapping[str, Any]) -> str:
    found = ratio(figures, Comparison(title="", modes=(peer,), theirs=theirs, ours=own))
    ours = cell(figures, fastest(figures, levels(figures), own), own)
    return f"{cell(figures, peer, theirs)} / {ours} ({number(found, 2)})"


def _error(_: str, peer: str, figures: Mapping[str, Any]) -> str:
    found = figures[peer]
    return f"does not run: {found['failed'][:100]}" if "failed" in found else f"{found['error']:.1e}"


COLUMNS: dict[str, Callable[[str, str, Mapping[str, Any]], str]] = {
    "model": lambda spec, _, __: short(spec),
    "peer": lambda _, peer, __: peer,
    "kernels: peer (busy) / ours, us": partial(_pair, "busy_us", "kernels_us"),
    "call / our replay, us": partial(_pair, "call_us", "replay_us"),
    "call from numpy, us": partial(_pair, "numpy_us", "numpy_us"),
    "error": _error,
}


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each model and peer: its times, ours of peers.json, and their ratio."""
    ours = environment.read(running.FOLDER / "peers.json")["models"]
    models = results["models"].items()
    rows = [(spec, peer, {**ours.get(spec, {}), peer: f}) for spec, found in models for peer, f in found.items()]
    return "\n".join([*by_columns(COLUMNS, rows), "", environment.provenance(results)])


def main(arguments: Sequence[str]) -> None:
    """Measure, or show the results."""
    running.main(arguments, parser(), table, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
