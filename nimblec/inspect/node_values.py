"""Find the first ONNX node whose value differs between a plan and ONNX Runtime.

A plan need not hold every value: nodes are fused, folded, and laid out differently. The result of a
command counts as a node's value if the command names that node as its source and wrote as many bytes.
The numbers may be in another order (a layout), or be the value of a later node (a fusion); the node
differs only if they are neither.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from nimblec.base.difference import Difference, difference, same_numbers
from nimblec.cpu.reference import Node
from nimblert.executable import Executable
from nimblert.plan import Access, Launch, ParameterKind, Plan, Program, Target, Work
from nimblert.plan.pieces import writes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDifference:
    """A node whose value differs, and the command that wrote it (its index among launches, copies and fills)."""

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
    """Run a plan command by command, and compare what each wrote with the outputs of ``nodes``.

    ``values`` are ONNX Runtime's by name; ``tolerance`` is relative to a value's largest magnitude.
    """
    plan, program = executable.plan, executable.program
    model = _Model(plan.target, nodes, values)
    last = _last_writes(program)
    agreeing = 0
    with closing(executable.steps(inputs)) as steps:
        for index, command in enumerate(steps):
            op = program.ops[command.op]
            node = model.by_source.get(op.source)
            for name in node.makes if node else ():
                value = values.get(name)
                if value is None or last.get((op.source, value.nbytes)) != index:
                    continue
                found = [
                    executable.read(access.pointer, access.nbytes).view(value.dtype).reshape(value.shape)
                    for access, dtype in _written(plan, command)
                    if access.nbytes == value.nbytes and dtype in ("", value.dtype.name)
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
        """Whether ``found`` is a value computed from the value ``name``."""
        candidates = (self._values[other] for other in self._made_of(name) if other in self._values)
        return any(
            same_numbers(value, found, tolerance)
            for value in candidates
            if (value.dtype, value.nbytes) == (found.dtype, found.nbytes)
        )

    def _made_of(self, name: str) -> Iterator[str]:
        """Every value computed from a value, the nearest first."""
        seen, waiting = {name}, deque([name])
        while waiting:
            for node in self._readers.get(waiting.popleft(), ()):
                for made in node.makes:
                    if made not in seen:
                        seen.add(made)
                        waiting.append(made)
                        yield made


def _sources(target: Target, node: Node) -> tuple[str, ...]:
    """The sources that a plan gives the commands of a node."""
    if target is Target.CUDA:
        return (node.description,)
    # A node that ONNX Runtime lays out in blocks loses its name, and its values get this ending.
    return (node.name, *(f"{name}_nchwc" for name in node.makes))


def _last_writes(program: Program) -> dict[tuple[str, int], int]:
    """The last command that writes a number of bytes for a source: an op writes its result after its scratch."""
    return {
        (program.ops[work.op].source, access.nbytes): index
        for index, (_, work) in enumerate(program.work)
        for access in writes(work)
    }


def _written(plan: Plan, command: Work) -> Iterator[tuple[Access, str]]:
    """The writes of a command, each with its dtype if the plan has it (on the CPU), else ""."""
    accesses = writes(command)
    if isinstance(command, Launch):
        outputs = [p for p in plan.kernels[command.kernel].parameters if p.kind is ParameterKind.OUTPUT]
        if len(outputs) == len(accesses):
            yield from zip(accesses, (p.dtype for p in outputs), strict=True)
            return
    yield from ((access, "") for access in accesses)
