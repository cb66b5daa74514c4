"""One node of an optimised model, or those of a region, as a model of its own: a module and a kernel of the plan.

Names are canonical (i0, i1 ... o0, o1 ...), so that equal nodes give equal bytes and are stored once.
Small constants (shapes, axes and scalars, which shape inference reads) are part of the model; larger
ones are initializers without data, whose memory the runtime binds when it opens the session.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from nimblec.base.errors import UnsupportedModelError
from nimblec.cpu.constants import TensorType, external, is_embedded, type_of
from nimblec.onnx_import import model_file, model_nodes
from nimblert.check import onnx_rules
from nimblert.check.onnx_rules import NCHWC_DOMAIN, ORIGIN
from nimblert.check.protobuf import Budget
from nimblert.cpu.onnx_session import LABEL, nchwc_block_size
from nimblert.plan import Kernel, Module, Parameter, ParameterKind
from nimblert.plan.records import DEFAULT_LIMITS

POINTER_NBYTES = 8

_READ_BY_NUMBER = frozenset({"com.microsoft.ExpandDims"})
"""Operators whose constants `onnx_trust` reads as numbers, not as raw bytes."""

_ONE_SIZE = (
    ": give each value in the body one size; if an input chooses a branch, make it a constant by --constant"
)
"""Advice for a loop or branch that ONNX Runtime would have to run, since sizes in its body vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKernel:
    """The code of a node. Parameter i stands for the value ``values[i]`` of the whole model."""

    module: Module
    symbol: str
    parameters: tuple[Parameter, ...]
    values: tuple[str, ...]

    def check(self, nodes: Sequence[NodeProto]) -> None:
        """Raise UnsupportedModelError, naming one of ``nodes``, where the runtime would refuse the code."""
        kernel = Kernel(module=0, symbol=self.symbol, parameters=self.parameters)
        for problem in onnx_rules.problems(kernel, self.module, Budget(DEFAULT_LIMITS.model_fields)):
            node = next((node for node in nodes if problem.startswith(f"{node.op_type}:")), nodes[0])
            advice = _ONE_SIZE if problem.endswith(onnx_rules.IN_A_BODY) else ""
            if problem.endswith(onnx_rules.UNSIZED):
                advice = ": cut the model before it"
            raise UnsupportedModelError(
                f"node {model_nodes.node_name(node)!r} ({node.op_type}): no plan for the CPU can hold it: "
                f"{problem}{advice}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The fields that every one-node model has in common with the whole model."""

    ir_version: int
    opsets: Mapping[str, int]
    functions: Sequence[FunctionProto]


def header(model: ModelProto) -> Header:
    """Return the header of the models that the nodes of ``model`` become."""
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    return Header(ir_version=model.ir_version, opsets=opsets, functions=tuple(model.functions))


def symbol(node: NodeProto) -> str:
    """Return the operator's name, with its domain unless it is ONNX's own."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def build(
    nodes: Sequence[NodeProto],
    types: Mapping[str, TensorType],
    constants: Mapping[str, TensorProto],
    header: Header,
    unsized: Mapping[str, str] = MappingProxyType({}),
) -> NodeKernel:
    """Return the kernel of one node, or of the nodes of a region, in a topological order.

    ``types`` has every value with a place in the plan, ``constants`` every initializer, and ``unsized`` the dtypes of
    the other values, "" for one that is no tensor. Raises UnsupportedModelError where the runtime would refuse to load
    the kernel.
    """
    made = [name for node in nodes for name in node.output if name]
    used = (name for node in nodes for name in (*node.input, *_captured(node)))
    reads = tuple(dict.fromkeys(name for name in used if name and name not in made))
    writes = tuple(name for name in made if name not in unsized)
    inner = tuple(name for name in made if name in unsized)
    names = _canonical_names(nodes, reads, writes, inner)

    model = _model_of(nodes, names, header)
    for name in inner:
        value = model.graph.value_info.add(name=names[name])
        if unsized[name]:
            value.type.tensor_type.elem_type = model_file.element_type(unsized[name])

    operands: list[tuple[ParameterKind, str, TensorType]] = []
    for name in reads:
        if name not in constants:
            operands.append((ParameterKind.INPUT, name, types[name]))
            model.graph.input.append(value_info(names[name], types[name]))
        elif is_embedded(constants[name]):
            constant = _renamed(constants[name], names[name])
            by_number = any(symbol(node) in _READ_BY_NUMBER for node in nodes)
            model.graph.initializer.append(_by_number(constant) if by_number else constant)
        else:
            operands.append((ParameterKind.INITIALIZER, name, type_of(constants[name])))
            model.graph.initializer.append(external(names[name], type_of(constants[name])))
    for name in writes:
        operands.append((ParameterKind.OUTPUT, name, types[name]))
        model.graph.output.append(value_info(names[name], types[name]))
    built = NodeKernel(
        module=Module(
            origin=origin(node.domain for node in nodes), code=memoryview(model.SerializeToString(deterministic=True))
        ),
        symbol=symbol(nodes[0]) if len(nodes) == 1 else onnx_rules.symbol(nodes),
        parameters=tuple(
            _parameter(position, kind, names[value], tensor_type)
            for position, (kind, value, tensor_type) in enumerate(operands)
        ),
        values=tuple(value for _, value, _ in operands),
    )
    built.check(nodes)
    return built


def _model_of(nodes: Sequence[NodeProto], names: Mapping[str, str], header: Header) -> ModelProto:
    """Return a model of these nodes, with canonical names, that declares no values."""
    model = ModelProto(ir_version=header.ir_version)
    model.functions.extend(header.functions)
    for domain in sorted(set[str]().union(*(_domains(node, header) for node in nodes))):
        model.opset_import.append(OperatorSetIdProto(domain=domain, version=header.opsets[domain]))
    model.graph.name = "kernel"
    for number, node in enumerate(nodes):
        model.graph.node.append(_canonical_node(node, names))
        if len(nodes) > 1:
            model.graph.node[number].name = f"{LABEL}{number}"
    return model


def _parameter(position: int, kind: ParameterKind, name: str, tensor_type: TensorType) -> Parameter:
    offset = POINTER_NBYTES * position
    dtype, shape = tensor_type.dtype, tensor_type.shape
    return Parameter(offset=offset, nbytes=POINTER_NBYTES, kind=kind, name=name, dtype=dtype, shape=shape)


def origin(domains: Iterable[str | None]) -> str:
    """Return the origin of a module whose nodes are of these domains."""
    return f"{ORIGIN} nchwc{nchwc_block_size()}" if NCHWC_DOMAIN in domains else ORIGIN


def _captured(node: NodeProto) -> Iterator[str]:
    """Yield the values of the main graph that the subgraphs of ``node`` use."""
    for graph in model_nodes.subgraphs(node):
        yield from free_names(graph)


def free_names(graph: GraphProto) -> Iterator[str]:
    """Yield the names that ``graph`` uses and does not define; ONNX names are unique down the nesting."""
    defined = {tensor.name for tensor in (*graph.input, *graph.initializer)}
    for node in graph.node:
        for name in (*node.input, *_captured(node)):
            if name and name not in defined:
                yield name
        defined.update(node.output)
    for value in graph.output:
        if value.name not in defined:
            yield value.name


def _canonical_names(
    nodes: Sequence[NodeProto], reads: Sequence[str], writes: Sequence[str], inner: Sequence[str]
) -> dict[str, str]:
    """Return new names of the values; the old ones if a subgraph captures values by name."""
    if any(map(model_nodes.subgraphs, nodes)):
        return {name: name for name in (*reads, *writes, *inner)}
    sides = (("i", reads), ("o", writes), ("t", inner))
    return {name: f"{letter}{i}" for letter, side in sides for i, name in enumerate(side)}


def canonical(node: NodeProto) -> NodeProto:
    """Return a node without doc strings, its attributes sorted: ONNX Runtime saves them in any order."""
    return _canonical_node(node, {name: name for name in (*node.input, *node.output)})


def _canonical_node(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    attributes = sorted((_without_text(a) for a in node.attribute), key=lambda a: a.name)
    return NodeProto(
        op_type=node.op_type,
        domain=node.domain,
        overload=node.overload,
        input=_without_tail([names.get(name, "") for name in node.input]),
        output=_without_tail([names.get(name, "") for name in node.output]),
        attribute=attributes,
    )


def _without_tail(names: list[str]) -> list[str]:
    """Return the names without the empty ones at the end: some kernels read an operand named "" as if it were given."""
    while names and not names[-1]:
        names.pop()
    return names


def _without_text(attribute: AttributeProto) -> AttributeProto:
    copy = AttributeProto()
    copy.CopyFrom(attribute)
    _drop_text(copy)
    return copy


def _drop_text(attribute: AttributeProto) -> None:
    """Drop doc strings, metadata and inferred types at any depth: a plan has no place for them."""
    attribute.ClearField("doc_string")
    if attribute.HasField("g"):
        graph = attribute.g
        graph.ClearField("value_info")
        for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
            part.ClearField("doc_string")
            part.ClearField("metadata_props")
        for node in graph.node:
            for inner in node.attribute:
                _drop_text(inner)


def _domains(node: NodeProto, header: Header) -> set[str]:
    """Return the domains whose opset the node's model must import."""
    used = {node.domain, *(inner.domain for graph in model_nodes.subgraphs(node) for inner in model_nodes.nodes(graph))}
    if header.functions:
        used.update(header.opsets)
    return used


def value_info(name: str, tensor_type: TensorType) -> ValueInfoProto:
    """Return the declaration of a value of a model."""
    return helper.make_tensor_value_info(name, model_file.element_type(tensor_type.dtype), tensor_type.shape)


def _by_number(tensor: TensorProto) -> TensorProto:
    """Return the tensor with its elements as numbers, not as raw bytes."""
    array = numpy_helper.to_array(tensor)
    return helper.make_tensor(tensor.name, tensor.data_type, array.shape, array.ravel().tolist())


def _renamed(tensor: TensorProto, name: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    copy.ClearField("doc_string")
    return copy
