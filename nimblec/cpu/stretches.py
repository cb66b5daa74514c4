"""Stretches: consecutive nodes on a stream as one kernel, since ONNX Runtime is called as fast for many as for one.

Values that only the nodes of a stretch use live in ONNX Runtime's memory, which requires that their shapes can be
inferred before a run. All other values are parameters of the kernel, bound to memory of the plan.

ONNX Runtime may reorder the nodes of a stretch. So a node that updates state in place is a kernel of its own: a stretch
writes no memory that it otherwise reads or writes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from nimblec.base import places
from nimblec.base.ir import Access, BufferKind, Graph, KernelWork, Op, Reference, Schedule, Task
from nimblec.cpu.kernels import POINTER_NBYTES, origin
from nimblert.arrays.layouts import numpy_dtype
from nimblert.check import division, onnx_model, onnx_rules
from nimblert.check.onnx_model import Model, Node, Opset, TensorValue, Value
from nimblert.check.protobuf import Budget
from nimblert.cpu import onnx_session
from nimblert.cpu.onnx_session import LABEL, Inferred
from nimblert.plan import Kernel, Module, Parameter, ParameterKind
from nimblert.plan.records import DEFAULT_LIMITS

_MOST_NODES = 2048
"""The most nodes of a stretch."""

_LARGEST_SHARED_NBYTES = 32 << 10
"""The largest model of several tasks that joins others: the model of a stretch repeats it for each task."""

_MOST_NBYTES = DEFAULT_LIMITS.model_nbytes // 2
"""The most bytes of the models that a stretch is made of."""

_Key: TypeAlias = tuple[tuple[int, tuple[str, ...], tuple[str, ...]], ...]
"""All that the model of a stretch depends on: of each node the id of its own model, and what it reads and makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A task that may join others: its model of one node, and the buffer of each parameter."""

    task: int
    model: Model
    nbytes: int
    operands: tuple[tuple[Parameter, int], ...]

    def buffers(self, kind: ParameterKind) -> set[int]:
        """Return the buffers of the parameters of a kind."""
        return {buffer for parameter, buffer in self.operands if parameter.kind is kind}


class Joiner:
    """Joins the tasks of graphs into stretches. It keeps what it has read and inferred for further schedules."""

    def __init__(self) -> None:
        self._models: dict[Module, Model] = {}
        self._inferred: dict[_Key, Inferred] = {}
        self._modules: dict[tuple[_Key, frozenset[str]], Module] = {}

    def join(self, graph: Graph, schedule: Schedule) -> tuple[Graph, Schedule]:
        """Return the graph with a task for each stretch of the schedule, in issue order, and its schedule.

        The ops of the nodes of a stretch follow the op of its task.
        """
        place = {task: number for number, task in enumerate(schedule.order)}
        stretches = sorted(self._stretches(graph, schedule), key=lambda stretch: place[stretch.tasks[0]])
        users = _users(graph)
        made = _JoinedGraph(graph)
        for stretch in stretches:
            if len(stretch.tasks) == 1:
                made.add(stretch.tasks[0])
            else:
                made.add_stretch(stretch.tasks, self._kernel(graph, stretch.nodes, users))
        number = {task: index for index, stretch in enumerate(stretches) for task in stretch.tasks}
        return made.graph(), Schedule(
            order=tuple(range(len(stretches))),
            streams=tuple(schedule.streams[stretch.tasks[0]] for stretch in stretches),
            stream_count=schedule.stream_count,
            waits=tuple((number[before], number[after]) for before, after in schedule.waits),
        )

    def _stretches(self, graph: Graph, schedule: Schedule) -> "Iterator[_Stretch]":
        """Yield the stretches: tasks of a stream, between events, each as long as models and memory allow."""
        recorded, waiting = {before for before, _ in schedule.waits}, {after for _, after in schedule.waits}
        launches = Counter(task.work.kernel for task in graph.tasks if isinstance(task.work, KernelWork))
        last: dict[int, _Stretch] = {}
        for task in schedule.order:
            stream, node = schedule.streams[task], self._node(graph, task, launches)
            stretch = last.get(stream)
            if stretch is None or task in waiting or node is None or not stretch.add(node):
                if stretch is not None:
                    yield stretch
                stretch = last[stream] = _Stretch(task, node)
            stretch.is_complete |= task in recorded
        yield from last.values()

    def _node(self, graph: Graph, task: int, launches: Mapping[int, int]) -> _Node | None:
        """Return the node of a task; None for one that no stretch may hold. ``launches`` are those of each kernel."""
        work = graph.tasks[task].work
        if not isinstance(work, KernelWork):
            return None
        kernel = graph.kernels[work.kernel]
        module = graph.modules[kernel.module]
        if module.code.nbytes > (_LARGEST_SHARED_NBYTES if launches[work.kernel] > 1 else _MOST_NBYTES):
            return None
        if module not in self._models:
            self._models[module] = onnx_model.read_model(bytes(module.code), Budget(DEFAULT_LIMITS.model_fields))
        model = self._models[module]
        assert model.graph is not None
        has_body = any(attribute.g is not None for node in model.graph.node for attribute in node.attribute)
        if has_body or len(model.graph.node) > 1 or division.operands(model.graph, kernel.parameters) is not None:
            return None
        buffers = {reference.param_offset: reference.buffer for reference in work.references}
        operands = tuple((parameter, buffers[parameter.offset]) for parameter in kernel.parameters)
        node = _Node(task=task, model=model, nbytes=module.code.nbytes, operands=operands)
        is_in_place = node.buffers(ParameterKind.OUTPUT) & node.buffers(ParameterKind.INPUT)
        return None if is_in_place else node

    def _kernel(self, graph: Graph, nodes: Sequence[_Node], users: Mapping[int, AbstractSet[int]]) -> "_Kernel":
        """Return the kernel of several nodes; ``users`` are the tasks that use each temporary buffer."""
        model = _StretchModel()
        for node in nodes:
            model.add(node)
        types = self._types(graph, model)
        own = {node.task for node in nodes}
        inner = [
            name
            for name, (parameter, buffer) in model.made.items()
            if buffer in users
            and users[buffer] <= own
            and onnx_session.is_inferred(types, name, parameter.dtype, parameter.shape)
        ]
        # A model has an output.
        names = frozenset(inner[:-1] if len(inner) == len(model.made) else inner)
        key = model.key, names
        if key not in self._modules:
            self._modules[key] = model.module(names)
        return model.kernel(names, self._modules[key])

    def _types(self, graph: Graph, model: "_StretchModel") -> Inferred:
        """Return the types of the values of a stretch, as far as ONNX Runtime infers them."""
        key = model.key
        if key not in self._inferred:
            weights = {
                name: onnx_session.ort_value(_array(graph, parameter, buffer), parameter.dtype)
                for name, (parameter, buffer) in model.initializers.items()
            }
            self._inferred[key] = onnx_session.inferred_types(model.model(frozenset()), weights)
        return self._inferred[key]


def _array(graph: Graph, parameter: Parameter, buffer: int) -> np.ndarray:
    """Return the constant in a buffer."""
    data = graph.buffers[buffer].data
    return np.frombuffer(b"" if data is None else data, numpy_dtype(parameter.dtype)).reshape(parameter.shape)


def _users(graph: Graph) -> dict[int, set[int]]:
    """Return the tasks that use each temporary buffer, without the buffers of inputs and outputs of the graph."""
    users: dict[int, set[int]] = {}
    passed = {view.buffer for view in (*graph.inputs, *graph.outputs)}
    for index, task in enumerate(graph.tasks):
        for access in (*task.reads, *task.writes):
            if graph.buffers[access.buffer].kind is BufferKind.TEMPORARY and access.buffer not in passed:
                users.setdefault(access.buffer, set()).add(index)
    return users


class _Stretch:
    """Consecutive tasks, and their nodes. ``is_complete``: no further task may join them."""

    def __init__(self, task: int, node: _Node | None) -> None:
        self.tasks = [task]
        self.nodes: list[_Node] = []
        self.is_complete = node is None
        self._opsets: dict[str, int] = {}
        self._nbytes = 0
        self._read: set[int] = set()
        self._made: dict[int, Parameter] = {}
        if node is not None:
            self._take(node)

    def add(self, node: _Node) -> bool:
        """Add a task, and return whether it could join; if not, nothing has changed."""
        if self.is_complete or len(self.nodes) >= _MOST_NODES or self._nbytes + node.nbytes > _MOST_NBYTES:
            return False
        if any(self._opsets.get(domain, version) != version for domain, version in _opsets(node.model).items()):
            return False
        for parameter, buffer in node.operands:
            made = self._made.get(buffer)
            if parameter.kind is ParameterKind.OUTPUT and (made is not None or buffer in self._read):
                return False
            if made is not None and (made.dtype, made.shape) != (parameter.dtype, parameter.shape):
                return False
        self.tasks.append(node.task)
        self._take(node)
        return True

    def _take(self, node: _Node) -> None:
        self.nodes.append(node)
        self._nbytes += node.nbytes
        self._opsets |= _opsets(node.model)
        self._read |= node.buffers(ParameterKind.INPUT) - self._made.keys()
        self._made |= {buffer: p for p, buffer in node.operands if p.kind is ParameterKind.OUTPUT}


def _opsets(model: Model) -> dict[str, int]:
    return {opset.domain or "": opset.version or 0 for opset in model.opset_import}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """The kernel of a stretch, without the number of its module, and the buffer of each parameter."""

    module: Module
    symbol: str
    operands: tuple[tuple[Parameter, int], ...]


class _StretchModel:
    """The nodes of a stretch as one model.

    Names are canonical (i0, i1 ... for what it reads, o0, o1 ... for what it computes), so that equal stretches give
    equal bytes and are stored once.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[Parameter, int]] = {}
        self.initializers: dict[str, tuple[Parameter, int]] = {}
        self.made: dict[str, tuple[Parameter, int]] = {}
        self._order: list[str] = []
        """The names of inputs and initializers, as the nodes read them."""
        self._names: dict[object, str] = {}
        """Of values by buffer and type, and of embedded constants by value."""
        self._of_buffer: dict[int, str] = {}
        """The names of computed values."""
        self._nodes: list[Node] = []
        self._calls: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = []
        self._constants: list[TensorValue] = []
        self._declared: dict[str, Value] = {}
        self._opsets: dict[str, int] = {}
        self._ir_version = 0

    @property
    def key(self) -> _Key:
        """What tells the model from those of other stretches."""
        return tuple(self._calls)

    def add(self, node: _Node) -> None:
        """Add a node of a model of its own."""
        graph = node.model.graph
        assert graph is not None
        (call,) = graph.node
        bound = {parameter.name: (parameter, buffer) for parameter, buffer in node.operands}
        constants = {tensor.name: tensor for tensor in graph.initializer}
        values = {value.name: value for value in (*graph.input, *graph.output)}
        names = {"": ""}
        for name in dict.fromkeys(call.input):
            if name:
                names[name] = self._read(bound.get(name), constants.get(name), values.get(name))
        for name in call.output:
            if name:
                names[name] = made = f"o{len(self.made)}"
                self.made[made] = bound[name]
                self._of_buffer[bound[name][1]] = made
                self._declared[made] = replace(values[name], name=made)
        inputs, outputs = (tuple(names[name] for name in side) for side in (call.input, call.output))
        self._calls.append((id(node.model), inputs, outputs))
        self._nodes.append(replace(call, name=f"{LABEL}{len(self._nodes)}", input=inputs, output=outputs))
        self._opsets |= _opsets(node.model)
        self._ir_version = max(self._ir_version, node.model.ir_version or 0)

    def _read(self, bound: tuple[Parameter, int] | None, constant: TensorValue | None, value: Value | None) -> str:
        """Return the name of a value that a node reads: a parameter with its buffer, or else a constant."""
        key: object = constant and replace(constant, name=None)
        if bound is not None:
            parameter, buffer = bound
            if parameter.kind is ParameterKind.INPUT and buffer in self._of_buffer:
                return self._of_buffer[buffer]
            key = parameter.kind, buffer, parameter.dtype, parameter.shape
        if key in self._names:
            return self._names[key]
        name = self._names[key] = f"i{len(self._names)}"
        if bound is not None:
            self._order.append(name)
            (self.inputs if constant is None else self.initializers)[name] = bound
        if constant is not None:
            self._constants.append(replace(constant, name=name))
        if value is not None:
            self._declared[name] = replace(value, name=name)
        return name

    def model(self, inner: AbstractSet[str]) -> Model:
        """Return the model; the values ``inner`` are no outputs."""
        graph = onnx_model.Graph(
            node=tuple(self._nodes),
            name="stretch",
            initializer=tuple(self._constants),
            input=tuple(self._declared[name] for name in self.inputs),
            output=tuple(self._declared[name] for name in self.made if name not in inner),
            value_info=tuple(self._declared[name] for name in self.made if name in inner),
        )
        opsets = tuple(Opset(domain=domain or None, version=n) for domain, n in sorted(self._opsets.items()))
        return Model(ir_version=self._ir_version, graph=graph, opset_import=opsets)

    def module(self, inner: AbstractSet[str]) -> Module:
        """Return the module of the model; the values ``inner`` are no outputs."""
        code = onnx_model.write_model(self.model(inner))
        return Module(origin=origin(node.domain for node in self._nodes), code=memoryview(code))

    def kernel(self, inner: AbstractSet[str], module: Module) -> _Kernel:
        """Return the kernel of the module; the values ``inner`` are no parameters."""
        read = self.inputs | self.initializers
        operands = {name: read[name] for name in self._order}
        operands |= {name: bound for name, bound in self.made.items() if name not in inner}
        return _Kernel(
            module=module,
            symbol=onnx_rules.symbol(self._nodes),
            operands=tuple(
                (replace(parameter, name=name, offset=POINTER_NBYTES * position), buffer)
                for position, (name, (parameter, buffer)) in enumerate(operands.items())
            ),
        )


