"""The nodes of an ONNX model: what is inside them, what they read, and how messages name them."""

from collections.abc import Iterator
from itertools import count

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper


def nodes(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """Yield the nodes of a graph and of the subgraphs in it, in order."""
    for node in graph.node:
        yield node
        for subgraph in subgraphs(node):
            yield from nodes(subgraph)


def subgraphs(node: NodeProto) -> tuple[GraphProto, ...]:
    """Return the bodies of a control-flow node."""
    one = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    many = [g for a in node.attribute if a.type == AttributeProto.GRAPHS for g in a.graphs]
    return (*one, *many)


def read_names(node: NodeProto) -> tuple[str, ...]:
    """Return the values that a node and the nodes in its subgraphs read."""
    inner = (name for graph in subgraphs(node) for other in nodes(graph) for name in other.input)
    return tuple(dict.fromkeys(name for name in (*node.input, *inner) if name))


def node_name(node: NodeProto) -> str:
    """Return the node's name, or its first output's if it has none."""
    return node.name or first_output(node)


def first_output(node: NodeProto) -> str:
    """Return the first output that is not omitted: an LSTM of which only the last state is used has "" before it."""
    return next((name for name in node.output if name), "")


def describe(node: NodeProto) -> str:
    """Return the operator and name of a node, or its first output if it has no name: "Conv 'stem'"."""
    name = node.name or f"-> {first_output(node)}"
    return f"{operator_name(node)} '{name}'"


def operator_name(node: NodeProto) -> str:
    """Return the operator with its domain, unless it is ONNX's own."""
    domain = plain_domain(node.domain)
    return f"{domain}.{node.op_type}" if domain else node.op_type


def clear_repeated_names(model: ModelProto) -> None:
    """Clear names that an earlier node has: ONNX Runtime refuses duplicates."""
    seen: set[str] = set()
    for node in nodes(model.graph):
        if node.name in seen:
            node.ClearField("name")
        seen.add(node.name)


def shorten_domains(model: ModelProto) -> None:
    """Write ONNX's own domain as "" wherever the model spells it out."""
    for part in (model, *model.functions):
        for opset in part.opset_import:
            opset.domain = plain_domain(opset.domain)
    for function in model.functions:
        function.domain = plain_domain(function.domain)
    for graph in (model.graph, *model.functions):
        for node in nodes(graph):
            node.domain = plain_domain(node.domain)


def drop_omitted_tails(model: ModelProto) -> None:
    """Drop empty names at the end of a node's inputs and outputs: some kernels take them for given, and read them.

    A loop keeps the empty name of its condition, which counts as an input.
    """
    for graph in (model.graph, *model.functions):
        for node in nodes(graph):
            for names in (node.input, node.output):
                while names and not names[-1] and not subgraphs(node):
                    names.pop()


def copy_returned_inputs(model: ModelProto) -> None:
    """Have bodies return copies of their inputs, and of values that they return twice.

    ONNX Runtime leaves such outputs of a branch or scan unwritten, and a loop's iteration number is its last for all.
    """
    graphs = (model.graph, *model.functions)
    taken = {name for graph in graphs for node in nodes(graph) for name in (*node.input, *node.output)}
    for graph in graphs:
        for node in nodes(graph):
            for body in subgraphs(node):
                _copy_returned_inputs(body, taken, is_loop=node.op_type == "Loop")


def _copy_returned_inputs(body: GraphProto, taken: set[str], *, is_loop: bool) -> None:
    """Copy returned inputs under names not in ``taken``. A loop copies all but its first input itself."""
    inputs = {value.name for value in (body.input[:1] if is_loop else body.input)}
    returned: set[str] = set()
    for value in body.output:
        old = value.name
        if old in inputs or (old in returned and not is_loop):
            value.name = next(name for i in count(1) if (name := f"{old}_copy_{i}") not in taken)
            body.node.append(helper.make_node("Identity", [old], [value.name]))
            taken.add(value.name)
        returned.add(old)


def return_scores(model: ModelProto) -> None:
    """Have outputs that ZipMap makes be the tensors of scores that it reads, one column for each class, in its order.

    Exporters of classifiers end in it, some without an option to leave it out.
    """
    outputs = {value.name: value for value in model.graph.output}
    for node in model.graph.node:
        if node.op_type == "ZipMap" and node.output[0] in outputs:
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
            outputs[node.output[0]].type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, None))


def plain_domain(name: str) -> str:
    """Return a domain as schemas name it: ONNX's own is "", not "ai.onnx"."""
    return "" if name == "ai.onnx" else name


_DTYPES = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16})

_SIZING = frozenset({"Resize", "Upsample", "Range", "OneHot", "Dropout", "Clip", "Pad", "Pow"})
"""Operators whose constant inputs are settings of the computation, not weights."""


def weight_names(model: ModelProto) -> frozenset[str]:
    """Return the names of the weights: floating-point initializers of one dimension or more.

    Scalars, such as the factor of a GELU, belong to the computation: patterns are recognised by them.
    """
    settled = {name for node in nodes(model.graph) if node.op_type in _SIZING for name in node.input[1:]}
    return frozenset(
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type in _DTYPES and tensor.dims and 0 not in tensor.dims and tensor.name not in settled
    )
