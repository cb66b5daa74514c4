"""Find the first ONNX node whose value differs between a plan and ONNX Runtime.

A plan need not hold every value. The result of an op counts as a node's value if the op names that node as its source
and has as many bytes; the node differs only if the result is neither the value in another layout nor the value of a
later, fused node. For values inside a CPU launch, its model is run once more with these values as outputs.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from nimblec.base.difference import Difference, difference, same_numbers
from nimblec.cpu.reference import Node
from nimblec.inspect.parts import NodeResult, model_of, parts_of
from nimblert.arrays.layouts import numpy_dtype
from nimblert.cpu import onnx_session
from nimblert.executable import Executable
from nimblert.plan import ITEM_NBYTES, Launch, ParameterKind, Target, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDifference:
    """A node whose value differs, and the command that computed it (its index among launches, copies and fills)."""

    node: str
    value: str
    command: int
    op: str
    difference: Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeComparison:
    """How many of the ``total`` values agree before the first that differs, which is None if none does."""

    total: int
    agreeing: int
    first: NodeDifference | None


def compare_nodes(
    executable: Executable,
    inputs: Mapping[str, np.ndarray],
    nodes: Sequence[Node],
    values: Mapping[str, np.ndarray],
    tolerance: float,
) -> NodeComparison:
    """Run a plan command by command, and compare what each computed with the outputs of ``nodes``.

    ``values`` are ONNX Runtime's by name; ``tolerance`` is relative to a value's largest magnitude.
    """
    plan, program = executable.plan, executable.program
    model = _Model(plan.target, nodes, values)
    parts = [parts_of(plan, work) for _, work in program.work]
    # An op writes its result after its scratch memory.
    last = {
        (program.ops[part.op].source, result.nbytes): (index, part.op)
        for index, of_command in enumerate(parts)
        for part in of_command
        for result in part.results
    }
    agreeing = 0
    with closing(executable.steps(inputs)) as steps:
        for index, command in enumerate(steps):
            held = _Held(executable, command)
            for part in parts[index]:
                op = program.ops[part.op]
                node = model.by_source.get(op.source)
                for name in node.makes if node else ():
                    value = values.get(name)
                    if value is None or last.get((op.source, value.nbytes)) != (index, part.op):
                        continue
                    found = [
                        held.read(result).view(value.dtype).reshape(value.shape)
                        for result in part.results
                        if result.nbytes == value.nbytes and result.dtype in ("", value.dtype.name)
                    ]
                    if any(same_numbers(value, array, tolerance) for array in found):
                        agreeing += 1
                    elif found and not any(model.is_made_of(name, array, tolerance) for array in found):
                        assert node is not None
                        first = NodeDifference(
                            node=node.description,
                            value=name,
                            command=index,
                            op=op.name,
                            difference=min((difference(value, array) for array in found), key=lambda d: d.relative),
                        )
                        return NodeComparison(total=len(values), agreeing=agreeing, first=first)
    return NodeComparison(total=len(values), agreeing=agreeing, first=None)


class _Model:
    """The nodes by their source in a plan, and the values computed from a value."""

    def __init__(self, target: Target, nodes: Sequence[Node], values: Mapping[str, np.ndarray]) -> None:
        sources = [(source, node) for node in nodes for source in _sources(target, node)]
        times = Counter(source for source, _ in sources)
        self.by_source = {source: node for source, node in sources if times[source] == 1}
        self._values = values
        self._readers: dict[str, list[Node]] = {}
        for node in nodes:
            for name in dict.fromkeys(node.reads):
                self._readers.setdefault(name, []).append(node)

    def is_made_of(self, name: str, found: np.ndarray, tolerance: float) -> bool:
        """Return whether ``found`` is a value computed from the value ``name``."""
        candidates = (self._values[other] for other in self._made_of(name) if other in self._values)
        return any(
            same_numbers(value, found, tolerance)
            for value in candidates
            if (value.dtype, value.nbytes) == (found.dtype, found.nbytes)
        )

    def _made_of(self, name: str) -> Iterator[str]:
        """Yield every value computed from a value, the nearest first."""
        seen, waiting = {name}, deque([name])
        while waiting:
            for node in self._readers.get(waiting.popleft(), ()):
                for made in node.makes:
                    if made not in seen:
                        seen.add(made)
                        waiting.append(made)
                        yield made


def _sources(target: Target, node: Node) -> tuple[str, ...]:
    """Return the sources that a plan gives the commands of a node."""
    if target is Target.CUDA:
        return (node.description,)
    # A node that ONNX Runtime lays out in blocks loses its name, and its values get this ending.
    return (node.name, *(f"{name}_nchwc" for name in node.makes))


class _Held:
    """What a command has computed, when it is done: in memory of the plan, or by a run of its model once more."""

    def __init__(self, executable: Executable, command: Work) -> None:
        self._executable = executable
        self._command = command

    def read(self, result: NodeResult) -> np.ndarray:
        """Return the bytes of a value."""
        if result.pointer is not None:
            return self._executable.read(result.pointer, result.nbytes)
        return np.ascontiguousarray(self._inner[result.name].numpy()).reshape(-1).view(np.uint8)

    @cached_property
    def _inner(self) -> Mapping[str, Any]:
        """The values that the nodes of a launch compute, by name: no launch of several overwrites what it reads."""
        assert isinstance(self._command, Launch)
        plan = self._executable.plan
        pointers = {relocation.param_offset: relocation.pointer for relocation in self._command.relocations}
        given: dict[ParameterKind, dict[str, Any]] = {kind: {} for kind in ParameterKind}
        for parameter in plan.kernels[self._command.kernel].parameters:
            if parameter.kind is not ParameterKind.OUTPUT:
                nbytes = prod(parameter.shape) * ITEM_NBYTES[parameter.dtype]
                data = self._executable.read(pointers[parameter.offset], nbytes)
                array = data.view(numpy_dtype(parameter.dtype)).reshape(parameter.shape)
                given[parameter.kind][parameter.name] = onnx_session.ort_value(array, parameter.dtype)
        code = onnx_session.exposed(model_of(plan, self._command))
        session = onnx_session.open_session(code, given[ParameterKind.INITIALIZER])
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run_with_ort_values(None, given[ParameterKind.INPUT]), strict=True))
