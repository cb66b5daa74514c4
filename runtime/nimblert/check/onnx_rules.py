"""The rules of the ONNX model of a CPU kernel, so that it is safe to load in ONNX Runtime.

ONNX Runtime trusts a model's initializers and required inputs. So each node must be a valid call of an operator that
`onnx_operators` lists, and names, dtypes and shapes must match the kernel's parameters; whether declared shapes are
true is known when a session is opened (`nimblert.cpu.onnx_session`). A broken rule yields a sentence.

A value without a declared shape (its size depends on values, or it is a sequence or optional) may only reach operators
that accept any shape; what they compute is an output, compared with its memory, or has no shape either.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from nimblert.check import division, onnx_operators, onnx_trust
from nimblert.check.bounds import array_problems, under
from nimblert.check.onnx_model import ELEMENT_TYPES, Attribute, Graph, Node, TensorValue, Value, read_model
from nimblert.check.onnx_operators import Formal
from nimblert.check.onnx_trust import Call
from nimblert.check.protobuf import Budget
from nimblert.errors import PlanFormatError
from nimblert.plan import ITEM_NBYTES, Kernel, Module, Parameter, ParameterKind
from nimblert.plan.records import DEFAULT_LIMITS, MAX_RANK, Limits, dense_nbytes

EXTERNAL_FILE = "weights"
"""The file named by an initializer that a parameter binds. It is always empty: ONNX Runtime uses the memory given for
the initializer, but requires that the file exists."""

ORIGIN = "onnxruntime"
"""The origin of a module. With blocked convolutions (NCHWc) the block size follows: "onnxruntime nchwc16"."""

IN_A_BODY = "is in the body of a loop or branch, where its sizes are not known before a run"
"""Why most operators are refused there."""

UNSIZED = "takes or gives a value whose size is not known before a run, and its kernel is not safe for any size"

NCHWC_DOMAIN = "com.microsoft.nchwc"

MAX_IR_VERSION = 1 << 10
_EXTERNAL = 1  # TensorProto.EXTERNAL
_ATTRIBUTE_FIELDS = {1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 6: "floats", 7: "ints", 8: "strings"}
"""The field that holds the value of an attribute, by AttributeProto.AttributeType."""
_DTYPES = {number: dtype for dtype, number in ELEMENT_TYPES.items()}
_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")
_FIELDS_OF_DTYPES = {
    "float32": "float_data",
    "complex64": "float_data",
    "float64": "double_data",
    "complex128": "double_data",
    "int64": "int64_data",
    "uint32": "uint64_data",
    "uint64": "uint64_data",
}
"""The field for the data of a constant unless they are raw bytes; int32_data for all other dtypes."""
_NARROW_BITS = {17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2}
"""Bits per element of types for constants alone: float8, int4, float4, int2 and the like."""
_STRING = 8  # TensorProto.STRING


def problems(kernel: Kernel, module: Module, budget: Budget, limits: Limits = DEFAULT_LIMITS) -> Iterator[str]:
    """Yield a sentence for each rule that the model of ``kernel``, the code of ``module``, breaks.

    The model's fields are taken from ``budget``.
    """
    try:
        model = read_model(bytes(module.code), budget)
    except PlanFormatError as exc:
        yield f"model: {exc}"
        return
    graph = model.graph
    if graph is None or not graph.node or not 0 < (model.ir_version or 0) <= MAX_IR_VERSION:
        yield "model: expected a graph of nodes and an IR version"
        return
    if symbol(graph.node) != kernel.symbol:
        yield f"symbol: {kernel.symbol!r}, its model calls {symbol(graph.node)!r}"
    layout = module.origin.removeprefix(ORIGIN)
    is_blocked = any(node.domain == NCHWC_DOMAIN for node in graph.node)
    if is_blocked != layout.startswith(" nchwc"):
        domains = sorted({node.domain or "" for node in graph.node})
        yield f"module: its origin is {module.origin!r}, for operators of the domains {domains}"
    imported = [opset.domain or "" for opset in model.opset_import]
    called = sorted(set[str]().union(*map(_domains, graph.node)))
    if sorted(imported) != called:
        yield f"model: imports operators of {imported}, its nodes are of {called}"
    yield from _signature_problems(graph, kernel.parameters)
    opsets = {opset.domain or "": opset.version or 0 for opset in model.opset_import}
    # A shape of too many dimensions would take long to multiply.
    broken = tuple(_inner_problems(graph, limits)) + tuple(_graph_problems(graph, opsets, set(), inner=False))
    yield from broken
    types = _types(graph, kernel.parameters)
    for node in graph.node:
        yield from _type_problems(node, types, opsets)
    if not broken:
        for operator, call in _calls(graph, kernel.parameters):
            yield from onnx_trust.problems(operator, call)
        embedded = [tensor for tensor in graph.initializer if tensor.data_location != _EXTERNAL]
        yield from division.problems(graph.node, embedded, types)


def symbol(nodes: Sequence[Node]) -> str:
    """Return the symbol of a kernel: the operator of its node, or the first and the last of several."""
    if len(nodes) == 1:
        return _name(nodes[0])
    return f"{nodes[0].op_type} to {nodes[-1].op_type} ({len(nodes)} ops)"


def _name(node: Node) -> str:
    """Return the operator with its domain, unless that is ONNX's own."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type or ""


