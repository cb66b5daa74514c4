"""The weights of a model that its optimised form still reads as they were, everywhere."""

from collections import Counter
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, numpy_helper

from nimblec.cpu.optimizer import OptimizedModel
from nimblec.onnx_import import model_file, model_nodes
from nimblec.onnx_import.external_data import read_bytes
from nimblert.arrays.layouts import numpy_dtype


def unchanged(model: ModelProto, folder: Path, optimized: OptimizedModel) -> frozenset[str]:
    """Return the initializers of ``model`` that the optimised model reads as often, with the same bytes.

    A weight with fewer readers may be part of a folded constant, one with more may stand in for an equal weight.
    ``folder`` has the external data of ``model``.
    """
    before, after = _uses(model.graph), _uses(optimized.proto.graph)
    arrays = optimized.arrays
    return frozenset(
        tensor.name
        for tensor in model.graph.initializer
        if 0 < before[tensor.name] == after[tensor.name]
        and tensor.name in arrays
        and _equal(tensor, folder, arrays[tensor.name])
    )


def _equal(tensor: TensorProto, folder: Path, array: np.ndarray) -> bool:
    dtype = model_file.dtype_name(tensor.data_type)
    if dtype is None or tuple(tensor.dims) != array.shape or numpy_dtype(dtype) != array.dtype:
        return False
    if tensor.data_location == TensorProto.EXTERNAL:
        original = np.frombuffer(read_bytes(tensor, folder), np.uint8)
    else:
        original = _bytes(numpy_helper.to_array(tensor))
    return np.array_equal(original, _bytes(array))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _uses(graph: GraphProto) -> Counter[str]:
    """Count the uses of each value: reads by nodes, and returns by the graph and by bodies of nodes."""
    found: Counter[str] = Counter(value.name for value in graph.output)
    for node in model_nodes.nodes(graph):
        found.update(node.input)
        for body in model_nodes.subgraphs(node):
            found.update(value.name for value in body.output)
    return found
