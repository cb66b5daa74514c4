"""The rules of a CPU plan: the models that ONNX Runtime may be given, and the bytes that it accesses.

On this target a kernel's parameters are whole tensors, so the relocations of a launch determine the bytes that it reads
and writes. The accesses that the plan declares must be the same.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

from nimblert.check import onnx_operators, onnx_rules
from nimblert.check.bounds import Sizes, array_problems, extent_problems, under
from nimblert.check.onnx_model import Node, read_model
from nimblert.check.protobuf import Budget
from nimblert.errors import PlanFormatError
from nimblert.plan import Kernel, Launch, Module, Parameter, ParameterKind, Plan, Region
from nimblert.plan.records import DEFAULT_LIMITS, Limits, dense_nbytes

Place = tuple[Region, int, int, int]
"""Bytes of a region: region, index, offset, bytes."""


def kernels_problems(plan: Plan, limits: Limits) -> Iterator[str]:
    """Yield a sentence for each rule that the kernels of ``plan`` and their models break."""
    budget = Budget(limits.model_fields)
    first: dict[int, int] = {}
    for i, kernel in enumerate(plan.kernels):
        path = f"kernels[{i}]"
        sound = True
        for sentence in under(path, _parameters_problems(kernel.parameters, limits)):
            sound = False
            yield sentence
        if first.setdefault(kernel.module, i) != i:
            yield f"{path}.module: {kernel.module} is the code of kernels[{first[kernel.module]}]"
        elif sound and 0 <= kernel.module < len(plan.modules):
            yield from under(path, onnx_rules.problems(kernel, plan.modules[kernel.module], budget, limits))


def _parameters_problems(parameters: Sequence[Parameter], limits: Limits) -> Iterator[str]:
    if len({parameter.name for parameter in parameters}) != len(parameters):
        yield "parameters: two have the same name"
    for i, parameter in enumerate(parameters):
        yield from under(f"parameters[{i}]", _parameter_problems(i, parameter, limits))


def _parameter_problems(position: int, parameter: Parameter, limits: Limits) -> Iterator[str]:
    """Require parameters to be pointers, side by side."""
    if parameter.kind == ParameterKind.VALUE:
        yield "kind: VALUE, expected a pointer on the CPU target"
    if (parameter.offset, parameter.nbytes) != (8 * position, 8):
        yield f"offset: {parameter.nbytes} bytes at {parameter.offset}, expected 8 at {8 * position}"
    if not parameter.name:
        yield "name: is empty"
    yield from array_problems(parameter.dtype, parameter.shape, limits.tensor_nbytes)


class Nodes(dict[int, Node | None]):
    """The only node of a module's model, by the module's index; None where it has not one; read on demand."""

    def __init__(self, modules: Sequence[Module]) -> None:
        super().__init__()
        self._modules = modules

    def __missing__(self, module: int) -> Node | None:
        graph = None
        if 0 <= module < len(self._modules):
            with suppress(PlanFormatError):
                graph = read_model(bytes(self._modules[module].code), Budget(DEFAULT_LIMITS.model_fields)).graph
        found = self[module] = graph.node[0] if graph is not None and len(graph.node) == 1 else None
        return found


def launch_problems(launch: Launch, kernel: Kernel, nodes: Nodes, sizes: Sizes, *, refits: bool) -> Iterator[str]:
    """Yield a sentence for each rule that a launch breaks: each relocation is for one parameter, a whole tensor.

    ``nodes`` are those of the plan's modules; ``refits``: whether the launch may write weights.
    """
    constant = (Region.INPUT,) if refits else (Region.WEIGHTS, Region.INPUT)
    parameters = kernel.parameters
    offsets = [relocation.param_offset for relocation in launch.relocations]
    if len(offsets) != len(parameters) or offsets != [parameter.offset for parameter in parameters]:
        yield f"relocations: expected one for each of {len(parameters)} parameters, in order"
        return
    reads: list[Place] = []
    writes: list[Place] = []
    for i, (relocation, parameter) in enumerate(zip(launch.relocations, parameters, strict=True)):
        path, pointer = f"relocations[{i}].pointer", relocation.pointer
        nbytes = dense_nbytes(parameter.dtype, parameter.shape)
        yield from extent_problems(path, pointer, nbytes, sizes)
        in_weights = pointer.region == Region.WEIGHTS
        if parameter.kind == ParameterKind.INITIALIZER and not in_weights:
            yield f"{path}: an initializer in {pointer.region.name}, expected WEIGHTS"
        if parameter.kind == ParameterKind.OUTPUT and pointer.region in constant:
            yield f"{path}: an output in {pointer.region.name}, which a run does not change"
        if nbytes:
            accessed = writes if parameter.kind == ParameterKind.OUTPUT else reads
            accessed.append((pointer.region, pointer.index, pointer.offset, nbytes))
    for what, declared, found in (("reads", launch.reads, reads), ("writes", launch.writes, writes)):
        places = {(a.pointer.region, a.pointer.index, a.pointer.offset, a.nbytes) for a in declared if a.nbytes}
        if places != set(found):
            yield f"{what}: are not what the relocations point to"
    yield from _overlap_problems(set(reads) - _overwritten(launch, kernel, nodes), writes)


def _overwritten(launch: Launch, kernel: Kernel, nodes: Nodes) -> set[Place]:
    """Return the operands that a launch may overwrite: their bytes, dtype and shape are its output's."""
    if kernel.symbol not in onnx_operators.IN_PLACE or len(kernel.parameters) > 4:  # three operands and the output
        return set()
    bound = [
        (parameter, (pointer.region, pointer.index, pointer.offset, dense_nbytes(parameter.dtype, parameter.shape)))
        for parameter, pointer in zip(kernel.parameters, (r.pointer for r in launch.relocations), strict=True)
    ]
    for output, place in bound:
        if output.kind != ParameterKind.OUTPUT:
            continue
        there = [parameter for parameter, other in bound if other == place and parameter is not output]
        if there and all((p.dtype, p.shape) == (output.dtype, output.shape) for p in there):
            node = nodes[kernel.module]
            is_allowed = node is not None and all(onnx_operators.may_overlap(node, p.name) for p in there)
            return {place} if is_allowed else set()
    return set()


def _overlap_problems(reads: Collection[Place], writes: Collection[Place]) -> Iterator[str]:
    """Yield a sentence for each write that overlaps another access of its launch: kernels read while they write."""
    # The end of the last bytes so far, for reads and for writes.
    ends: dict[bool, tuple[Region, int, int]] = {}
    for (region, index, start, nbytes), written in sorted([(p, False) for p in reads] + [(p, True) for p in writes]):
        for other, (*place, end) in ends.items():
            if (other or written) and place == [region, index] and start < end:
                yield f"relocations: {region.name}({index}) is written from {start} to {end}, and used otherwise too"
        ends[written] = max(ends.get(written, (region, 0, 0)), (region, index, start + nbytes))
