"""An ONNX file as a Graph: one task for each node that ONNX Runtime's optimiser leaves."""

from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper

from nimblec.base import places
from nimblec.base.errors import UnsupportedModelError
from nimblec.base.ir import (
    Access,
    Body,
    BodyCall,
    BufferKind,
    CopyWork,
    CropWork,
    FillWork,
    Graph,
    KernelWork,
    LoopWork,
    Op,
    Reference,
    SwitchWork,
    Task,
    TensorView,
)
from nimblec.base.options import DEFAULT_TRIP_LIMIT, InputSpec, NamedInput
from nimblec.base.places import Phase
from nimblec.cpu import control, kernels, values
from nimblec.cpu.branches import take_branches
from nimblec.cpu.buffers import Buffers
from nimblec.cpu.constants import TensorType, type_of
from nimblec.cpu.corrections import correct
from nimblec.cpu.misfits import stop_at_misfits
from nimblec.cpu.optimizer import OptimizedModel, optimize
from nimblec.cpu.reference import ReferenceModel
from nimblec.cpu.regions import REGION, find_regions
from nimblec.cpu.sources import sources_of
from nimblec.cpu.state import place_state
from nimblec.cpu.unchanged import unchanged
from nimblec.onnx_export.model_state import ModelState
from nimblec.onnx_import import model_file, model_nodes, model_shapes
from nimblec.onnx_import.input_arrays import check_examples, make_constant
from nimblert.arrays.layouts import dense_strides
from nimblert.plan import Kernel, Module, ParameterKind, Profile
from nimblert.plan.dimensions import Shape

_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)

_COPIED_NBYTES = 32 << 10
"""A smaller value that a loop carries is copied at the end of a trip: written in place, it would divide the body into
several stretches (`nimblec.cpu.stretches`)."""


def capture(path: str | PathLike[str], inputs: Sequence[InputSpec] = ()) -> Graph:
    """Return the model in the ONNX file ``path``, its input shapes fixed by ``inputs`` where they are dynamic.

    Raises CompileError for a file that cannot be read, UnsupportedModelError for a model that no
    plan can hold.
    """
    with TemporaryDirectory(prefix="nimblec-") as scratch:
        model = ReferenceModel(entry="main", profile=(), folder=Path(path).parent, proto=read(path, inputs))
        return capture_model(model, optimize(model.proto, model.folder, Path(scratch)))


def read(
    path: str | PathLike[str],
    inputs: Sequence[InputSpec] = (),
    dims: Sequence[tuple[str, int]] = (),
    examples: Sequence[InputSpec] = (),
    profile: Profile = (),
    named: Sequence[NamedInput] = (),
    constants: Iterable[tuple[str, np.ndarray]] = (),
) -> ModelProto:
    """Return the model in a file, checked, with static input shapes; its external data stay in their files.

    ``examples`` describe arrays for its inputs, of any size in the dimensions that ``profile`` sizes; ``inputs``
    take precedence. ``named`` give names to dimensions that have none, ``constants`` values to inputs, which then are
    none. An `If` whose condition is known is replaced by its branch.
    """
    loaded = model_file.load(path, external_data=False)
    make_constant(loaded, constants)
    model_shapes.name_dimensions(loaded, named)
    check_examples(loaded, examples)
    given = {spec.name for spec in inputs}
    resized = model_shapes.resize(loaded, examples, profile)
    specs = (*inputs, *(spec for spec in resized if spec.name not in given))
    model = model_shapes.fix_shapes(loaded, specs, (*dims, *profile))
    # Outputs that are not tensors are refused by name.
    model_file.outputs(model)
    model_nodes.clear_repeated_names(model)
    model_nodes.shorten_domains(model)
    take_branches(model, Path(path).parent)
    stop_at_misfits(model, Path(path).parent)
    correct(model)
    return model


def capture_model(model: ReferenceModel, optimized: OptimizedModel, weights: Collection[str] | None = None) -> Graph:
    """Return the Graph of a model that `read` returned, from its optimised form.

    ``weights`` are the only initializers that may be replaced in a plan (None: any may). Raises UnsupportedModelError
    for a model that no plan can hold.
    """
    refuse_random(model.proto.graph)
    held = unchanged(model.proto, model.folder, optimized)
    kept = held if weights is None else held.intersection(weights)
    sources = sources_of(model.proto, optimized.proto.graph.node)
    graph = graph_of(optimized, model.ranges, model.state, kept, sources, model.trip_limit, model.bounds)
    replaceable = {name for name, _ in graph.weights}
    return replace(graph, folded=frozenset(tensor.name for tensor in model.proto.graph.initializer) - replaceable)


