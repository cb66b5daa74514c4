
"""Networks whose sizes and structure change from call to call: the table of Nimble (Shen et al., MLSys 2021) rebuilt.

    python -m bench.dynamic --cpu -o bench/results/cpu/dynamic.json
    python -m bench.dynamic --show bench/results/cpu/dynamic.json

LSTMs of 1 and 2 layers (300 to 512, last state) and BERT-base read sentences of 8 to 64 words, a child-sum Tree-LSTM
(300 to 150) binary trees of as many leaves; sizes are drawn, the same for every system. A figure is the median, over
rounds, of the mean time of a call from numpy arrays to numpy arrays. Each system is measured in a process of its own,
one after the other, on as many threads.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench import environment
from bench.tables import number, table
from samples import tree_lstm

NETWORKS = ("lstm", "lstm of 2 layers", "tree-lstm", "bert-base")
SYSTEMS = ("nimblec", "eager", "torch.compile", "onnxruntime")

_LEAST, _MOST, _SAMPLES, _ROUNDS = 8, 64, 40, 5

Arrays = tuple[np.ndarray, ...]
Call = Callable[[Arrays], object]


class _LastState(nn.Module):
    """The last hidden state of an LSTM."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(300, 512, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Encode words (length x 1 x 300) as 1 x 512."""
        state: Tensor = self.lstm(x)[1][0][-1]
        return state


class _Recursive(nn.Module):
    """A Tree-LSTM as people write it: a function that calls itself for each child."""

    def __init__(self, cell: tree_lstm.ChildSum | tree_lstm.Binary) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, words: Tensor, children: Tensor, count: Tensor) -> Tensor:
        """Compute what `tree_lstm.TreeLSTM` does."""
        rows = children.tolist()
        none = words.new_zeros(1, self.cell.width)

        def visit(node: int) -> tuple[Tensor, Tensor]:
            states = [visit(child) if child >= 0 else (none, none) for child in rows[node]]
            h, c = (torch.cat(part) for part in zip(*states, strict=True))
            found: tuple[Tensor, Tensor] = self.cell(words[node : node + 1], h, c)
            return found

        return visit(int(count) - 1)[0]


def build(network: str) -> nn.Module:
    """Return a network with seeded random weights."""
    torch.manual_seed(0)
    if network == "tree-lstm":
        return tree_lstm.child_sum()[0]
    if network == "bert-base":
        from transformers import BertConfig, BertModel

        from bench.models.texts import Outputs

        return Outputs(BertModel(BertConfig()), "last_hidden_state").eval()
    return _LastState(2 if "2" in network else 1).eval()


def samples(network: str) -> list[Arrays]:
    """Return the inputs of the calls."""
    random = np.random.default_rng(0)
    lengths = np.clip(np.rint(random.normal(24, 12, _SAMPLES)), _LEAST, _MOST).astype(int)
    if network == "bert-base":
        return [(random.integers(1, 30_000, (1, n)), np.ones((1, n), np.int64)) for n in lengths]
    if network != "tree-lstm":
        return [(random.standard_normal((n, 1, 300)).astype(np.float32),) for n in lengths]

    def tree(leaves: int) -> tree_lstm.Tree:
        if leaves == 1:
            return []
        left = int(random.integers(1, leaves))
        return [tree(left), tree(leaves - left)]

    words = [random.standard_normal((tree_lstm.MOST_NODES, 300)).astype(np.float32) for _ in lengths]
    arrays = [tree_lstm.post_order(tree(n), 2).numpy() for n in lengths]
    return [(x, rows, np.array(2 * n - 1)) for x, rows, n in zip(words, arrays, lengths, strict=True)]


