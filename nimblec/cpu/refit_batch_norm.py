"""Batch norms folded into the weights of the convolutions before them, by nodes that compute on weights alone.

ONNX Runtime's optimiser folds them too, with the same arithmetic, but does not tell which constant came from which
weights. Written out as nodes, they are constants to fold, which keep their names.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from nimblec.onnx_import import model_nodes


def fold_batch_norms(model: ModelProto) -> None:
    """Fold each batch norm that is a convolution's only reader, where all their parameters are constants of float32."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    readers = Counter(name for node in graph.node for name in model_nodes.read_names(node))
    readers.update(value.name for value in graph.output)
    makers = {node.output[0]: node for node in graph.node if node.op_type == "Conv" and not node.domain}
    nodes: list[NodeProto] = []
    for node in graph.node:
        convolution = makers.get(node.input[0]) if node.op_type == "BatchNormalization" and not node.domain else None
        if convolution is None or not _folds(node, convolution, constants, readers):
            nodes.append(node)
            continue
        position = next(i for i, other in enumerate(nodes) if other is convolution)
        nodes[position : position + 1] = _folded(node, convolution, constants)
    copied = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copied)


def _folds(
    norm: NodeProto, convolution: NodeProto, constants: Mapping[str, TensorProto], readers: Mapping[str, int]
) -> bool:
    training = any(attribute.name == "training_mode" and attribute.i for attribute in norm.attribute)
    outputs = [name for name in norm.output if name]  # more than one in training
    read = (*norm.input[1:], *filter(None, convolution.input[1:]))
    is_sole = readers[convolution.output[0]] == 1
    return is_sole and not training and len(outputs) == 1 and all(name in constants for name in read)


def _folded(norm: NodeProto, convolution: NodeProto, constants: Mapping[str, TensorProto]) -> Iterator[NodeProto]:
    """Yield the nodes that fold weight and bias as ONNX Runtime does, then the convolution that reads the results."""
    _, scale, shift, mean, variance = norm.input
    weight, bias = convolution.input[1], convolution.input[2] if len(convolution.input) > 2 else ""
    output = norm.output[0]
    epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
    named = f"{output}/nimblec"
    column = (-1, *(1 for _ in constants[weight].dims[1:]))

    def constant(name: str, array: np.ndarray) -> NodeProto:
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))

    def call(op_type: str, inputs: list[str], result: str) -> NodeProto:
        return helper.make_node(op_type, inputs, [result])

    yield constant(f"{named}/epsilon", np.array(epsilon, np.float32))
    yield constant(f"{named}/column", np.array(column, np.int64))
    yield call("Add", [variance, f"{named}/epsilon"], f"{named}/variance")
    yield call("Sqrt", [f"{named}/variance"], f"{named}/deviation")
    yield call("Div", [scale, f"{named}/deviation"], f"{named}/scale")
    yield call("Reshape", [f"{named}/scale", f"{named}/column"], f"{named}/scales")
    yield call("Mul", [weight, f"{named}/scales"], f"{named}/weight")
    if bias:
        yield call("Sub", [bias, mean], f"{named}/centred")
        yield call("Mul", [f"{named}/centred", f"{named}/scale"], f"{named}/scaled")
        yield call("Add", [f"{named}/scaled", shift], f"{named}/bias")
    else:
        yield call("Mul", [mean, f"{named}/scale"], f"{named}/scaled")
        yield call("Sub", [shift, f"{named}/scaled"], f"{named}/bias")
    made = NodeProto()
    made.CopyFrom(convolution)
    del made.input[1:], made.output[:]
    made.input.extend([f"{named}/weight", f"{named}/bias"])
    made.output.append(output)
    yield made
