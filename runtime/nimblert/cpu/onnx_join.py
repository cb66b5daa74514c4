"""Consecutive launches of a CPU plan as one ONNX model: calling a session takes as long for many launches as for one.

Values that only launches of the model read are in ONNX Runtime's memory, as in a session of the whole model. The others
are inputs and outputs of the model, bound to their memory in the plan. ONNX Runtime may run nodes in any order that
data dependencies allow. So launches are in one model only if dependencies order every access to the memory of a bound
value before the launch that overwrites it.

A view (`in_place.is_view`) has no memory of its own in ONNX Runtime unless it is an output: its readers read the
operand's memory, and must run before that is overwritten, although in the plan the view is a copy.

The rules of a plan are about the shapes that it declares. ONNX Runtime compares the shapes of bound values with those;
so a value is left to ONNX Runtime only where its shape can be inferred from the inputs, before a run.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from nimblert.check import in_place
from nimblert.check.onnx_model import Graph, Model, Node, Opset, TensorValue, Value, write_model
from nimblert.cpu.dataflow import Dataflow
from nimblert.plan import ITEM_NBYTES, Access, Kernel, Launch, Parameter, ParameterKind, Pointer, Region

_MOST_LAUNCHES = 2048
"""The most launches of a model: their order takes a bit for each pair."""

_MOST_CUTS = 32
"""After so many cuts of a model, each of its launches runs by itself."""

Shapes = Mapping[str, Sequence[object]]
"""Shapes by the name of a value. An unknown size is None, or the name of a dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An input, output or initializer of a model: its name there, its parameter, and its place in memory."""

    name: str
    parameter: Parameter
    pointer: Pointer

    @property
    def access(self) -> Access:
        """Its bytes."""
        nbytes = prod(self.parameter.shape) * ITEM_NBYTES[self.parameter.dtype]
        return Access(pointer=self.pointer, nbytes=nbytes)

    @property
    def value(self) -> tuple[Pointer, str, tuple[int, ...]]:
        """The identity of the value, which several names may share."""
        return self.pointer, self.parameter.dtype, self.parameter.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A launch, the index of its command, its model, and the name for its node. ``alone``: it joins no others."""

    index: int
    launch: Launch
    kernel: Kernel
    model: Model
    alone: bool
    label: str

    def bound(self, kind: ParameterKind) -> tuple[Bound, ...]:
        """Its parameters of a kind, under names unique to this launch."""
        pointers = {relocation.param_offset: relocation.pointer for relocation in self.launch.relocations}
        return tuple(
            Bound(name=f"{self.label}_{p.name}", parameter=p, pointer=pointers[p.offset])
            for p in self.kernel.parameters
            if p.kind is kind
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The model of one launch or several. ``symbol`` is its name in messages."""

    symbol: str
    code: bytes
    inputs: tuple[Bound, ...]
    outputs: tuple[Bound, ...]
    initializers: tuple[Bound, ...]


class Chain:
    """Launches that are being joined into one model, of a program with this flow of data."""

    def __init__(self, flow: Dataflow) -> None:
        self.parts: list[Part] = []
        self._flow = flow
        self._position: dict[int, int] = {}
        """The positions of launches by the index of their command."""
        self._before: list[int] = []
        """For each launch the set of those that dependencies order before it, as bits."""
        self._opsets: dict[str, int] = {}
        self._ir_version = 0
        self._nodes: list[Node] = []
        self._constants: list[TensorValue] = []
        self._declared: dict[str, Value] = {}
        self._initializers: list[Bound] = []
        self._inputs: dict[object, tuple[Bound, int]] = {}
        """The values from outside, each with the set of launches that read it, as bits."""
        self._made: dict[tuple[int, object], Bound] = {}
        """The values that launches write, by command."""
        self._readers: dict[str, int] = {}
        """By the name of such a value the set of launches that read it, as bits."""
        self._views: list[tuple[str, str]] = []
        """What a view is of, and the view, by name."""

    def add(self, part: Part) -> bool:
        """Add a launch; False, and nothing has changed, where it cannot join."""
        graph = part.model.graph
        if part.alone or graph is None or not (_is_whole(graph, part) and self._fits(part.model)):
            return False
        position, before = len(self.parts), 0
        names: dict[str, str] = {}
        outer: list[Bound] = []
        for bound in part.bound(ParameterKind.INPUT):
            writers = self._flow.writers(part.index, bound.access)
            if writers.isdisjoint(self._position):
                outer.append(bound)
                continue
            made = self._made.get((min(writers), bound.value))
            if len(writers) > 1 or made is None:  # parts of values, or one of another shape
                return False
            names[bound.parameter.name] = made.name
            writer = self._position[min(writers)]
            before |= self._before[writer] | 1 << writer
        for name in names.values():
            self._readers[name] = self._readers.get(name, 0) | 1 << position
        for bound in outer:
            first, readers = self._inputs.get(bound.value, (bound, 0))
            self._inputs[bound.value] = first, readers | 1 << position
            names[bound.parameter.name] = first.name
        self._take(part, graph, names)
        self._before.append(before)
        self._position[part.index] = position
        self.parts.append(part)
        return True

    def exposed(self) -> Joined:
        """The model with everything that it computes as outputs, without declared shapes."""
        outputs = tuple(self._made.values())
        return self._joined(outputs, [_of_any_shape(self._declared[bound.name]) for bound in outputs])

    def joined(self, derived: Shapes) -> Joined:
        """The model. ``derived`` are the shapes that ONNX Runtime infers for the values that it computes."""
        outputs = tuple(bound for _, bound in self._in_memory(derived))
        return self._joined(outputs, [self._declared[bound.name] for bound in outputs])

    def conflict(self, derived: Shapes) -> int | None:
        """The position of a launch that overwrites memory before all accesses to it are sure to be done, or None."""
        made = self._in_memory(derived)
        through = self._readers_of_views({bound.name for _, bound in made})
        memory = _Memory(bound.access for _, bound in made)
        for bound, readers in self._inputs.values():
            memory.add(bound.access, readers, through.get(bound.name, 0))
        for position, bound in made:
            bit = 1 << position
            readers, later = memory.find(bound.access)
            if (readers & (bit - 1) | later) & ~self._before[position]:
                return position
            memory.add(bound.access, bit | self._readers.get(bound.name, 0), through.get(bound.name, 0))
        return None

    def _readers_of_views(self, in_memory: Collection[str]) -> dict[str, int]:
        """By the name of a value the set of launches that read views of it in its memory, as bits."""
        found: dict[str, int] = {}
        for given, view in reversed(self._views):
            if view not in in_memory:
                found[given] = found.get(given, 0) | self._readers.get(view, 0) | found.get(view, 0)
        return found

    def _in_memory(self, derived: Shapes) -> list[tuple[int, Bound]]:
        """The values that are kept in memory of the plan, each with the position of its launch."""
        made = [(self._position[command], bound) for (command, _), bound in self._made.items()]
        read_outside = set(self._read_outside())
        kept = [(at, bound) for at, bound in made if bound.name in read_outside or _is_in_memory(bound, derived)]
        return kept or made[-1:]  # a model has an output

    def _read_outside(self) -> Iterator[str]:
        """The names of the values that commands outside of the model read in part or whole."""
        made: dict[int, list[Bound]] = {}
        for (command, _), bound in self._made.items():
            made.setdefault(command, []).append(bound)
        for command, values in made.items():
            memory = _Memory(bound.access for bound in values)
            for reader, access in self._flow.reads(command):
                if reader not in self._position:
                    memory.add(access, 1)
            yield from (bound.name for bound in values if memory.find(bound.access) != (0, 0))

    def _fits(self, model: Model) -> bool:
        """Whether the model has no subgraphs, and the opset versions of the others."""
        assert model.graph is not None
        if any(attribute.g is not None for node in model.graph.node for attribute in node.attribute):
            return False
        opsets = {opset.domain or "": opset.version for opset in model.opset_import}
        if any(self._opsets.get(domain, version) != version for domain, version in opsets.items()):
            return False
        return len(self.parts) < _MOST_LAUNCHES

    def _take(self, part: Part, graph: Graph, names: dict[str, str]) -> None:
        """Add node, constants and declarations of a launch, whose inputs have these names in the joined model."""
        self._opsets |= {opset.domain or "": opset.version or 0 for opset in part.model.opset_import}
        self._ir_version = max(self._ir_version, part.model.ir_version or 0)
        self._initializers += part.bound(ParameterKind.INITIALIZER)
        for bound in part.bound(ParameterKind.OUTPUT):
            self._made[part.index, bound.value] = bound
            names[bound.parameter.name] = bound.name
        own = {tensor.name or "": f"{part.label}_{tensor.name}" for tensor in graph.initializer}
        renamed = {"": "", **own, **names}
        (node,) = graph.node
        inputs, outputs = (tuple(renamed[name] for name in side) for side in (node.input, node.output))
        self._nodes.append(replace(node, name=part.label, input=inputs, output=outputs))
        if in_place.is_view(node):
            self._views.append((inputs[0], outputs[0]))
        self._constants += [replace(tensor, name=own[tensor.name or ""]) for tensor in graph.initializer]
        for value in (*graph.input, *graph.output):
            name = renamed[value.name or ""]
            self._declared.setdefault(name, replace(value, name=name))

    def _joined(self, outputs: tuple[Bound, ...], declared: Iterable[Value]) -> Joined:
        inputs = tuple(bound for bound, _ in self._inputs.values())
        graph = Graph(
            node=tuple(self._nodes),
            name="chain",
            initializer=tuple(self._constants),
            input=tuple(self._declared[bound.name] for bound in inputs),
            output=tuple(declared),
        )
        opsets = tuple(Opset(domain=domain or None, version=n) for domain, n in sorted(self._opsets.items()))
        ends = dict.fromkeys(part.kernel.symbol for part in (self.parts[0], self.parts[-1]))
        return Joined(
            symbol=" to ".join(ends),
            code=write_model(Model(ir_version=self._ir_version, graph=graph, opset_import=opsets)),
            inputs=inputs,
            outputs=outputs,
            initializers=tuple(self._initializers),
        )


def _is_in_memory(bound: Bound, derived: Shapes) -> bool:
    """Whether a value that only the model reads is kept in memory of the plan nevertheless."""
    # ONNX Runtime gives [] for a scalar and for an unknown rank alike.
    shape = bound.parameter.shape
    return bound.pointer.region is not Region.ARENA or not shape or tuple(derived.get(bound.name, ())) != shape


class _Memory:
    """The sets of launches, as bits, that access each piece of the memory that is ``written``.

    Pieces lie between the ends of what is written, so that a write covers all bytes of a piece or none.
    """

    def __init__(self, written: Iterable[Access]) -> None:
        borders: dict[object, set[int]] = {}
        for access in written:
            start = access.pointer.offset
            borders.setdefault(_region(access), set()).update((start, start + access.nbytes))
        self._borders = {region: sorted(ends) for region, ends in borders.items()}
        self._sets = {region: [(0, 0)] * len(ends) for region, ends in borders.items()}

    def add(self, access: Access, readers: int, later: int = 0) -> None:
        """Add launches that access a value here, and those that may do so ``later``, when others have written here."""
        sets = self._sets.get(_region(access), [])
        for piece in self._pieces(access):
            sets[piece] = sets[piece][0] | readers, sets[piece][1] | later

    def find(self, access: Access) -> tuple[int, int]:
        """Return both sets of launches that were added for any piece of a write."""
        readers = later = 0
        for piece in self._pieces(access):
            found = self._sets[_region(access)][piece]
            readers, later = readers | found[0], later | found[1]
        return readers, later

    def _pieces(self, access: Access) -> range:
        """The pieces of which an access has bytes; the last one of a region stands for all that lies behind it."""
        borders, start = self._borders.get(_region(access), []), access.pointer.offset
        if not access.nbytes:
            return range(0)
        return range(max(0, bisect_right(borders, start) - 1), bisect_left(borders, start + access.nbytes))


def _region(access: Access) -> tuple[Region, int]:
    return access.pointer.region, access.pointer.index


def join(
    parts: Iterable[Part], flow: Dataflow, derive: Callable[[Joined], Shapes]
) -> Iterator[tuple[list[Part], Joined | None]]:
    """Join consecutive launches of a stream: the launches of each model, and the model, None for a single launch.

    ``derive`` infers the shapes of a model's outputs from those of its inputs.
    """
    for longest in _chains(parts, flow):
        derived = derive(longest.exposed()) if len(longest.parts) > 1 else {}
        uncut, cuts = [longest.parts], 0
        while uncut:
            some = uncut.pop()
            if len(some) == 1:
                yield some, None
                continue
            (chain,) = _chains(some, flow)
            place = chain.conflict(derived)
            if place is None:
                yield some, chain.joined(derived)
                continue
            cuts += 1
            cut = (some[:place], some[place:]) if cuts <= _MOST_CUTS else [[part] for part in some]
            uncut += reversed(cut)


def _chains(parts: Iterable[Part], flow: Dataflow) -> Iterator[Chain]:
    """The launches in chains, each as long as the models and the flow of data allow."""
    chain = Chain(flow)
    for part in parts:
        if not chain.add(part):
            if chain.parts:
                yield chain
            chain = Chain(flow)
            if not chain.add(part):
                chain.parts.append(part)
                yield chain
                chain = Chain(flow)
    if chain.parts:
        yield chain


def _is_whole(graph: Graph, part: Part) -> bool:
    """Whether the model is one node whose values are all parameters or constants, as `verify` requires."""
    offsets = {parameter.offset for parameter in part.kernel.parameters}
    named = {"", *(p.name for p in part.kernel.parameters), *(tensor.name for tensor in graph.initializer)}
    used = {name for node in graph.node for name in (*node.input, *node.output)}
    pointers = {relocation.param_offset for relocation in part.launch.relocations}
    return len(graph.node) == 1 and used <= named and pointers == offsets


def _of_any_shape(value: Value) -> Value:
    if value.type is None or value.type.tensor_type is None:
        return value
    return replace(value, type=replace(value.type, tensor_type=replace(value.type.tensor_type, shape=None)))
