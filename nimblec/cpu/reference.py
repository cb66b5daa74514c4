"""Run a model in a plain ONNX Runtime session: the reference for every plan made from ONNX."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto, ValueInfoProto

from nimblec.cpu.kernels import symbol
from nimblec.cpu.optimizer_process import EXTERNAL_DATA_FOLDER
from nimblec.errors import CompileError, UnsupportedModelError
from nimblec.frontend.model_state import ModelState
from nimblec.frontend.onnx import model_file, model_nodes
from nimblert.cpu.onnx_session import onnxruntime, runtime_errors
from nimblert.cpu.onnx_threads import STEPPED
from nimblert.plan import Profile

State: TypeAlias = dict[int, np.ndarray]
"""The tensors of a state by their storage, which all entries share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """The model of a program, which a plain ONNX Runtime session runs.

    ``folder`` has its external data; the session has ``threads``, or as many as it likes (None). ``ranges`` bound the
    random integers drawn for inputs, by name.
    """

    entry: str
    profile: Profile
    folder: Path
    proto: ModelProto
    state: tuple[ModelState, ...]
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    threads: int | None = None

    def first_state(self) -> State:
        """The state before the first call."""
        return {tensor.storage: tensor.data for tensor in self.state}

    def step(self, inputs: Mapping[str, np.ndarray], state: State) -> tuple[list[np.ndarray], State]:
        """One call: the outputs that a caller gets, and the state that it leaves."""
        given = {tensor.input: state[tensor.storage] for tensor in self.state}
        results = run_reference(self.proto, self.folder, {**inputs, **given}, threads=self.threads)
        values = dict(zip((value.name for value in self.proto.graph.output), results, strict=True))
        left = {tensor.storage: values.pop(tensor.output) for tensor in self.state if tensor.output}
        return list(values.values()), {**state, **left}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the main graph: its names in plans, and the values it reads and makes.

    ``name`` is the source of its commands in CPU plans, ``description`` in CUDA plans.
    """

    name: str
    description: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]


def read_nodes(model: ModelProto) -> tuple[Node, ...]:
    """The nodes of the main graph in order. ``model`` has the names that its file gives them."""
    renamed = ModelProto()
    renamed.CopyFrom(model)
    model_nodes.clear_repeated_names(renamed)
    return tuple(
        Node(
            name=model_nodes.node_name(unique),
            description=model_nodes.describe(node),
            reads=model_nodes.read_names(node),
            makes=tuple(name for name in node.output if name),
        )
        for node, unique in zip(model.graph.node, renamed.graph.node, strict=True)
    )


def run_reference(
    model: ModelProto, folder: Path, inputs: Mapping[str, np.ndarray], *, threads: int | None = None
) -> list[np.ndarray]:
    """The outputs of `InferenceSession(model)` with default options.

    ``folder`` has the model's external data. The session has ``threads``; None is as many as it likes, but one where
    several would sum in another order than a plan. Raises CompileError where the run fails, UnsupportedModelError for
    inputs and outputs of bfloat16.
    """
    for role, tensors in (("input", model_file.inputs(model)), ("output", model_file.outputs(model))):
        for tensor in tensors:
            if tensor.dtype == "bfloat16":
                raise UnsupportedModelError(
                    f"{role} {tensor.name!r} is bfloat16, which ONNX Runtime exchanges with no caller from Python: "
                    "convert it to float32 in the model, or compile for --target cuda"
                )
    return [np.asarray(output) for output in _run(model, folder, inputs, threads)]


def run_values(model: ModelProto, folder: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every tensor that a node of the main graph computes, by name.

    Each is an output of the session, so that no fusion or layout removes it.
    """
    names = tuple(dict.fromkeys(name for node in model.graph.node for name in node.output if name))
    exposed = ModelProto()
    exposed.CopyFrom(model)
    del exposed.graph.output[:]
    exposed.graph.output.extend(ValueInfoProto(name=name) for name in names)
    made = zip(names, _run(exposed, folder, inputs), strict=True)
    return {name: np.asarray(value) for name, value in made if isinstance(value, np.ndarray | np.generic)}


def _run(
    model: ModelProto, folder: Path, inputs: Mapping[str, np.ndarray], threads: int | None = None
) -> list[Any]:
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures come as exceptions
    if threads is not None or _steps_by_computed_weights(model):
        options.intra_op_num_threads = threads or 1
    options.add_session_config_entry(EXTERNAL_DATA_FOLDER, str(folder.resolve()))
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results: list[Any] = session.run(None, dict(inputs))
    except runtime_errors() as exc:
        raise refused_inputs(exc, (array.dtype for array in inputs.values())) from exc
    return results


def _steps_by_computed_weights(model: ModelProto) -> bool:
    """Whether a recurrent layer has computed weights, as in a training step.

    Several threads then split its products, and sum in another order than the one thread that runs it in a plan.
    """
    computed = {value.name for value in model.graph.input} - {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if symbol(node) in STEPPED and not computed.isdisjoint(node.input[1:3]):
            return True
        if not computed.isdisjoint(model_nodes.read_names(node)):
            computed.update(node.output)
    return False


def refused_inputs(reason: Exception, dtypes: Iterable[np.dtype[Any]]) -> CompileError:
    """The error for a failed run on random inputs of these dtypes."""
    bounded = "; if integers must be in a range, give --example NAME=FILE.npy (in Python examples={NAME: array})"
    advice = bounded if any(dtype.kind in "iu" for dtype in dtypes) else ""
    return CompileError(f"ONNX Runtime cannot run the model on random inputs: {reason}{advice}")