def graph_of(
    optimized: OptimizedModel,
    sample_ranges: values.Ranges = MappingProxyType({}),
    state: Sequence[ModelState] = (),
    weights: Collection[str] = (),
    sources: Mapping[str, str] | None = None,
    trip_limit: int = DEFAULT_TRIP_LIMIT,
    bounds: Mapping[str, Shape] = MappingProxyType({}),
) -> Graph:
    """Return the Graph of an optimised model. ``weights`` are the constants that the optimiser left as they were.

    ``sources`` are the sources of nodes by their first output; without them a node's source is its name.
    ``trip_limit`` and ``bounds`` are those of `ReferenceModel`.
    """
    known = ChainMap[str, np.ndarray | None]({**optimized.arrays})
    # The optimiser has inlined functions.
    refuse_random(optimized.proto.graph, known, is_optimized=True)
    builder = _Builder(optimized, sample_ranges, weights, state, sources or {}, trip_limit, bounds)
    for tensor in model_file.inputs(optimized.proto):
        builder.add_input(tensor.name, sample_ranges.get(tensor.name))
    return builder.graph()


def refuse_random(
    graph: GraphProto, outer: ChainMap[str, np.ndarray | None] | None = None, *, is_optimized: bool = False
) -> None:
    """Raise UnsupportedModelError for a node that draws random numbers, also in the bodies of nodes.

    ``outer`` has the constants around the graph, and None for what varies there. In an optimised model what nodes
    compute varies, and constants of bodies are looked at: ONNX Runtime has read them.
    """
    outer = ChainMap() if outer is None else outer
    varying = [value.name for value in graph.input]
    constants = {}
    if is_optimized:
        varying += [name for node in graph.node if node.op_type != "Constant" for name in node.output if name]
        single = (tensor for tensor in graph.initializer if prod(tensor.dims) == 1 and tensor.name not in outer)
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in single}
    known = outer.new_child({**{name: None for name in varying if outer.get(name) is None}, **constants})
    for node in graph.node:
        if _is_random(node, known):
            raise UnsupportedModelError(
                f"node {model_nodes.node_name(node)!r} ({node.op_type}): draws random numbers, so that two runs of a "
                f"plan would differ; export the model for inference, or make them an input"
            )
        for body in model_nodes.subgraphs(node):
            refuse_random(body, known, is_optimized=is_optimized)