def _domains(node: Node) -> set[str]:
    graphs = [attribute.g for attribute in node.attribute if attribute.g is not None]
    return {node.domain or ""}.union(*(_domains(inner) for graph in graphs for inner in graph.node))


def _signature_problems(graph: Graph, parameters: Sequence[Parameter]) -> Iterator[str]:
    """Require the model's inputs, outputs and initializers to be the parameters, in order."""
    external = [tensor for tensor in graph.initializer if tensor.data_location == _EXTERNAL]
    kept = [(tensor.name, _DTYPES.get(tensor.data_type or 0), tensor.dims) for tensor in external]
    for kind, what, found in (
        (ParameterKind.INPUT, "inputs", [declared(value) for value in graph.input]),
        (ParameterKind.OUTPUT, "outputs", [declared(value) for value in graph.output]),
        (ParameterKind.INITIALIZER, "initializers", kept),
    ):
        expected = [(p.name, p.dtype, p.shape) for p in parameters if p.kind == kind]
        if found != expected:
            yield f"parameters: {expected} are {what}, those of the model {found}"
            return
    for tensor in external:
        entries = [(entry.key, entry.value) for entry in tensor.external_data]
        nbytes = prod(tensor.dims) * ITEM_NBYTES.get(_DTYPES.get(tensor.data_type or 0, ""), 0)
        expected_entries = [("location", EXTERNAL_FILE), ("offset", "0"), ("length", str(nbytes))]
        if entries != expected_entries:
            yield f"model: initializer {tensor.name!r} is in {entries}, expected {expected_entries}"


def _inner_problems(graph: Graph, limits: Limits) -> Iterator[str]:
    """Yield a sentence for each computed value that is neither an output nor declared between nodes."""
    made = sorted(name for node in graph.node for name in node.output if name)
    if made != sorted(value.name or "" for value in (*graph.output, *graph.value_info)):
        yield "model: its outputs and declared values are not those that its nodes compute"
        return
    sizes: dict[str, int] = {}
    for name, dtype, shape in map(declared, graph.value_info):
        if shape is not None:
            yield from under(f"model: value {name!r}", array_problems(dtype or "", shape, limits.tensor_nbytes))
            sizes[name or ""] = dense_nbytes(dtype or "", shape)
    nbytes = _most_nbytes(graph.node, sizes)
    if nbytes > limits.memory_nbytes:
        limit = f"the limit is {limits.memory_nbytes}: raise it (nimblert.Limits) if you trust the plan"
        yield f"model: the values between its nodes need {nbytes} bytes, {limit}"
    unsized = {value.name for value in graph.value_info} - sizes.keys()
    for node in graph.node:
        reads = [place for place, name in enumerate(node.input) if name in unsized]
        touches = reads or not unsized.isdisjoint(node.output)
        if touches and not onnx_trust.accepts_unsized(_name(node), node.attribute, reads):
            yield f"{node.op_type}: {UNSIZED}"
        if (reads or any(attribute.g is not None for attribute in node.attribute)) and sizes.keys() & {*node.output}:
            yield f"{node.op_type}: the declared shape of a value that it makes cannot be inferred: expected none"


def _most_nbytes(nodes: Sequence[Node], sizes: Mapping[str, int]) -> int:
    """Return the most bytes of values, of these ``sizes``, that are needed at a time, in the order of the nodes."""
    last = {name: place for place, node in enumerate(nodes) for name in node.input}
    kept = most = 0
    for place, node in enumerate(nodes):
        kept += sum(sizes.get(name, 0) for name in node.output)
        most = max(most, kept)
        kept -= sum(sizes.get(n, 0) for n in {*node.input, *node.output} if last.get(n, place) == place)
    return most


