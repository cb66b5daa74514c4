"""Networks whose sizes and structure change from call to call: the table of Nimble (Shen et al., MLSys 2021) rebuilt.

    python -m bench.dynamic --cpu -o bench/results/cpu/dynamic.json
    python -m bench.dynamic --gpu -o bench/results/gpu/dynamic.json
    python -m bench.dynamic --show bench/results/cpu/dynamic.json

LSTMs of 1 and 2 layers (300 to 512, last state) and BERT-base read sentences of 8 to 64 words, a child-sum Tree-LSTM
(300 to 150) binary trees of as many leaves; sizes are drawn, the same for every system. A figure is the median, over
rounds, of the mean time of a call from numpy arrays to numpy arrays. Each system has a process of its own; they measure
one at a time (bench/turns.py), on as many threads. On the GPU, nimblec compiles at -O2, the Tree-LSTM by levels, LSTMs
read 16, 32, 48 or 64 words, and torch.compile makes CUDA graphs, but for the Tree-LSTM's cell: a later call of it reads
earlier results.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bench import environment
from bench.tables import number, table
from bench.turns import Turn, measured
from samples import tree_lstm

NETWORKS = ("lstm", "lstm of 2 layers", "tree-lstm", "bert-base")
SYSTEMS = ("nimblec", "eager", "torch.compile", "onnxruntime")
"""The last is measured on the CPU alone."""

_LSTM_SIZES = (16, 32, 48, 64)
_LEAST, _MOST, _SAMPLES, _WARM_UPS, _ROUNDS = 8, 64, 40, 2, 5

Arrays = tuple[np.ndarray, ...]
Target = Literal["cpu", "cuda"]
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
        rows, words = children.tolist(), words.to(self.cell.of_word.weight.device)
        none = words.new_zeros(1, self.cell.width)

        def visit(node: int) -> tuple[Tensor, Tensor]:
            states = [visit(child) if child >= 0 else (none, none) for child in rows[node]]
            h, c = (torch.cat(part).unsqueeze(0) for part in zip(*states, strict=True))
            found: tuple[Tensor, Tensor] = self.cell(words[node : node + 1], h, c)
            return found

        return visit(int(count) - 1)[0]


def build(network: str, target: Target) -> nn.Module:
    """Return a network with seeded random weights."""
    torch.manual_seed(0)
    if network == "tree-lstm":
        return (tree_lstm.child_sum if target == "cpu" else tree_lstm.child_sum_by_levels)()[0]
    if network == "bert-base":
        from transformers import BertConfig, BertModel

        from bench.models.texts import Outputs

        return Outputs(BertModel(BertConfig()), "last_hidden_state").eval()
    return _LastState(2 if "2" in network else 1).eval()


def samples(network: str, target: Target) -> list[Arrays]:
    """Return the inputs of the calls."""
    random = np.random.default_rng(0)
    lengths = np.clip(np.rint(random.normal(24, 12, _SAMPLES)), _LEAST, _MOST).astype(int)
    if network.startswith("lstm") and target == "cuda":
        lengths = np.array(_LSTM_SIZES)[np.searchsorted(_LSTM_SIZES, lengths)]
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


def _dynamic(network: str, target: Target = "cpu") -> dict[str, Any]:
    """Return the arguments of `nimblec.compile` for the sizes of a network."""
    dim = torch.export.Dim("n", min=2, max=128)
    if network == "tree-lstm":
        return {}
    if network == "bert-base":
        lengths = range(_LEAST, _MOST + 1) if target == "cpu" else (16, 32, 64)
        return {"dynamic_shapes": ({1: dim}, {1: dim}), "dims": {"n": lengths}, "pad_masks": "attention_mask"}
    return {
        "dynamic_shapes": ({0: dim},),
        "dims": {"n": range(_LEAST, _MOST + 1) if target == "cpu" else _LSTM_SIZES},
    }


def caller(network: str, system: str, threads: int, target: Target) -> Call:
    """Return a call of a network in a system."""
    module = build(network, target)
    example = tuple(map(torch.from_numpy, samples(network, target)[0]))
    if system == "nimblec":
        import nimblec
        import nimblert

        given, level = _dynamic(network, target), 2 if target == "cuda" else None
        plan = nimblec.compile(module, example, target=target, level=level, plan_cache=None, streams=1, **given)
        executable = nimblert.load(plan, threads=threads if target == "cpu" else None)
        return lambda arrays: executable(*arrays)
    if system == "onnxruntime":
        return _session(module, example, network, threads)
    if isinstance(module, tree_lstm.TreeLSTM):
        module = _Recursive(module.cell)
    if system == "torch.compile":
        compiled = module.cell if isinstance(module, _Recursive) else module
        graphs = target == "cuda" and compiled is module
        compiled.compile(dynamic=True, mode="reduce-overhead" if graphs else None)
    module.to(target)
    # Python reads the tree.
    device = "cpu" if isinstance(module, _Recursive) else target

    def run(arrays: Arrays) -> object:
        with torch.inference_mode():
            return module(*(torch.from_numpy(array).to(device) for array in arrays)).cpu().numpy()

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


def measure(network: str, system: str, threads: int, target: Target) -> None:
    """Report the times of a call, and how far results are from eager's."""
    turn = Turn(wait=True)
    torch.set_num_threads(threads)
    inputs = samples(network, target)
    begin = time.perf_counter()
    call, eager = caller(network, system, threads, target), caller(network, "eager", threads, target)
    prepare_s = time.perf_counter() - begin
    gap = 0.0
    for arrays in inputs:
        found = call(arrays)
        found = np.asarray(found[0] if isinstance(found, list) else found)
        wanted = np.asarray(eager(arrays))
        gap = max(gap, float(np.abs(found.reshape(wanted.shape) - wanted).max() / np.abs(wanted).max()))

    def mean_us() -> float:
        begin = time.perf_counter()
        for arrays in inputs:
            call(arrays)
        return (time.perf_counter() - begin) / len(inputs) * 1e6

    for _ in range(_WARM_UPS):
        mean_us()
    turn.begin()
    rounds = [mean_us() for _ in range(_ROUNDS)]
    turn.report(call_us=median(rounds), rounds_us=rounds, gap=gap, prepare_s=prepare_s)
    turn.end()


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
    targets = parser.add_mutually_exclusive_group(required="--show" not in arguments)
    targets.add_argument("--cpu", dest="target", action="store_const", const="cpu")
    targets.add_argument("--gpu", dest="target", action="store_const", const="cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=3600, help="time after which no figure is waited for")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of these figures")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.show:
        print("\n".join(show(json.loads(options.show.read_text()))))
        return
    if options.one:
        network, system = options.one
        measure(network, system, options.threads, options.target)
        return
    figures: dict[str, Any] = {"machine": environment.describe(), "threads": options.threads}
    is_cpu = options.target == "cpu"
    target = "--cpu" if is_cpu else "--gpu"
    given = (target, "--threads", str(options.threads))
    pairs = [(network, system) for network in NETWORKS for system in (SYSTEMS if is_cpu else SYSTEMS[:-1])]
    results = measured("bench.dynamic", given, pairs, limit_s=options.limit_s, side_by_side=1 if is_cpu else 0)
    figures["figures"] = {"/".join(pair): result for pair, result in results.items() if "failed" not in result}
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(show(figures)))


if __name__ == "__main__":
    main(sys.argv[1:])