def _is_random(node: NodeProto, known: Mapping[str, np.ndarray | None]) -> bool:
    """Return whether a node draws random numbers: dropout does in training mode, and may if the mode varies."""
    if model_nodes.operator_name(node) != "Dropout":
        return model_nodes.operator_name(node) in _RANDOM
    ratio, mode = [*node.input[1:], "", ""][:2]
    dropped = known.get(ratio)
    if mode not in known or (dropped is not None and not dropped.any()):
        return False
    training = known[mode]
    return training is None or bool(training.all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Control:
    """A control-flow node: a loop, or the branches of an If, with the graph of each body."""

    loop: control.Loop | None
    bodies: tuple[control.Body, ...]
    graphs: tuple[Graph, ...]


def _launch(built: kernels.NodeKernel, kernel: int, memory: Buffers) -> Task:
    """Return the task that launches a kernel."""
    operands = [memory.of(name) for name in built.values]
    bound = list(zip(built.parameters, operands, strict=True))
    references = tuple(Reference(param_offset=parameter.offset, buffer=b, offset=0) for parameter, b in bound)
    return Task(
        op=0,
        work=KernelWork(kernel=kernel, params=bytes(kernels.POINTER_NBYTES * len(bound)), references=references),
        reads=tuple(memory.whole(b) for parameter, b in bound if parameter.kind is not ParameterKind.OUTPUT),
        writes=tuple(memory.whole(b) for parameter, b in bound if parameter.kind is ParameterKind.OUTPUT),
    )


def _held(memory: Buffers, weights: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield the ``weights`` that share their buffer with no other value."""
    names = Counter(memory.of_value.values())
    yield from ((name, b) for name, b in memory.of_value.items() if name in weights and names[b] == 1)


def _handed_over(found: _Control, reads: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the last values of a loop with the first ones that nothing else ``reads``, whose memory they may take."""
    if found.loop is None:
        return
    times = Counter(carried.first for carried in found.loop.carried)
    for carried in found.loop.carried:
        first = carried.first
        if carried.output and times[first] == reads[first] == 1 and first not in found.loop.body.captured:
            yield carried.output, first


def _view(
    memory: Buffers, name: str, tensor_type: TensorType, sample_range: tuple[int, int] | None = None
) -> TensorView:
    return TensorView(
        name=name,
        dtype=tensor_type.dtype,
        shape=tensor_type.shape,
        strides=dense_strides(tensor_type.shape),
        buffer=memory.of(name),
        sample_range=sample_range,
    )


class _Builder:
    """The Graph under construction: buffers, kernels and tasks in order of first use."""

    def __init__(
        self,
        optimized: OptimizedModel,
        sample_ranges: values.Ranges,
        weights: Collection[str],
        state: Sequence[ModelState | control.Slot],
        sources: Mapping[str, str],
        trip_limit: int,
        bounds: Mapping[str, Shape] = MappingProxyType({}),
    ) -> None:
        self._trip_limit, self._optimized = trip_limit, optimized
        model = self._model = optimized.proto
        self._weights, self._sources = weights, sources
        self._header = kernels.header(model)
        self._arrays = dict(optimized.arrays)
        kept = {tensor.output for tensor in state}
        self._outputs = [value.name for value in model.graph.output if value.name not in kept]
        found = values.infer(optimized, model_file.inputs(model), sample_ranges, bounds)
        if resized := next((tensor for tensor in state if tensor.output in found.unsized), None):
            raise UnsupportedModelError(f"state {resized.name!r}: its size after a run depends on values")
        self._regions = find_regions(optimized, found, self._outputs, bounds)
        self._constants, (self._types, self._unsized) = self._regions.constants, self._regions.values
        cropped = self._regions.cropped
        self._returned = [cropped[name].padded if name in cropped else name for name in self._outputs]
        self._state = {tensor.input: tensor for tensor in state}
        copied = [s for s in state if isinstance(s, control.Slot) and s.is_read and s.type.nbytes < _COPIED_NBYTES]
        placed = [s for s in state if s not in copied]
        returned = (*self._returned, *(s.output for s in copied))
        nodes = self._regions.nodes
        self._reads = Counter(name for node in nodes for name in model_nodes.read_names(node))
        self._controls = dict(self._programs(nodes))
        self._handed = dict(pair for found in self._controls.values() for pair in _handed_over(found, self._reads))
        self._placement = place_state(nodes, placed, self._types, returned, self._handed)
        self._copies = (*self._placement.copies, *((s.output, s.input) for s in copied))
        self._memory = Buffers(self._types, self._constants, self._arrays)
        self._modules: dict[Module, int] = {}
        self._kernels: dict[Kernel, int] = {}
        self._ops: list[Op] = []
        self._tasks: list[Task] = []
        self._inputs: list[TensorView] = []
        self._bodies: list[Body] = []

    def add_input(self, name: str, sample_range: tuple[int, int] | None) -> None:
        """Add a graph input and its buffer."""
        kept = self._state.get(name)
        if isinstance(kept, ModelState):
            data = np.ascontiguousarray(kept.data).reshape(-1).view(np.uint8).data.toreadonly()
            buffer = self._memory.add(BufferKind.STATE, kept.name, self._types[name], data, storage=kept.storage)
            self._memory.of_value[name] = buffer
            return
        self._memory.of_value[name] = self._memory.add(BufferKind.INPUT, name, self._types[name])
        self._inputs.append(_view(self._memory, name, self._types[name], sample_range))

    def _add_node(self, node: NodeProto) -> None:
        """Add the tasks of a node, with buffers for what it writes.

        A loop or branch whose bodies have values of one size each runs them as programs; ONNX Runtime runs any other.
        """
        found = self._controls.get(model_nodes.first_output(node))
        if found is None:
            self._add_kernel(node)
        else:
            self._add_control(node, found)

    def _add_kernel(self, node: NodeProto) -> None:
        nodes = self._regions.members[node.output[0]] if node.domain == REGION else [node]
        built = kernels.build(nodes, self._types, self._constants, self._header, self._unsized)
        for name in filter(None, node.output):
            if name in self._placement.places:
                self._memory.of_value[name] = self._memory.of(self._placement.places[name])
                continue
            self._add_result(name, self._types[name])
        module = self._modules.setdefault(built.module, len(self._modules))
        kernel = Kernel(module=module, symbol=built.symbol, parameters=built.parameters)
        ops = [Op(name=kernels.symbol(member), source=self._source(member)) for member in nodes]
        if len(nodes) > 1:
            ops.insert(0, Op(name=built.symbol, source=places.joined(op.source for op in ops)))
        self._ops += ops
        task = _launch(built, self._kernels.setdefault(kernel, len(self._kernels)), self._memory)
        self._tasks.append(replace(task, op=len(self._ops) - len(ops), joined=len(ops) - 1))

    def _add_op(self, name: str, node: NodeProto) -> None:
        self._ops.append(Op(name=name, source=self._source(node)))

    def _source(self, node: NodeProto) -> str:
        return self._sources.get(model_nodes.first_output(node), "") if self._sources else model_nodes.node_name(node)

    def _add_crop(self, output: int, name: str) -> None:
        """Add the task that cuts an output of unknown size."""
        value = self._regions.cropped[name].sizes
        sizes = Access(buffer=self._memory.of(value), offset=0, nbytes=self._types[value].nbytes)
        self._add_op("crop", next(node for node in self._model.graph.node if name in node.output))
        work = CropWork(output=output, sizes=sizes)
        self._tasks.append(Task(op=len(self._ops) - 1, work=work, reads=(sizes,), writes=()))

    def _add_result(self, name: str, tensor_type: TensorType) -> int:
        """Return a new buffer for a value of the graph."""
        kind = BufferKind.OUTPUT if name in self._returned else BufferKind.TEMPORARY
        self._memory.of_value[name] = self._memory.add(kind, name, tensor_type)
        return self._memory.of_value[name]

    def _programs(self, nodes: Iterable[NodeProto]) -> Iterator[tuple[str, "_Control"]]:
        """Yield the control-flow nodes whose bodies can be programs, by their first output."""
        for node in nodes:
            if node.op_type in control.CONTROL and not node.domain and self._unsized.keys().isdisjoint(node.output):
                # ONNX Runtime can run a node that this check refuses.
                with suppress(UnsupportedModelError):
                    yield model_nodes.first_output(node), self._control(node)

    def _control(self, node: NodeProto) -> "_Control":
        """Return the graphs of the bodies of a node. Raises UnsupportedModelError for sizes that vary."""
        constants = {name: type_of(tensor) for name, tensor in self._constants.items() if name in self._arrays}
        scope = control.Scope(model=self._optimized, types=self._types | constants)
        loop = control.loop(node, scope, self._trip_limit) if node.op_type != "If" else None
        bodies = control.branches(node, scope) if loop is None else (loop.body,)
        graphs = []
        for body in bodies:
            inner = map(model_nodes.first_output, body.model.proto.graph.node)
            sources = dict.fromkeys(inner, self._source(node)) if self._sources else {}
            builder = _Builder(body.model, {}, (), body.slots, sources, self._trip_limit)
            for tensor in model_file.inputs(body.model.proto):
                builder.add_input(tensor.name, None)
            for slot in body.slots:
                found = builder._memory.type(slot.output)
                # A condition may have the shape [1].
                if found != slot.type and found.nbytes > 1:
                    raise UnsupportedModelError(f"{slot.output!r} changes its size")
            graphs.append(builder.graph())
        return _Control(loop=loop, bodies=bodies, graphs=tuple(graphs))

    def _add_control(self, node: NodeProto, found: "_Control") -> None:
        """Add the task that runs the bodies, and the tasks that fill a loop's carried values."""
        loop = found.loop
        if loop is None:
            slots = [
                self._memory.of(self._placement.places[name])
                if name in self._placement.places
                else self._add_result(name, self._types[name])
                for name in filter(None, node.output)
            ]
            byte = self._memory.of(node.input[0])
        else:
            for name, array in loop.constants.items():
                self._constants[name] = numpy_helper.from_array(array, name)
                self._arrays[name] = array
            for before in loop.before:
                self._types[before.output[0]] = TensorType(dtype="bool", shape=loop.start_shape)
                self._add_kernel(before)
            values = zip(loop.carried, loop.body.slots, strict=True)
            (start, _), *others = values
            # Only the loop reads the byte that the nodes before it write.
            byte = self._memory.of(start.first)
            slots = [byte, *(self._carry(carried, slot.type) for carried, slot in others)]
        captured = [tuple(map(self._memory.of, body.captured)) for body in found.bodies]
        calls = tuple(
            BodyCall(body=len(self._bodies) + i, buffers=(*slots, *buffers)) for i, buffers in enumerate(captured)
        )
        self._bodies += (Body(graph=graph) for graph in found.graphs)
        at = Access(buffer=byte, offset=0, nbytes=1)
        read = (byte, *chain(*captured), *(slots if loop else ()))
        self._add_op(kernels.symbol(node), node)
        self._tasks.append(
            Task(
                op=len(self._ops) - 1,
                work=SwitchWork(index=at, calls=calls)
                if loop is None
                else LoopWork(condition=at, call=calls[0], limit=loop.limit),
                reads=tuple(map(self._memory.whole, dict.fromkeys(read))),
                writes=tuple(map(self._memory.whole, slots)),
            )
        )

    def _carry(self, carried: control.Carried, tensor_type: TensorType) -> int:
        """Return the buffer of a carried value, filled with its first one."""
        name = carried.output
        if name in self._placement.places:
            buffer = self._memory.of(self._placement.places[name])
        elif name and self._is_handed_over(name, carried.first):
            buffer = self._memory.of_value[name] = self._memory.of(carried.first)
        else:
            buffer = self._add_result(name, tensor_type)
        if not carried.first:
            whole = self._memory.whole(buffer)
            self._ops.append(Op(name="zeros", source=name))
            fill = FillWork(dst=whole, value=0, element_nbytes=1)
            self._tasks.append(Task(op=len(self._ops) - 1, work=fill, reads=(), writes=(whole,)))
        elif self._memory.of(carried.first) != buffer:
            self._copy_to(buffer, self._memory.of(carried.first), name)
        return buffer

    def _is_handed_over(self, name: str, first: str) -> bool:
        """Return whether a loop may keep a carried value in the memory of its first one."""
        buffer = self._memory.of_value.get(first)
        is_own = buffer is not None and self._memory.items[buffer].kind is BufferKind.TEMPORARY
        return is_own and name not in self._returned and self._handed.get(name) == first

    def graph(self) -> Graph:
        """Return the finished Graph."""
        overwritten = {tensor.input for tensor in self._state.values() if tensor.output}
        saved = {
            name: self._copy(name, BufferKind.OUTPUT if name in self._returned else BufferKind.TEMPORARY)
            for name in dict.fromkeys((*self._returned, *(value for value, _ in self._copies)))
            # Readers of an overwritten value need the value before the run.
            if name in overwritten
        }
        for node in self._placement.nodes:
            self._add_node(node)
        for value, state in self._copies:
            source = saved[value] if value in saved else self._memory.of(value)
            self._copy_to(self._memory.of(state), source, self._state[state].name)
        self._memory.of_value |= saved
        for index, name in enumerate(self._outputs):
            if name in self._regions.cropped:
                self._add_crop(index, name)
        outputs = tuple(
            replace(_view(self._memory, value, self._memory.type(value)), name=name)
            for name, value in zip(self._outputs, self._returned, strict=True)
        )
        return Graph(
            modules=tuple(self._modules),
            kernels=tuple(self._kernels),
            buffers=tuple(self._memory.items),
            ops=tuple(self._ops),
            tasks=tuple(self._tasks),
            inputs=tuple(self._inputs),
            outputs=outputs,
            weights=tuple(_held(self._memory, self._weights)),
            bodies=tuple(self._bodies),
        )

    def _copy(self, name: str, kind: BufferKind) -> int:
        """Return a buffer with a copy of a value, made before any node runs."""
        copied = self._memory.add(kind, name, self._types[name])
        self._copy_to(copied, self._memory.of(name), name)
        return copied

    def _copy_to(self, dst: int, src: int, source: str) -> None:
        to, of = (Access(buffer=buffer, offset=0, nbytes=self._memory.items[dst].nbytes) for buffer in (dst, src))
        self._ops.append(Op(name="copy", source=Phase.UPDATE.value if self._sources else source))
        self._tasks.append(Task(op=len(self._ops) - 1, work=CopyWork(dst=to, src=of), reads=(of,), writes=(to,)))
