"""Models with dynamic sizes, as ONNX files."""

from pathlib import Path

import numpy as np
from cpu_plans import Value, floats, write_model
from onnx import NodeProto, TensorProto, helper

node = helper.make_node


def rows_model(path: Path) -> Path:
    """Write a model of the ReLU of x (batch x 8) times a matrix, y (batch x 4)."""
    matrix = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    nodes = [node("MatMul", ["x", "matrix"], ["product"]), node("Relu", ["product"], ["y"])]
    return write_model(path, nodes, [floats("x", "batch", 8)], [floats("y", "batch", 4)], constants={"matrix": matrix})


UNLIKE_ROWS: dict[str, tuple[list[NodeProto], str]] = {
    "less the mean of all": (
        [node("ReduceMean", ["x", "zeros"], ["mean"]), node("Sub", ["x", "mean"], ["y"])],
        "exact",
    ),
    "divided by how many there are": (
        [
            node("Shape", ["x"], ["count"], end=1),
            node("Cast", ["count"], ["divisor"], to=TensorProto.FLOAT),
            node("Div", ["x", "divisor"], ["y"]),
        ],
        "exact",
    ),
    "the sum of all after": ([node("CumSum", ["x", "zero"], ["y"], reverse=1)], "exact"),
    "the sum of all before": ([node("CumSum", ["x", "zero"], ["y"])], "padded"),
    "with the number of its place": (
        [
            node("Shape", ["x"], ["count"], end=1),
            node("Squeeze", ["count"], ["limit"]),
            node("Range", ["zero", "limit", "one"], ["places"]),
            node("Cast", ["places"], ["numbers"], to=TensorProto.FLOAT),
            node("Unsqueeze", ["numbers", "ones"], ["column"]),
            node("Add", ["x", "column"], ["y"]),
        ],
        "padded",
    ),
    "divided by the largest of all, at least 8192": (
        [
            node("Abs", ["x"], ["sizes"]),
            node("ReduceMax", ["sizes"], ["largest"], keepdims=1),
            node("Max", ["largest", "many"], ["divisor"]),
            node("Div", ["x", "divisor"], ["y"]),
        ],
        "exact",
    ),
    "alone": ([node("Softmax", ["x"], ["y"], axis=1)], "split"),
}
"""Nodes from x (batch x 4) to y (batch x 4), and how sizes of the dimension may be served."""


def unlike_rows(path: Path, what: str) -> Path:
    """Write one of `UNLIKE_ROWS`."""
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "zeros": np.array([0]),
        "ones": np.array([1]),
        "many": np.array(8192, np.float32),
    }
    nodes, _ = UNLIKE_ROWS[what]
    used = {name for of in nodes for name in of.input}
    return write_model(
        path,
        nodes,
        [floats("x", "batch", 4)],
        [floats("y", "batch", 4)],
        constants={name: array for name, array in constants.items() if name in used},
    )


def products_of_rows(path: Path) -> Path:
    """Write a model of y (batch x batch), the product of each two rows of x (batch x 4)."""
    nodes = [node("Transpose", ["x"], ["columns"]), node("MatMul", ["x", "columns"], ["y"])]
    return write_model(path, nodes, [floats("x", "batch", 4)], [floats("y", "batch", "batch")])


def largest_under_a_mask(path: Path, operator: str) -> Path:
    """Write a model of the ``operator``, such as ReduceMax, of masked scores (1 x length), at least 0 with padding."""
    nodes = [
        node("Cast", ["mask"], ["weights"], to=TensorProto.FLOAT),
        node("Mul", ["scores", "weights"], ["left"]),
        node(operator, ["left"], ["y"], keepdims=1),
    ]
    inputs = [floats("scores", 1, "length"), ("mask", TensorProto.INT64, (1, "length"))]
    return write_model(path, nodes, inputs, [floats("y", 1, 1)])


def attention(path: Path, *, is_masked: bool = True) -> Path:
    """Write a model that adds to each token's embedding (batch x length) the mean over unmasked tokens.

    pooled (batch x 8) is that mean. Without a mask, it is over all tokens.
    """
    table = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    nodes = [node("Gather", ["table", "tokens"], ["embedded"])]
    inputs: list[Value] = [("tokens", TensorProto.INT64, ("batch", "length"))]
    if is_masked:
        inputs.append(("mask", TensorProto.INT64, ("batch", "length")))
        nodes += [
            node("Cast", ["mask"], ["weights"], to=TensorProto.FLOAT),
            node("Unsqueeze", ["weights", "last"], ["column"]),
            node("Mul", ["embedded", "column"], ["left"]),
            node("ReduceSum", ["left", "middle"], ["sum"]),
            node("ReduceSum", ["column", "middle"], ["count"]),
            node("Div", ["sum", "count"], ["mean"]),
        ]
    else:
        nodes += [node("ReduceMean", ["embedded", "middle"], ["mean"])]
    nodes += [node("Add", ["embedded", "mean"], ["y"]), node("Squeeze", ["mean", "middle"], ["pooled"])]
    return write_model(
        path,
        nodes,
        inputs,
        [floats("y", "batch", "length", 8), floats("pooled", "batch", 8)],
        constants={"table": table, "last": np.array([2]), "middle": np.array([1])},
    )
