"""ONNX to ATen: a model becomes a flat fx graph of ATen calls.

The nodes are walked in order. The function of the table `nimblec.onnx_ops` for a node's
operator is called on the values of its inputs under a `Recorder`: what is known at import is
computed immediately, the rest is recorded. Operators that the table lacks are replaced by their
function body, where the model or the ONNX schema has one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from onnx import ModelProto
from torch import Tensor, fx

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.recorder import Recorder, graph_module
from nimblec.onnx_import import model_file
from nimblec.onnx_import.counted import values_of
from nimblec.onnx_import.frame import Frame, Scope
from nimblec.onnx_import.model_nodes import weight_names
from nimblec.onnx_import.quantized_nodes import OPSETS, multiply_integers
from nimblec.onnx_import.tensors import dense_of, narrow_type, tensor_of
from nimblec.onnx_import.walk import Walk
from nimblec.onnx_ops.axes import sizes_of
from nimblec.onnx_ops.counted import Counted
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
    ``meta["val"]`` is a fake tensor of its dtype, shape and strides. After the outputs it returns the sizes of those in
    ``cropped``, given by their indices: int64 vectors of how much of each the run filled.
    """

    module: fx.GraphModule
    inputs: tuple[OnnxInput, ...]
    outputs: tuple[str, ...]
    cropped: tuple[int, ...] = ()


def import_model(
    model: ModelProto,
    *,
    device: str = "cpu",
    weigh: Weigh | None = None,
    bounds: Mapping[str, tuple[int, ...]] | None = None,
) -> OnnxProgram:
    """Translate a model whose inputs have static shapes; constants and calls are on ``device``.

    ``weigh`` gives other tensors of the same dtype and shape for the weights. ``bounds`` are the largest shapes of
    outputs whose sizes depend on values, where the declared ones are not to hold.

    Raises UnsupportedModelError with a sentence for each node that cannot be translated.
    """
    recorder = Recorder(torch.device(device))
    inputs = tuple(_input(value) for value in model_file.inputs(model))
    bounds = bounds or {}
    walk = Walk(model, recorder, {**_declared(model), **bounds})
    with recorder:
        scope = _constants(model, recorder, weigh)
        for i, described in enumerate(inputs):
            dtype = getattr(torch, described.dtype)
            scope[described.name] = recorder.placeholder(f"input_{i}", dtype, described.shape)
        names = [value.name for value in model.graph.output]
        nodes = multiply_integers(model.graph.node, scope, names)
        walk.nodes(nodes, scope, Frame(opsets={**OPSETS, **walk.opsets}))
        outputs = _outputs(model, scope, walk.problems, bounds)
        cropped = {i: output for i, output in enumerate(outputs) if isinstance(output, Counted)}
        recorder.output([*map(values_of, outputs), *(output.sizes() for output in cropped.values())])
    return OnnxProgram(
        module=graph_module(recorder, "OnnxModel", fuse_bias),
        inputs=inputs,
        outputs=tuple(value.name for value in model.graph.output),
        cropped=tuple(cropped),
    )


def _declared(model: ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of those outputs for which the model declares all sizes."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.output}
    return {
        name: tuple(dim.dim_value for dim in dims)
        for name, dims in shapes.items()
        if dims and all(dim.HasField("dim_value") for dim in dims)
    }


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


def _outputs(
    model: ModelProto, scope: Scope, problems: Sequence[str], bounds: Mapping[str, tuple[int, ...]]
) -> list[Tensor | Counted]:
    """Return the values of the outputs; raise one error for all problems."""
    if len(problems) == 1:
        raise UnsupportedModelError(problems[0])
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise UnsupportedModelError(f"{len(problems)} problems in the model:\n{listed}")
    found = []
    for value in model.graph.output:
        output = scope.get(value.name)
        if not isinstance(output, (Tensor, Counted)) or narrow_type(output):
            raise UnsupportedModelError(f"output '{value.name}': no node makes a tensor of that name")
        if value.name in bounds and isinstance(output, Counted):
            output = _within(output, bounds[value.name])
        found.append(output)
    return found


def _within(output: Counted, bound: tuple[int, ...]) -> Counted:
    """Return an output in less memory: a run whose counts are larger than the bound is an error."""
    values = output.values
    for axis, size in zip(output.counts, (bound[axis] for axis in output.counts if axis < len(bound)), strict=False):
        values = values.narrow(axis, 0, min(size, values.shape[axis]))
    return Counted(values, output.counts)


aten = torch.ops.aten


def fuse_bias(graph: fx.Graph) -> None:
    """Rewrite ``add(mm(x, w), bias)`` as ``addmm(bias, x, w)``, also across a reshape of the product.

    The bias is a constant with one element for each column; nothing else reads the product.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
            continue
        for product, bias in (node.args, reversed(node.args)):
            if _fuse(graph, node, product, bias):
                break


def _fuse(graph: fx.Graph, add: fx.Node, product: fx.Node, bias: fx.Node) -> bool:
    """Return whether ``add`` was rewritten as the bias of ``product``."""
    shaped = product.target is aten.reshape.default and len(product.users) == 1
    mm = product.args[0] if shaped else product
    if not isinstance(mm, fx.Node) or mm.target is not aten.mm.default or len(mm.users) != 1:
        return False
    result, columns = mm.meta["val"], mm.meta["val"].shape[1]
    vector = bias.meta["val"]
    if bias.op != "get_attr" or vector.shape not in ((columns,), (1, columns)) or vector.dtype != result.dtype:
        return False
    if add.meta["val"].shape != product.meta["val"].shape or add.meta["val"].shape[-1] != columns:
        return False
    with graph.inserting_before(add):
        fused = graph.call_function(aten.addmm.default, (bias, *mm.args))
        fused.meta = {**mm.meta, "source": f"{mm.meta['source']} + {add.meta['source']}"}
        replacement = fused
        if shaped:
            replacement = graph.call_function(aten.reshape.default, (fused, product.args[1]))
            replacement.meta = {**product.meta, "source": fused.meta["source"]}
    add.replace_all_uses_with(replacement)
    for dead in (add, product, mm) if shaped else (add, mm):
        graph.erase_node(dead)
    return True
