"""Branches that do not fit a model's sizes: they fail where they are taken.

ONNX Runtime refuses the whole model for such a branch, although its inputs may always choose the other one: a voice
detector has one for each sample rate, and each takes a number of samples of its own.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from nimblec.base.errors import UnsupportedModelError
from nimblec.cpu import ort_process
from nimblec.cpu.branches import is_branching, part_of, take_branches
from nimblec.cpu.ort_worker import RefusedError
from nimblec.cpu.reference import run_feeds
from nimblec.cpu.values import static_shape
from nimblec.onnx_import import model_file, model_nodes
from nimblert.arrays.layouts import numpy_dtype

_TAKEN = "nimblec/taken"


def stop_at_misfits(model: ModelProto, folder: Path) -> None:
    """Replace each branch of the main graph that does not fit the model's sizes by one that fails.

    ``folder`` has the model's external data.
    """
    nodes = model.graph.node
    if not any(map(is_branching, nodes)) or not _is_refused(model, folder):
        return
    for number, node in enumerate(nodes):
        if not is_branching(node) or not all(node.output):
            continue
        runs = {}
        for attribute in node.attribute:
            part = part_of(model, nodes[: number + 1], node.output)
            part.graph.node[number].input[0] = _TAKEN
            is_then = np.array(attribute.name == "then_branch")
            part.graph.initializer.append(numpy_helper.from_array(is_then, _TAKEN))
            take_branches(part, folder)
            runs[attribute.name] = _run(part, folder)
        for misfit, fitting in (node.attribute, node.attribute[::-1]):
            outputs = runs[fitting.name]
            if runs[misfit.name] is None and isinstance(outputs, list):
                misfit.g.CopyFrom(_failing(node, misfit.name, outputs))


def _is_refused(model: ModelProto, folder: Path) -> bool:
    """Return whether ONNX Runtime refuses the model where it folds constants, and so infers more shapes."""
    try:
        ort_process.run(model.SerializeToString(), folder=str(folder.resolve()), level="ORT_ENABLE_BASIC")
    except (RefusedError, ort_process.EndedError):
        return True
    return False


def _run(model: ModelProto, folder: Path) -> list[np.ndarray] | str | None:
    """Return the outputs for inputs of zeros, or why the run fails; None if ONNX Runtime refuses the model."""
    inputs = {t.name: np.zeros(static_shape(t), numpy_dtype(t.dtype)) for t in model_file.inputs(model)}
    try:
        (found,) = run_feeds(model, folder, [value.name for value in model.graph.output], [inputs])
    except UnsupportedModelError:
        return None
    return found


def _failing(node: NodeProto, name: str, like: Sequence[np.ndarray]) -> GraphProto:
    """Return a body in the place of the branch ``name`` of an `If`, with outputs ``like`` those of the other branch.

    It reads from a tensor of one element at an index that is 1 wherever the branch is taken.
    """
    prefix = f"{model_nodes.first_output(node)}/{name}"
    taken, index, scalar, zero, read = (f"{prefix}/{what}" for what in ("taken", "index", "scalar", "zero", "read"))
    said = f"{name} of {model_nodes.node_name(node)}, which does not fit the inputs' shapes"
    nodes = [
        helper.make_node("Not" if name == "else_branch" else "Identity", [node.input[0]], [taken]),
        helper.make_node("Cast", [taken], [index], to=TensorProto.INT64),
        helper.make_node("Squeeze", [index], [scalar]),
        helper.make_node("Gather", [zero, scalar], [read], name=said),
    ]
    constants, outputs = {zero: np.zeros(1, np.float32)}, []
    for number, array in enumerate(like):
        typed, shape, output = (f"{prefix}/{what} {number}" for what in ("typed", "shape", "output"))
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        nodes.append(helper.make_node("Cast", [read], [typed], to=kind))
        nodes.append(helper.make_node("Expand", [typed, shape], [output]))
        constants[shape] = np.array(array.shape, np.int64)
        outputs.append(helper.make_tensor_value_info(output, kind, array.shape))
    held = [numpy_helper.from_array(array, constant) for constant, array in constants.items()]
    return helper.make_graph(nodes, name, [], outputs, held)
