"""Launches of a CPU plan that follow each other, as one ONNX model: a session costs as much for all as for one.

Every value that a launch writes stays an output of the model, bound to the memory that the plan gives
it, so ONNX Runtime checks its shape and nothing moves. What ONNX Runtime is free to choose is the
order of nodes that no value orders. So a launch joins only where whatever shares memory with it is
ordered before it by values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from nimblert.onnx_model import Graph, Model, Node, Opset, TensorValue, Value, write_model
from nimblert.plan import ITEM_NBYTES, Kernel, Launch, Parameter, ParameterKind, Pointer, Region

_MOST_LAUNCHES = 256
"""Of a model: joining one more takes time in proportion to those that are there."""

_MOST_UNTIMED = 64
"""Of a model whose launches nobody has timed."""

_MOST_NS = 200_000_000
"""Of the launches of a model together: Ctrl-C ends a run between two of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An input, output or initializer of a model: its name there, what it is, and where it lies."""

    name: str
    parameter: Parameter
    pointer: Pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One model for several launches."""

    code: bytes
    inputs: tuple[Bound, ...]
    outputs: tuple[Bound, ...]
    initializers: tuple[Bound, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Access:
    """What a launch of the chain reads or writes: bytes of a region, and the value that they are."""

    launch: int
    place: tuple[Region, int]
    start: int
    end: int
    bound: Bound
    written: bool

    def overlaps(self, other: "_Access") -> bool:
        return self.place == other.place and self.start < other.end and other.start < self.end

    def is_same_value(self, other: "_Access") -> bool:
        mine, theirs = self.bound, other.bound
        kind = mine.parameter.dtype, mine.parameter.shape
        return mine.pointer == theirs.pointer and kind == (theirs.parameter.dtype, theirs.parameter.shape)


class Chain:
    """Launches that one model can hold, as far as they were added."""

    def __init__(self) -> None:
        self._accesses: list[_Access] = []
        self._before: list[int] = []
        """For each launch the set of those that values order before it, as bits."""
        self._opsets: dict[str, int] = {}
        self._ir_version = 0
        self._nodes: list[Node] = []
        self._constants: list[TensorValue] = []
        self._declared: dict[str, Value] = {}
        self._initializers: dict[str, Bound] = {}
        self._nanoseconds = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, launch: Launch, kernel: Kernel, model: Model, label: str) -> bool:
        """Add a launch, whose node is then called ``label``; False, and nothing is changed, where it cannot join."""
        graph = model.graph
        pointers = {relocation.param_offset: relocation.pointer for relocation in launch.relocations}
        if graph is None or not (_is_whole(graph, kernel, pointers) and self._fits(launch, model)):
            return False
        number, before = len(self._nodes), 0
        names: dict[str, str] = {}
        accesses: list[_Access] = []
        for parameter in kernel.parameters:
            bound = Bound(name=f"{label}_{parameter.name}", parameter=parameter, pointer=pointers[parameter.offset])
            if parameter.kind is ParameterKind.INITIALIZER:
                names[parameter.name] = bound.name
                continue
            access = _access(number, bound, written=parameter.kind is ParameterKind.OUTPUT)
            if not access.written:
                found = self._value(access)
                if found is None:
                    return False
                before |= self._ordered(found) if found.written else 0
                access = replace(access, bound=replace(bound, name=found.bound.name))
            names[parameter.name] = access.bound.name
            accesses.append(access)
        if any(not self._is_ordered(access, before) for access in accesses if access.written):
            return False
        self._take(model, graph, kernel, names, pointers, label)
        self._accesses += accesses
        self._before.append(before)
        self._nanoseconds += launch.duration_ns
        return True

    def joined(self) -> Joined:
        """The model of all of them."""
        inputs: dict[str, Bound] = {}
        outputs: dict[str, Bound] = {}
        for access in self._accesses:
            known = outputs if access.written else inputs
            if access.written or access.bound.name not in outputs:
                known.setdefault(access.bound.name, access.bound)
        graph = Graph(
            node=tuple(self._nodes),
            name="chain",
            initializer=tuple(self._constants),
            input=tuple(self._declared[name] for name in inputs),
            output=tuple(self._declared[name] for name in outputs),
        )
        opsets = tuple(Opset(domain=domain or None, version=n) for domain, n in sorted(self._opsets.items()))
        return Joined(
            code=write_model(Model(ir_version=self._ir_version, graph=graph, opset_import=opsets)),
            inputs=tuple(inputs.values()),
            outputs=tuple(outputs.values()),
            initializers=tuple(self._initializers.values()),
        )

    def _fits(self, launch: Launch, model: Model) -> bool:
        """Whether the model has nothing that names values of its own, and sets of operators that the others have."""
        assert model.graph is not None
        opsets = {opset.domain or "": opset.version for opset in model.opset_import}
        if any(attribute.g is not None for node in model.graph.node for attribute in node.attribute):
            return False
        if any(self._opsets.get(domain, version) != version for domain, version in opsets.items()):
            return False
        if not self._nodes:
            return True
        if len(self) >= (_MOST_LAUNCHES if launch.duration_ns else _MOST_UNTIMED):
            return False
        return self._nanoseconds + launch.duration_ns <= _MOST_NS

    def _value(self, read: _Access) -> _Access | None:
        """The value that is read: the last written there, or one from outside; None where it is parts of values."""
        met = [access for access in self._accesses if access.overlaps(read)]
        written = [access for access in met if access.written]
        if written:
            return written[-1] if written[-1].is_same_value(read) else None
        return next((access for access in met if access.is_same_value(read)), read)

    def _ordered(self, access: _Access) -> int:
        return self._before[access.launch] | 1 << access.launch

    def _is_ordered(self, write: _Access, before: int) -> bool:
        """Whether values order everything that touches the bytes of a write before it."""
        return all(before >> access.launch & 1 for access in self._accesses if access.overlaps(write))

    def _take(
        self,
        model: Model,
        graph: Graph,
        kernel: Kernel,
        names: dict[str, str],
        pointers: dict[int, Pointer],
        label: str,
    ) -> None:
        """Take over the node, constants and declarations of a model, under new names."""
        self._opsets |= {opset.domain or "": opset.version or 0 for opset in model.opset_import}
        self._ir_version = max(self._ir_version, model.ir_version or 0)
        constants = {tensor.name or "": f"{label}_{tensor.name}" for tensor in graph.initializer}
        renamed = {"": "", **constants, **names}
        (node,) = graph.node
        self._nodes.append(
            replace(
                node,
                name=label,
                input=tuple(renamed[name] for name in node.input),
                output=tuple(renamed[name] for name in node.output),
            )
        )
        self._constants += [replace(tensor, name=renamed[tensor.name or ""]) for tensor in graph.initializer]
        for value in (*graph.input, *graph.output):
            name = renamed[value.name or ""]
            self._declared.setdefault(name, replace(value, name=name))
        for parameter in kernel.parameters:
            if parameter.kind is ParameterKind.INITIALIZER:
                name = renamed[parameter.name]
                bound = Bound(name=name, parameter=parameter, pointer=pointers[parameter.offset])
                self._initializers[name] = bound


