"""Nodes whose operands index, move or size by hostile numbers, which no rule can see before a run.

ONNX Runtime refuses them or computes something, in a process whose memory ends where each tensor does: a read or write
outside is a crash, and fails the test.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hostile_plans import node_plan, outcomes

from fuzz import wrapped

X = np.arange(32, dtype=np.float32).reshape(4, 8)
ROW = X[0]
IMAGE = X.reshape(1, 1, 4, 8)

CALLS = [
    ("y = Gather (x, n)", (1, 8)),
    ("y = Gather <axis = 1> (x, n)", (4, 1)),
    ("y = GatherElements (x, nn)", (1, 2)),
    ("y = GatherND (x, nn)", (1,)),
    ("y = ScatterElements (x, nn, u)", (4, 8)),
    ("y = ScatterND (x, nn, one)", (4, 8)),
    ("y = ArrayFeatureExtractor (x, n)", (4, 1)),
    ("y = OneHot (n, eight, ends)", (1, 8)),
    ("y = OneHot (eight, scalar, ends)", (8,)),
    ("y = Slice (x, zero, n)", (4, 8)),
    ("y = Slice (x, n, zero)", (4, 8)),
    ("y = Slice (x, zero, eight1, zero, n)", (4, 8)),
    ("y = Pad (x, pads)", (4, 8)),
    ("y = Tile (x, repeats)", (4, 8)),
    ("y = Expand (x, sizes)", (4, 8)),
    ("y = Reshape (x, repeats)", (4, 8)),
    ("y = Resize (x, , , repeats)", (4, 8)),
    ("y = ConstantOfShape (repeats)", (4, 8)),
    ("y = CumSum (x, scalar)", (4, 8)),
    ("y = Trilu (x, scalar)", (4, 8)),
    ("y = ReduceSum (x, n)", (4, 8)),
    ("y = Squeeze (x, n)", (4, 8)),
    ("y = Unsqueeze (x, n)", (1, 4, 8)),
    ("y = ReverseSequence (x, lengths)", (4, 8)),
    ("y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (image, places)", (1, 1, 8, 16)),
    ("y = RoiAlign (image, box, n)", (1, 1, 1, 1)),
    ("y = GridSample (image, grid)", (1, 1, 1, 1)),
    ('y = NegativeLogLikelihoodLoss <reduction = "none"> (x, labels)', (4,)),
]  # fmt: skip


def operands(number: int) -> dict[str, np.ndarray]:
    """Return the operands that the calls name, of which most hold ``number``."""
    n = np.array([number])
    return {
        "x": X, "u": X[:1, :2], "one": ROW[:1], "ends": ROW[:2], "image": IMAGE,
        "zero": np.array([0]), "eight": np.array(8), "eight1": np.array([8]), "scalar": n[0], "n": n,
        "nn": np.array([[number, number]]), "pads": np.array([number, 0, 0, 0]), "repeats": np.array([number, 8]),
        "sizes": np.array([number, 4, 8]), "lengths": np.full(8, number), "labels": np.full(4, number),
        "places": np.full(IMAGE.shape, number), "box": np.array([[0, 0, 1, 1]], np.float32),
        "grid": np.full((1, 1, 1, 2), number, np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("kind", wrapped.KINDS)
def test_hostile_numbers_neither_crash_nor_hang(tmp_path: Path, kind: str) -> None:
    plans = []
    for number in (-(1 << 63), -(1 << 31), -5, 4, 100, 1 << 31, 1 << 40, (1 << 63) - 1):
        given = operands(number)
        for text, shape in CALLS:
            call = onnx.parser.parse_node(text)
            if call.op_type == "ArrayFeatureExtractor":
                call.domain = "ai.onnx.ml"
            inputs = [given[name] for name in dict.fromkeys(filter(None, call.input))]
            plans.append(node_plan(*inputs, call=call, outputs=[("float32", shape)], kind=kind))
    found = outcomes(tmp_path, plans)
    assert {"fails", "runs"} <= found.keys() <= {"fails", "refused", "runs", "too large"}
