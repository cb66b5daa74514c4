"""Time of `import_model`, by the number of nodes, on models of Swin-like blocks.

Usage: python -m bench.onnx_import_time [--blocks 16 32 64 128] [--repeat 3]; writes
bench/results/cpu/onnx_import_time.json.

A block is shifted-window attention and a feed-forward network as the TorchScript exporter writes them: 36 nodes, a
third of them shape arithmetic. Swin-T has about 2,300 nodes.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

from nimblec.onnx_import.importer import import_model

RESULTS = Path(__file__).parent / "results" / "cpu" / "onnx_import_time.json"

BLOCK = """
    n{i} = LayerNormalization (x{i}, scale, shift)
    shape{i} = Shape (n{i})
    batch{i} = Gather (shape{i}, zero)
    leading{i} = Unsqueeze (batch{i}, axis0)
    grid{i} = Concat <axis = 0> (leading{i}, seven, eight, seven, eight, width)
    top{i} = Slice (n{i}, three, end, axis1)
    rest{i} = Slice (n{i}, start, three, axis1)
    rolled{i} = Concat <axis = 1> (top{i}, rest{i})
    windows{i} = Reshape (rolled{i}, grid{i})
    apart{i} = Transpose <perm = [0, 1, 3, 2, 4, 5]> (windows{i})
    tokens{i} = Reshape (apart{i}, window_shape)
    qkv{i} = MatMul (tokens{i}, wqkv)
    qkvb{i} = Add (qkv{i}, bqkv)
    heads{i} = Reshape (qkvb{i}, heads_shape)
    split{i} = Transpose <perm = [2, 0, 3, 1, 4]> (heads{i})
    q{i} = Gather <axis = 0> (split{i}, zero)
    k{i} = Gather <axis = 0> (split{i}, one)
    v{i} = Gather <axis = 0> (split{i}, two)
    qs{i} = Mul (q{i}, factor)
    kt{i} = Transpose <perm = [0, 1, 3, 2]> (k{i})
    scores{i} = MatMul (qs{i}, kt{i})
    biased{i} = Add (scores{i}, positions)
    weights{i} = Softmax <axis = -1> (biased{i})
    mixed{i} = MatMul (weights{i}, v{i})
    back{i} = Transpose <perm = [0, 2, 1, 3]> (mixed{i})
    joined{i} = Reshape (back{i}, window_shape)
    out{i} = MatMul (joined{i}, wout)
    outb{i} = Add (out{i}, shift)
    image{i} = Reshape (outb{i}, shape{i})
    sum{i} = Add (x{i}, image{i})
    m{i} = LayerNormalization (sum{i}, scale, shift)
    up{i} = MatMul (m{i}, wup)
    active{i} = Gelu (up{i})
    down{i} = MatMul (active{i}, wdown)
    downb{i} = Add (down{i}, shift)
    x{next} = Add (sum{i}, downb{i})
"""


def constants() -> dict[str, np.ndarray]:
    """The weights of a block of width 32 with 4 heads, on 56 x 56 pixels in windows of 8 x 8."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.05)

    numbers = {"zero": 0, "one": 1, "two": 2}
    lists = {"axis0": [0], "axis1": [1], "seven": [7], "eight": [8], "width": [32], "three": [3], "start": [0]}
    lists |= {"end": [56], "window_shape": [49, 64, 32], "heads_shape": [49, 64, 3, 4, 8]}
    return {
        **{name: np.array(value) for name, value in (*numbers.items(), *lists.items())},
        "factor": np.array(8**-0.5, np.float32),
        "scale": np.ones(32, np.float32),
        "shift": np.zeros(32, np.float32),
        "wqkv": random(32, 96),
        "bqkv": random(96),
        "positions": random(4, 64, 64),
        "wout": random(32, 32),
        "wup": random(32, 128),
        "wdown": random(128, 32),
    }


def model(blocks: int) -> ModelProto:
    """A model of ``blocks`` blocks."""
    body = "".join(BLOCK.format(i=i, next=i + 1) for i in range(blocks))
    signature = f"(float[1,56,56,32] x0) => (float[1,56,56,32] x{blocks})"
    parsed = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> swin {signature} {{ {body} }}')
    parsed.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants().items())
    return parsed


def main() -> None:
    """Measure and print; write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--repeat", type=int, default=3, help="imports of each model, of which the fastest counts")
    options = parser.parse_args()
    import_model(model(1))
    rows = []
    for blocks in options.blocks:
        built = model(blocks)
        seconds, calls = min(_import(built) for _ in range(options.repeat))
        count = len(built.graph.node)
        rows.append({"nodes": count, "seconds": round(seconds, 3), "calls": calls})
        print(f"{count:>6} nodes {seconds:7.2f} s {seconds / count * 1e6:7.0f} us a node, {calls} ATen calls")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def _import(built: ModelProto) -> tuple[float, int]:
    start = time.perf_counter()
    program = import_model(built)
    seconds = time.perf_counter() - start
    return seconds, sum(node.op == "call_function" for node in program.module.graph.nodes)


if __name__ == "__main__":
    main()