def _is_whole(graph: Graph, kernel: Kernel, pointers: Mapping[int, Pointer]) -> bool:
    """Whether the model is one call, of values that parameters and constants name, as `verify` wants it."""
    named = {"", *(p.name for p in kernel.parameters), *(tensor.name for tensor in graph.initializer)}
    used = {name for node in graph.node for name in (*node.input, *node.output)}
    return len(graph.node) == 1 and used <= named and pointers.keys() == {p.offset for p in kernel.parameters}


def _access(launch: int, bound: Bound, *, written: bool) -> _Access:
    nbytes = prod(bound.parameter.shape) * ITEM_NBYTES[bound.parameter.dtype]
    start = bound.pointer.offset
    place = bound.pointer.region, bound.pointer.index
    return _Access(launch=launch, place=place, start=start, end=start + nbytes, bound=bound, written=written)


def chains(launches: Sequence[tuple[Launch, Kernel, Model, str]]) -> list[tuple[list[int], Chain]]:
    """Consecutive launches of a stream in few models: the indices of those in each, and the model.

    A launch that no model can hold beside others is alone, beside an empty chain.
    """
    found: list[tuple[list[int], Chain]] = []
    for index, launch in enumerate(launches):
        if found and len(found[-1][1]) and found[-1][1].add(*launch):
            found[-1][0].append(index)
        else:
            found.append(([index], Chain()))
            found[-1][1].add(*launch)
    return found
