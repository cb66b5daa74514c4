"""The parts of a command: the nodes of a launch of the CPU target, which may run many; else the command itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from nimblert.check.onnx_model import Graph, Model, read_model
from nimblert.check.onnx_rules import declared
from nimblert.check.protobuf import Budget
from nimblert.plan import ITEM_NBYTES, Launch, ParameterKind, Plan, Pointer, Region, Target, Work
from nimblert.plan.pieces import writes
from nimblert.plan.records import DEFAULT_LIMITS

_VALUES = frozenset({Region.ARENA, Region.INPUT})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """A value that a command computes; ``dtype`` is "" where the plan does not tell it.

    It is in memory of the plan (``pointer``), or it is the value ``name`` between the nodes of the command's model.
    """

    nbytes: int
    dtype: str = ""
    pointer: Pointer | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a command does for one op: the weights it reads there, and whether it reads an input or another's result."""

    op: int
    weights: tuple[Pointer, ...]
    reads_values: bool
    results: tuple[NodeResult, ...]


def parts_of(plan: Plan, command: Work) -> Sequence[Part]:
    """Return the parts of a command of a verified plan, in order."""
    if plan.target is Target.CPU and isinstance(command, Launch):
        return _nodes(plan, command)
    reads = [access.pointer for access in command.reads] if isinstance(command, Launch) else []
    results = tuple(NodeResult(nbytes=access.nbytes, pointer=access.pointer) for access in writes(command))
    return [_part(command.op, reads, results)]


def _part(op: int, reads: Sequence[Pointer], results: tuple[NodeResult, ...]) -> Part:
    weights = tuple(pointer for pointer in reads if pointer.region is Region.WEIGHTS)
    return Part(
        op=op,
        weights=weights,
        reads_values=any(pointer.region in _VALUES for pointer in reads),
        results=results,
    )


def model_of(plan: Plan, launch: Launch) -> Model:
    """Return the model of a launch of the CPU target."""
    code = plan.modules[plan.kernels[launch.kernel].module].code
    return read_model(bytes(code), Budget(DEFAULT_LIMITS.model_fields))


def _nodes(plan: Plan, launch: Launch) -> Sequence[Part]:
    """Return the parts of a launch: its nodes, whose ops follow its own, or the launch where it has one node."""
    kernel = plan.kernels[launch.kernel]
    pointers = {relocation.param_offset: relocation.pointer for relocation in launch.relocations}
    outputs = {p.name: p for p in kernel.parameters if p.kind is ParameterKind.OUTPUT}
    values = {p.name for p in kernel.parameters if pointers[p.offset].region in _VALUES}
    bound = {
        name: NodeResult(
            nbytes=prod(p.shape) * ITEM_NBYTES[p.dtype], dtype=p.dtype, pointer=pointers[p.offset], name=name
        )
        for name, p in outputs.items()
    }
    graph = model_of(plan, launch).graph or Graph()
    if len(graph.node) == 1:
        return [_part(launch.op, [access.pointer for access in launch.reads], tuple(bound.values()))]
    weights = {p.name: pointers[p.offset] for p in kernel.parameters if pointers[p.offset].region is Region.WEIGHTS}
    values |= {name for node in graph.node for name in node.output}
    for name, dtype, shape in map(declared, graph.value_info):
        if name and dtype and shape is not None:
            bound[name] = NodeResult(nbytes=prod(shape) * ITEM_NBYTES[dtype], dtype=dtype, name=name)
    return [
        Part(
            op=launch.op + 1 + number,
            weights=tuple(weights[name] for name in node.input if name in weights),
            reads_values=not values.isdisjoint(node.input),
            results=tuple(bound[name] for name in node.output if name in bound),
        )
        for number, node in enumerate(graph.node)
    ]
