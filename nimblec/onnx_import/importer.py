"""ONNX to ATen: a model becomes a flat fx graph of ATen calls.

The nodes are walked in order. The function of the table `nimblec.onnx_ops` for a node's
operator is called on the values of its inputs under a `Recorder`: what is known at import is
computed immediately, the rest is recorded. Operators that the table lacks are replaced by their
function body, where the model or the ONNX schema has one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from onnx import ModelProto
from torch import Tensor, fx

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.recorder import Recorder, on_device
from nimblec.onnx_import import model_file
from nimblec.onnx_import.bias import fuse_bias
from nimblec.onnx_import.frame import Frame, Scope
from nimblec.onnx_import.model_weights import weight_names
from nimblec.onnx_import.tensors import dense_of, narrow_type, tensor_of
from nimblec.onnx_import.walk import Walk
from nimblec.onnx_ops.axes import sizes_of
from nimblec.onnx_ops.table import Refused

Weigh: TypeAlias = Callable[[str, Tensor], Tensor]
"""Gives the tensor that stands for a weight in the graph, from its name and its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxInput:
    """An input of the model in the model's order; ``dtype`` is torch's name, "float32" for example."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxProgram:
    """A model as ATen calls.

    ``module`` takes the inputs in order and returns a tuple of the outputs. Its constants are
    buffers on the device. ``meta["source"]`` of each fx node names the ONNX node that it came from,
    ``meta["val"]`` is a fake tensor of its dtype, shape and strides.
    """

    module: fx.GraphModule
    inputs: tuple[OnnxInput, ...]
    outputs: tuple[str, ...]


def import_model(model: ModelProto, *, device: str = "cpu", weigh: Weigh | None = None) -> OnnxProgram:
    """Translate a model whose inputs have static shapes; constants and calls are on ``device``.

    ``weigh`` gives other tensors of the same dtype and shape for the weights.

    Raises UnsupportedModelError with a sentence for each node that cannot be translated.
    """
    recorder = Recorder(torch.device(device))
    inputs = tuple(_input(value) for value in model_file.inputs(model))
    walk = Walk(model, recorder)
    with recorder:
        scope = _constants(model, recorder, weigh)
        for i, described in enumerate(inputs):
            dtype = getattr(torch, described.dtype)
            scope[described.name] = recorder.placeholder(f"input_{i}", dtype, described.shape)
        frame = Frame(opsets=walk.opsets)
        walk.nodes(model.graph.node, scope, frame)
        recorder.output(_outputs(model, scope, walk.problems))
    return OnnxProgram(
        module=_module(recorder),
        inputs=inputs,
        outputs=tuple(value.name for value in model.graph.output),
    )


def _input(value: model_file.ModelTensor) -> OnnxInput:
    shape = value.shape
    if shape is None or None in shape:
        raise UnsupportedModelError(f"input '{value.name}': shape {shape} is dynamic; fix it with --input")
    try:
        sizes = sizes_of(n for n in shape if n is not None)
    except Refused as exc:
        raise UnsupportedModelError(f"input '{value.name}': {exc}") from exc
    return OnnxInput(name=value.name, dtype=value.dtype, shape=sizes)


def _constants(model: ModelProto, recorder: Recorder, weigh: Weigh | None) -> Scope:
    scope: dict[str, Tensor] = {}
    weights = weight_names(model) if weigh is not None else frozenset()
    for proto in model.graph.initializer:
        tensor = tensor_of(proto)
        scope[proto.name] = weigh(proto.name, tensor) if weigh is not None and proto.name in weights else tensor
    for sparse in model.graph.sparse_initializer:
        scope[sparse.values.name] = dense_of(sparse)
    for name, tensor in scope.items():
        recorder.label(tensor, f"initializer '{name}'")
    return scope


def _outputs(model: ModelProto, scope: Scope, problems: Sequence[str]) -> list[Tensor]:
    """Return the values of the outputs; raise one error for all problems."""
    if len(problems) == 1:
        raise UnsupportedModelError(problems[0])
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise UnsupportedModelError(f"{len(problems)} problems in the model:\n{listed}")
    found = []
    for value in model.graph.output:
        output = scope.get(value.name)
        if not isinstance(output, Tensor) or narrow_type(output):
            raise UnsupportedModelError(f"output '{value.name}': no node makes a tensor of that name")
        found.append(output)
    return found


def _module(recorder: Recorder) -> fx.GraphModule:
    graph = recorder.graph
    graph.eliminate_dead_code()
    fuse_bias(graph)
    graph.lint()
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    constants = {name: tensor for name, tensor in recorder.constants.items() if name in used}
    return fx.GraphModule(on_device(constants, recorder.device), graph, class_name="OnnxModel")