def declared(value: Value) -> tuple[str | None, str | None, tuple[int, ...] | None]:
    """Return name, dtype and shape of an input or output; None for what is not declared."""
    tensor = value.type.tensor_type if value.type is not None else None
    if tensor is None:
        return value.name, None, None
    sizes = [dim.dim_value for dim in tensor.shape.dim] if tensor.shape is not None else [None]
    known = tuple(size for size in sizes if size is not None)
    return value.name, _DTYPES.get(tensor.elem_type or 0), known if len(known) == len(sizes) else None


def _types(graph: Graph, parameters: Sequence[Parameter]) -> dict[str, int | None]:
    """Return ONNX's element type of each value that the model's nodes may read or write; None for no tensor."""
    constants: dict[str, int | None] = {tensor.name or "": tensor.data_type or 0 for tensor in graph.initializer}
    inner = {name or "": ELEMENT_TYPES.get(dtype or "") for name, dtype, _ in map(declared, graph.value_info)}
    return constants | inner | {parameter.name: ELEMENT_TYPES.get(parameter.dtype, 0) for parameter in parameters}


def _calls(graph: Graph, parameters: Sequence[Parameter]) -> Iterator[tuple[str, Call]]:
    """Yield the operator of each node, and its call with the shapes of its inputs and outputs."""
    shapes: dict[str | None, tuple[int, ...] | None] = {tensor.name: tensor.dims for tensor in graph.initializer}
    shapes |= {name: shape for name, _, shape in map(declared, graph.value_info)}
    shapes |= {p.name: p.shape for p in parameters}
    embedded = {tensor.name: tensor for tensor in graph.initializer if tensor.data_location != _EXTERNAL}
    for node in graph.node:
        yield (
            _name(node),
            Call(
                attributes={attribute.name or "": attribute for attribute in node.attribute},
                inputs=tuple(shapes.get(name) for name in node.input),
                outputs=tuple(shapes.get(name) for name in node.output),
                constant={place: embedded[name] for place, name in enumerate(node.input) if name in embedded},
            ),
        )


def _type_problems(node: Node, types: Mapping[str, int | None], opsets: Mapping[str, int]) -> Iterator[str]:
    operator = onnx_operators.find(node.domain or "", node.op_type or "", opsets.get(node.domain or "", 0))
    if operator is None:
        return
    for names, formals in ((node.input, operator.inputs), (node.output, operator.outputs)):
        for i, name in enumerate(names):
            formal = formals[min(i, len(formals) - 1)]
            found = types.get(name, 0)
            if name and found is not None and not formal.types >> found & 1:
                yield f"{node.op_type}: {name!r} has element type {found}, which it does not take there"


def _graph_problems(graph: Graph, opsets: Mapping[str, int], known: set[str], *, inner: bool) -> Iterator[str]:
    """Yield the rules of a graph whose nodes may also read ``known``, the values of the graphs around it."""
    own = [*(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)]
    for name in own:
        yield from _definition_problems(name, known)
    for tensor in graph.initializer:
        if tensor.data_location != _EXTERNAL or inner:
            yield from _constant_problems(tensor)
    for node in graph.node:
        yield from _node_problems(node, opsets, known, inner=inner)
        for name in filter(None, node.output):
            yield from _definition_problems(name, known)
            own.append(name)
    for value in graph.output:
        if value.name not in known:
            yield f"model: nothing gives its output {value.name!r}"
    if inner and graph.value_info:
        yield "model: a body declares values between its nodes, expected none"
    known.difference_update(own)  # not a copy for each body, of which there may be many


def _definition_problems(name: str | None, known: set[str]) -> Iterator[str]:
    if not name or name in known:
        yield f"model: {name!r} is not the name of one value"
    known.add(name or "")


def _node_problems(node: Node, opsets: Mapping[str, int], known: set[str], *, inner: bool) -> Iterator[str]:
    domain, opset = node.domain or "", opsets.get(node.domain or "", 0)
    operator = onnx_operators.find(domain, node.op_type or "", opset)
    if operator is None or node.overload:
        yield f"model: {domain or 'ai.onnx'}.{node.op_type} of opset {opset} is no operator that a plan may call"
        return
    if inner and not onnx_trust.is_for_bodies(_name(node), node.attribute):
        yield f"{node.op_type}: {IN_A_BODY}"
    yield from _arity_problems(node.op_type or "", "inputs", node.input, operator.inputs, operator.least_inputs)
    yield from _arity_problems(node.op_type or "", "outputs", node.output, operator.outputs, operator.least_outputs)
    for name in node.input:
        if name and name not in known:
            yield f"{node.op_type}: reads {name!r}, which nothing gives"
    if not inner and "" in (*node.input[-1:], *node.output[-1:]):
        yield f"{node.op_type}: its last input or output is left out by name, expected fewer of them"
    names = [attribute.name or "" for attribute in node.attribute]
    missing = {name for name, (_, required) in operator.attributes.items() if required} - set(names)
    if missing or len(set(names)) != len(names):
        yield f"{node.op_type}: attributes {names}: {sorted(missing)} are missing, or one is there twice"
    for attribute in node.attribute:
        expected, _ = operator.attributes.get(attribute.name or "", (0, False))
        if attribute.type != expected:
            yield f"{node.op_type}.{attribute.name}: attribute type {attribute.type}, expected {expected or 'none'}"
        yield from _attribute_problems(attribute, opsets, known)
        yield from _unwritten_problems(node, attribute)


