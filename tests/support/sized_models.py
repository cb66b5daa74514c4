"""Models of sizes that are not fixed, as ONNX files."""

from pathlib import Path

import numpy as np
from cpu_plans import floats, write_model
from onnx import helper

node = helper.make_node


def rows_model(path: Path) -> Path:
    """Of each row of x (batch x 8) its product with a matrix, through a ReLU: y (batch x 4)."""
    matrix = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    nodes = [node("MatMul", ["x", "matrix"], ["product"]), node("Relu", ["product"], ["y"])]
    return write_model(
        path, nodes, [floats("x", "batch", 8)], [floats("y", "batch", 4)], constants={"matrix": matrix}
    )
