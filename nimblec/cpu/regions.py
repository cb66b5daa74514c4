"""Regions: the nodes that make or use values without a place in a plan, as one kernel each.

Such values are tensors whose sizes depend on values, sequences and optionals. They stay in ONNX Runtime's memory, and
all that leaves a region has a fixed shape. An output of the model is padded to its bound, and leaves with its sizes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from nimblec.base.errors import UnsupportedModelError
from nimblec.cpu.bounds import find_bounds
from nimblec.cpu.constants import TensorType
from nimblec.cpu.optimizer import OptimizedModel
from nimblec.cpu.values import Values
from nimblec.graph.topological_order import components
from nimblec.onnx_import import model_file, model_nodes
from nimblert.plan.dimensions import Shape

REGION = "region"
"""The domain of a node that stands for several."""

_FIRST_OPSET = 11
"""The first opset whose Pad takes sizes that are not known before a run."""

_PADDED_AS = {"float16": "float32", "int16": "int32", "uint16": "int32"}
"""Dtypes that ONNX Runtime does not pad, and others that hold all of their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cropped:
    """An output of unknown size: the values of the bound's shape, and int64 of its sizes."""

    padded: str
    sizes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """The nodes of a model, in which one of domain REGION stands for each region.

    ``members`` are the nodes of a region, by the first output of the node that stands for it; ``values`` and
    ``constants`` those of the model and of nodes that pad outputs, which are ``cropped``.
    """

    nodes: Sequence[NodeProto]
    members: Mapping[str, Sequence[NodeProto]]
    values: Values
    constants: dict[str, TensorProto]
    cropped: Mapping[str, Cropped]


def find_regions(
    optimized: OptimizedModel, values: Values, returned: Sequence[str], bounds: Mapping[str, Shape]
) -> Regions:
    """Return the regions of a model. ``returned`` are its outputs, and ``bounds`` the largest shapes of some.

    Raises UnsupportedModelError for an output that nothing bounds.
    """
    graph = optimized.proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    if not values.unsized:
        return Regions(nodes=graph.node, members={}, values=values, constants=constants, cropped={})
    opset = next(entry.version for entry in optimized.proto.opset_import if not entry.domain)
    nodes, cropped = [*graph.node], {}
    values = Values({**values.types}, {**values.unsized})
    shapes = find_bounds(optimized, values, [name for name in returned if name in values.unsized], bounds)
    for name, shape in shapes.items():
        if opset < _FIRST_OPSET:
            raise UnsupportedModelError(
                f"output {name!r}: its size depends on values, which needs a model of opset {_FIRST_OPSET} or newer, "
                f"not {opset}: export it again"
            )
        cropped[name] = _pad(name, shape, nodes, values, constants)
    members, others = {}, []
    for group in _groups(nodes, values.unsized):
        made = [name for node in group for name in node.output if name and name not in values.unsized]
        if len(group) == 1:
            others += group
        elif made:
            inner = {name for node in group for name in node.output}
            reads = dict.fromkeys(name for node in group for name in model_nodes.read_names(node) if name not in inner)
            members[made[0]] = group
            others.append(NodeProto(op_type="Region", domain=REGION, input=reads, output=made))
    return Regions(nodes=others, members=members, values=values, constants=constants, cropped=cropped)


def _pad(name: str, bound: Shape, nodes: list[NodeProto], values: Values, constants: dict[str, TensorProto]) -> Cropped:
    """Add nodes that pad an output to its bound, and the constants that they read."""
    rank, dtype = len(bound), values.unsized[name]
    wide = _PADDED_AS.get(dtype, dtype)

    def add(operator: str, inputs: Sequence[str], dtype: str, shape: Shape | None, **attributes: Any) -> str:
        made = f"{name} ({operator} of {inputs[0]})"
        nodes.append(helper.make_node(operator, inputs, [made], **attributes))
        if shape is None:
            values.unsized[made] = dtype
        else:
            values.types[made] = TensorType(dtype=dtype, shape=shape)
        return made

    def constant(numbers: Sequence[int]) -> str:
        tensor = numpy_helper.from_array(np.array(numbers, np.int64), f"{name} {numbers}")
        constants[tensor.name] = tensor
        return tensor.name

    sizes = add("Shape", [name], "int64", (rank,))
    after = add("Sub", [constant(bound), sizes], "int64", (rank,))
    pads = add("Concat", [constant((0,) * rank), after], "int64", (2 * rank,), axis=0)
    if wide == dtype:
        padded = add("Pad", [name, pads], dtype, bound)
    else:
        widened = add("Cast", [name], wide, None, to=model_file.element_type(wide))
        filled = add("Pad", [widened, pads], wide, bound)
        padded = add("Cast", [filled], dtype, bound, to=model_file.element_type(dtype))
    return Cropped(padded=padded, sizes=sizes)


def _groups(nodes: Sequence[NodeProto], unsized: Mapping[str, object]) -> Iterator[list[NodeProto]]:
    """Yield the nodes of each region, and each other node alone.

    A region holds the maker of an unsized value and its users, and all nodes between two of its own: there is no order
    in which these could run before or after the region.
    """
    maker = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    after: list[set[int]] = [set() for _ in nodes]
    for index, node in enumerate(nodes):
        for name in model_nodes.read_names(node):
            if name in maker:
                after[maker[name]].add(index)
            if name in unsized:
                after[index].add(maker[name])
    yield from ([nodes[index] for index in component] for component in components(after))