def _unwritten_problems(node: Node, attribute: Attribute) -> Iterator[str]:
    """Reject attributes by which a kernel writes more outputs than there are, or leaves one unwritten."""
    # num_outputs is an attribute of Split.
    if attribute.name == "num_outputs" and attribute.i != len(node.output):
        yield f"{node.op_type}.num_outputs: {attribute.i}, it has {len(node.output)} outputs"
    # saturate is an attribute of Cast.
    if attribute.name == "saturate" and attribute.i not in (0, 1):
        yield f"{node.op_type}.saturate: {attribute.i}, expected 0 or 1"
    # Loop copies what its body returns.
    if attribute.g is None or node.op_type == "Loop":
        return
    returned = [value.name for value in attribute.g.output]
    if len(set(returned)) < len(returned):
        yield f"{node.op_type}: its body returns one value twice: return an Identity of it"
    if not {value.name for value in attribute.g.input}.isdisjoint(returned):
        yield f"{node.op_type}: its body returns an input of its own: return an Identity of it"


def _arity_problems(
    operator: str, what: str, names: Sequence[str], formals: Sequence[Formal], least: int
) -> Iterator[str]:
    most = len(formals) if not formals or not formals[-1].variadic else len(names)
    if not least <= len(names) <= most:
        yield f"{operator}: {len(names)} {what}, expected {least} to {most}"
        return
    for i, name in enumerate(names):
        if not name and not formals[min(i, len(formals) - 1)].optional:
            yield f"{operator}: {what[:-1]} {i} is left out, and must be there"


def _attribute_problems(attribute: Attribute, opsets: Mapping[str, int], known: set[str]) -> Iterator[str]:
    """Yield a sentence unless an attribute has one value, of its type."""
    held = _ATTRIBUTE_FIELDS.get(attribute.type or 0, "")
    given = [name for name in _ATTRIBUTE_FIELDS.values() if getattr(attribute, name) not in (None, ())]
    if given not in ([held], []) or (held in ("f", "i", "s", "t", "g") and not given):
        yield f"model: attribute {attribute.name!r} of type {attribute.type} has the values {given}"
    for text in (attribute.s or b"", *attribute.strings):
        if not text.isascii() or not text.decode("ascii").isprintable():
            yield f"model: attribute {attribute.name!r} is {text!r}, expected printable ASCII"
    if attribute.t is not None:
        yield from _constant_problems(attribute.t)
    if attribute.g is not None:
        yield from _graph_problems(attribute.g, opsets, known, inner=True)


def _constant_problems(tensor: TensorValue) -> Iterator[str]:
    """Yield a sentence unless a constant has as much data as elements, in a field for its type."""
    if tensor.external_data or tensor.data_location or min(tensor.dims, default=0) < 0 or len(tensor.dims) > MAX_RANK:
        yield f"model: constant {tensor.name!r} of shape {tensor.dims} is not within the model"
        return
    count = prod(tensor.dims)
    given = {name: len(getattr(tensor, name) or ()) for name in _DATA_FIELDS if getattr(tensor, name) not in (None, ())}
    if given not in _stored(tensor.data_type or 0, count) and (count or any(given.values())):
        yield f"model: constant {tensor.name!r} of type {tensor.data_type} and shape {tensor.dims} has {given}"


def _stored(element_type: int, count: int) -> tuple[dict[str, int], ...]:
    """Return the fields that may hold the data of ``count`` elements, each with its number of items."""
    if element_type == _STRING:
        return ({"string_data": count},)
    if element_type in _NARROW_BITS:
        nbytes = -(-count * _NARROW_BITS[element_type] // 8)
        return {"raw_data": nbytes}, {"int32_data": nbytes}
    dtype = _DTYPES.get(element_type)
    if dtype is None:
        return ()
    items = 2 * count if dtype.startswith("complex") else count
    return {"raw_data": count * ITEM_NBYTES[dtype]}, {_FIELDS_OF_DTYPES.get(dtype, "int32_data"): items}
