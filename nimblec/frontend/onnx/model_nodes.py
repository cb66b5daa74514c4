"""The nodes of an ONNX model: what is inside them, what they read, and how messages name them."""

from collections.abc import Iterator

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto


def nodes(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of the subgraphs in it, in order."""
    for node in graph.node:
        yield node
        for subgraph in subgraphs(node):
            yield from nodes(subgraph)


def subgraphs(node: NodeProto) -> tuple[GraphProto, ...]:
    """The bodies of a control-flow node."""
    one = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    many = [g for a in node.attribute if a.type == AttributeProto.GRAPHS for g in a.graphs]
    return (*one, *many)


def read_names(node: NodeProto) -> tuple[str, ...]:
    """The values that a node and the nodes in its subgraphs read."""
    inner = (name for graph in subgraphs(node) for other in nodes(graph) for name in other.input)
    return tuple(dict.fromkeys(name for name in (*node.input, *inner) if name))


def node_name(node: NodeProto) -> str:
    """The node's name, or its first output's if it has none."""
    return node.name or first_output(node)


def first_output(node: NodeProto) -> str:
    """The first output that is not omitted: an LSTM of which only the last state is used has "" before it."""
    return next((name for name in node.output if name), "")


def describe(node: NodeProto) -> str:
    """The operator and name of a node, or its first output if it has no name: "Conv 'stem'"."""
    name = node.name or f"-> {first_output(node)}"
    return f"{operator_name(node)} '{name}'"


def operator_name(node: NodeProto) -> str:
    """The operator with its domain, unless it is ONNX's own."""
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


def plain_domain(name: str) -> str:
    """A domain as schemas name it: ONNX's own is "", not "ai.onnx"."""
    return "" if name == "ai.onnx" else name