def _dynamic(network: str) -> dict[str, Any]:
    """Return the arguments of `nimblec.compile` for the sizes of a network."""
    dim = torch.export.Dim("n", min=2, max=128)
    if network == "tree-lstm":
        return {}
    if network == "bert-base":
        sizes = {"dims": {"n": (8, 16, 24, 32, 48, 64)}, "pad_masks": "attention_mask"}
        return {"dynamic_shapes": ({1: dim}, {1: dim}), **sizes}
    return {"dynamic_shapes": ({0: dim},), "dims": {"n": range(_LEAST, _MOST + 1)}}


def caller(network: str, system: str, threads: int) -> Call:
    """Return a call of a network in a system, on the CPU."""
    module = build(network)
    example = tuple(map(torch.from_numpy, samples(network)[0]))
    if system == "nimblec":
        import nimblec
        import nimblert

        plan = nimblec.compile(module, example, target="cpu", plan_cache=None, streams=1, **_dynamic(network))
        executable = nimblert.load(plan, threads=threads)
        return lambda arrays: executable(*arrays)
    if system == "onnxruntime":
        return _session(module, example, network, threads)
    if isinstance(module, tree_lstm.TreeLSTM):
        module = _Recursive(module.cell)
    if system == "torch.compile":
        target = module.cell if isinstance(module, _Recursive) else module
        target.compile(dynamic=True)

    def run(arrays: Arrays) -> object:
        with torch.inference_mode():
            return module(*map(torch.from_numpy, arrays)).numpy()

    return run


def _session(module: nn.Module, example: tuple[Tensor, ...], network: str, threads: int) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        if network.startswith("lstm"):  # torch.export fixes its length
            axes = {"x": {0: "n"}}
            torch.onnx.export(module, example, str(path), input_names=["x"], dynamic_axes=axes, dynamo=False)
        else:
            shapes = _dynamic(network).get("dynamic_shapes")
            torch.onnx.export(module, example, path, dynamic_shapes=shapes, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def measure(network: str, system: str, threads: int) -> dict[str, Any]:
    """Return the times of a call, and how far results are from eager's."""
    torch.set_num_threads(threads)
    inputs = samples(network)
    call, eager = caller(network, system, threads), caller(network, "eager", threads)
    gap = 0.0
    for arrays in inputs:
        found = call(arrays)
        found = np.asarray(found[0] if isinstance(found, list) else found)
        wanted = np.asarray(eager(arrays))
        gap = max(gap, float(np.abs(found.reshape(wanted.shape) - wanted).max() / np.abs(wanted).max()))
    rounds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for arrays in inputs:
            call(arrays)
        rounds.append((time.perf_counter() - begin) / len(inputs) * 1e6)
    return {"call_us": median(rounds), "rounds_us": rounds, "gap": gap}


def show(figures: dict[str, Any]) -> list[str]:
    """Return the table of milliseconds."""
    rows = []
    for network in NETWORKS:
        times = [figures["figures"].get(f"{network}/{system}", {}).get("call_us") for system in SYSTEMS]
        rows.append([network, *(number(t and t / 1e3, 2) for t in times)])
    return table(["ms a call", *SYSTEMS], rows)


def main(arguments: Sequence[str]) -> None:
    """Measure every network in every system, and write and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.dynamic", description=__doc__)
    parser.add_argument("--cpu", action="store_true", required="--show" not in arguments, help="the CPU target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of these figures")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.show:
        print("\n".join(show(json.loads(options.show.read_text()))))
        return
    if options.one:
        network, system = options.one
        print(json.dumps(measure(network, system, options.threads)))
        return
    figures: dict[str, Any] = {"machine": environment.describe(), "threads": options.threads, "figures": {}}
    for network in NETWORKS:
        for system in SYSTEMS:
            command = [sys.executable, "-m", "bench.dynamic", "--cpu", "--threads", str(options.threads)]
            done = subprocess.run([*command, "--one", network, system], capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{network}, {system}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            figures["figures"][f"{network}/{system}"] = json.loads(done.stdout.splitlines()[-1])
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(show(figures)))


if __name__ == "__main__":
    main(sys.argv[1:])