class _JoinedGraph:
    """The graph of stretches under construction, in which equal kernels are one."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._modules: dict[Module, int] = {}
        self._kernels: dict[Kernel, int] = {}
        self._ops: list[Op] = []
        self._tasks: list[Task] = []

    def add(self, index: int) -> None:
        """Add a task as it is."""
        task = self._graph.tasks[index]
        work = task.work
        if isinstance(work, KernelWork):
            kernel = self._graph.kernels[work.kernel]
            module = self._graph.modules[kernel.module]
            work = replace(work, kernel=self._number(module, kernel.symbol, kernel.parameters))
        self._tasks.append(replace(task, op=len(self._ops), work=work))
        self._ops += self._graph.ops[task.op : task.op + 1 + task.joined]

    def add_stretch(self, tasks: Sequence[int], kernel: _Kernel) -> None:
        """Add a task that runs several."""
        joined = [self._graph.tasks[index] for index in tasks]
        ops = [self._graph.ops[task.op] for task in joined]
        references: list[Reference] = []
        reads: list[Access] = []
        writes: list[Access] = []
        for parameter, buffer in kernel.operands:
            references.append(Reference(param_offset=parameter.offset, buffer=buffer, offset=0))
            accesses = writes if parameter.kind is ParameterKind.OUTPUT else reads
            accesses.append(Access(buffer=buffer, offset=0, nbytes=self._graph.buffers[buffer].nbytes))
        self._tasks.append(
            Task(
                op=len(self._ops),
                work=KernelWork(
                    kernel=self._number(kernel.module, kernel.symbol, tuple(p for p, _ in kernel.operands)),
                    params=bytes(POINTER_NBYTES * len(kernel.operands)),
                    references=tuple(references),
                ),
                reads=tuple(reads),
                writes=tuple(writes),
                duration_ns=sum(task.duration_ns for task in joined),
                joined=len(joined),
            )
        )
        self._ops += [Op(name=kernel.symbol, source=places.joined(op.source for op in ops)), *ops]

    def _number(self, module: Module, symbol: str, parameters: tuple[Parameter, ...]) -> int:
        number = self._modules.setdefault(module, len(self._modules))
        kernel = Kernel(module=number, symbol=symbol, parameters=parameters)
        return self._kernels.setdefault(kernel, len(self._kernels))

    def graph(self) -> Graph:
        """Return the finished graph."""
        return replace(
            self._graph,
            modules=tuple(self._modules),
            kernels=tuple(self._kernels),
            ops=tuple(self._ops),
            tasks=tuple(self._tasks),
        )
