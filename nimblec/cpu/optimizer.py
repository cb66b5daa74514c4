"""ONNX Runtime's own optimiser, run ahead of time: fusions, folded constants, blocked convolutions.

The level is that of a plain `InferenceSession(model)`, so that results are equal bit for bit. Its
last step lays convolutions out in blocks (NCHWc) of this machine's vector width and reorders their
weights; the runtime refuses them on a machine with other blocks.

ONNX Runtime folds constants before it inlines the functions of operators without a kernel
(CenterCropPad, GroupNormalization). A second run folds the shape arithmetic that these bring in.
"""

import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto

from nimblec.cpu.canonical import canonicalize
from nimblec.cpu.constants import dense_of, read_arrays
from nimblec.cpu.optimizer_process import RefusedError
from nimblec.cpu.optimizing import save_optimized
from nimblec.errors import CompileError, UnsupportedModelError
from nimblec.frontend.onnx.model_nodes import nodes, subgraphs
from nimblert.cpu.onnx_session import onnxruntime

SHAPE_ARITHMETIC = frozenset({"Shape", "Size"})
"""Operators whose results follow from static shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizedModel:
    """A model as ONNX Runtime would run it. ``arrays`` are its constants by name; ``proto`` lacks large data."""

    proto: ModelProto
    arrays: Mapping[str, np.ndarray]


def optimize(model: ModelProto, folder: Path, scratch_folder: Path | None = None) -> OptimizedModel:
    """``model``, with static input shapes, as ONNX Runtime would run it.

    ``folder`` is where the model's external data are, if it has any. ``scratch_folder`` has room
    for a copy of the weights, which lives as long as the arrays of the result.
    """
    with tempfile.TemporaryDirectory(prefix="nimblec-", dir=scratch_folder) as scratch:
        optimized = _optimize(model, folder, Path(scratch, "once"), "ORT_ENABLE_ALL")
        if any(node.op_type in SHAPE_ARITHMETIC for node in optimized.graph.node):
            # The basic level adds no fusions that a plain session would lack, without this one: at the full level
            # signed pairs become unsigned after it has merged those of one type.
            optimized = _optimize(
                optimized, Path(scratch), Path(scratch, "twice"), "ORT_ENABLE_BASIC", without="DoubleQDQPairsRemover"
            )
        canonicalize(optimized.graph, model.graph)
        return OptimizedModel(proto=optimized, arrays=read_arrays(optimized, Path(scratch)))


def folded(model: ModelProto, folder: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Those of the outputs ``names`` of ``model`` that are the same in every run, as the optimiser finds out."""
    with tempfile.TemporaryDirectory(prefix="nimblec-") as scratch:
        path = Path(scratch)
        made = _optimize(model, folder, path / "folded", "ORT_ENABLE_BASIC")
        return {name: array for name, array in read_arrays(made, path).items() if name in names}


_NEWEST_OPSET = re.compile(r"official support for domain (\S+) is till opset (\d+)")
"""Part of ONNX Runtime's message about a newer opset."""


def _optimize(model: ModelProto, folder: Path, path: Path, level: str, without: str = "") -> ModelProto:
    """The optimised model that a session of ``model`` saves at ``path``, its large data in a file beside it.

    ``without`` names an optimiser to leave out.
    """
    ort = onnxruntime()
    weights = path.with_suffix(".weights")
    places = {"folder": str(folder.resolve()), "path": str(path.absolute()), "weights": weights.name}
    try:
        save_optimized(model.SerializeToString(), level=level, without=without, **places)
    except RefusedError as exc:
        if weights.exists():  # it accepted the model and began to save it
            raise CompileError(f"{path.parent}: ONNX Runtime cannot write its files there: is the disk full?") from exc
        raise UnsupportedModelError(f"ONNX Runtime {ort.__version__} {_refusal(str(exc), model)}") from exc
    optimized = onnx.load(path, load_external_data=False)
    for graph in (optimized.graph, *(body for node in nodes(optimized.graph) for body in subgraphs(node))):
        _tidy_constants(graph)
    return optimized


def _tidy_constants(graph: GraphProto) -> None:
    """Keep one constant of each name, and make sparse ones dense: ONNX Runtime cannot read all that it saves.

    The indices of sparse ones have types that it refuses. A Constant in a body of a body stays beside its value.
    Versions 1.24 to 1.29 save the constants of a body twice, first as the file has them, perhaps with data elsewhere.
    """
    sparse = {tensor.values.name: tensor for tensor in graph.sparse_initializer}
    constants = {tensor.name: tensor for tensor in (*graph.initializer, *map(dense_of, sparse.values()))}
    if sparse or len(constants) < len(graph.initializer):
        kept = list(constants.values())
        del graph.initializer[:], graph.sparse_initializer[:]
        graph.initializer.extend(kept)
    for index, node in reversed([*enumerate(graph.node)]):
        if node.op_type == "Constant" and node.output[0] in constants:
            del graph.node[index]


_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
_PLACE = re.compile(r"/\S+\.(?:cc|h):\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)? ")
"""The place in ONNX Runtime's source where an error was raised: a file and a function's signature."""


def _refusal(words: str, model: ModelProto) -> str:
    """The part of an ONNX Runtime error that concerns the model."""
    said = _PLACE.sub("", _CODE.sub("", words))
    if newest := _NEWEST_OPSET.search(said):
        return f"refuses the model: it supports opsets of {newest[1]} up to {newest[2]}: export it for one of these"
    if "Could not find an implementation" not in said:
        advice = ": if an input chooses the branch, make it a constant by --constant" if "Op (If)" in said else ""
        return f"refuses the model: {said.rstrip()}{advice}"
    node = said.partition("implementation for ")[2] or said
    advice = ""
    values = (*model.graph.input, *model.graph.value_info)
    if any(value.type.tensor_type.elem_type == TensorProto.BFLOAT16 for value in values):
        advice = ": its CPU kernels take float32 rather than bfloat16: convert the model, or compile for --target cuda"
    return f"has no CPU kernel for {node}{advice}"
