"""`nimblec verify PLAN --against MODEL.onnx`: a plan beside ONNX Runtime, on the same random inputs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nimblec.base.difference import difference
from nimblec.base.errors import CompileError
from nimblec.base.options import InputSpec
from nimblec.cpu.branches import take_branches
from nimblec.cpu.ort_process import own_process
from nimblec.cpu.reference import read_nodes, run_feeds, run_values
from nimblec.inspect.node_values import NodeComparison, compare_nodes
from nimblec.inspect.verification import Check, Result, check_name
from nimblec.onnx_import import model_file, model_nodes, model_shapes
from nimblec.onnx_import.input_arrays import make_constant
from nimblert import golden
from nimblert.check.verify import read_plan
from nimblert.errors import PlanError
from nimblert.executable import Executable
from nimblert.loading import load
from nimblert.plan import Plan, Program
from nimblert.plan.external import filled
from nimblert.plan.signatures import Trust

if TYPE_CHECKING:
    from onnx import ModelProto

TOLERANCE = 1e-4
"""Of an output's largest magnitude: what the order of float32 sums accounts for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """The model to compare a plan with, and the settings; ``entry`` is needed where the plan has several.

    ``constants`` are the values of inputs that are constants in the plan.
    """

    model: Path
    constants: tuple[tuple[str, np.ndarray], ...] = ()
    entry: str | None = None
    tolerance: float = TOLERANCE
    per_node: bool = False
    seed: int = 0


def compare(path: Path, against: Against, trust: Trust | None = None, weights: Path | None = None) -> Iterator[Check]:
    """Compare each output of the plan in ``path`` with what ONNX Runtime computes without its optimiser.

    Raises PlanError if the plan cannot be of that model, DeviceMismatchError if it cannot run on this
    machine, CompileError if the model cannot be read or run, PlanSignatureError if no key of ``trust``
    has signed the plan.
    """
    plan = filled(read_plan(path, trust=trust), weights, copy=trust is not None)
    model = model_file.load(against.model, external_data=False)
    make_constant(model, against.constants)
    with own_process():
        for program in _of_entry(path, plan, against.entry):
            for problem in _misfits(program, model):
                raise PlanError(f"{path}: was not compiled from {against.model}: {problem}")
            with load(plan, program=program.name) as executable:
                yield from _compare(plan, executable, model, against)


def _of_entry(path: Path, plan: Plan, entry: str | None) -> tuple[Program, ...]:
    """Return the programs of an entry, or of the only one."""
    entries = plan.entries
    if entry is None and len(entries) == 1:
        (entry,) = entries
    if entry not in entries:
        what = "name the one of the model with --entry" if entry is None else f"none is called {entry!r}"
        raise PlanError(f"{path}: has the entries {_names(entries)}: {what}")
    return entries[entry]


def _compare(plan: Plan, executable: Executable, model: "ModelProto", against: Against) -> Iterator[Check]:
    program, folder = executable.program, against.model.parent
    specs = [InputSpec(name=t.name, shape=t.shape, dtype=t.dtype) for t in program.inputs]
    fixed = model_shapes.fix_shapes(model, specs)
    take_branches(fixed, folder)
    nodes = read_nodes(fixed)
    model_nodes.clear_repeated_names(fixed)
    inputs = golden.draw_inputs(program, against.seed)
    names = [value.name for value in fixed.graph.output]
    (wanted,) = run_feeds(fixed, folder, names, [inputs])
    if isinstance(wanted, str):
        raise CompileError(f"{against.model}: ONNX Runtime cannot run the model on random inputs: {wanted}")
    expected = dict(zip(names, wanted, strict=True))
    name = check_name("against", plan, program)
    failed = False
    for output, found in executable.run(inputs).items():
        check = _judge(name, output, expected[output], found, against.tolerance)
        failed = failed or check.result is Result.FAILED
        yield check
    if against.per_node:
        values = run_values(fixed, folder, inputs)
        compared = compare_nodes(executable, inputs, nodes, values, against.tolerance)
        differs = failed and compared.first is not None
        yield Check(
            name=check_name("nodes", plan, program),
            result=Result.FAILED if differs else Result.PASSED,
            sentences=tuple(_describe(compared, against.tolerance, failed=failed)),
        )


def _judge(name: str, output: str, expected: np.ndarray, found: np.ndarray, tolerance: float) -> Check:
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        sentence = f"is {_type(found)}, ONNX Runtime gives {_type(expected)}"
        return Check(name=name, result=Result.FAILED, sentences=(f"output {output!r}: {sentence}",))
    compared = difference(expected, found)
    allowed = "" if compared.absolute == 0 else ", must be equal" if compared.exact else f", {tolerance:.2g} allowed"
    return Check(
        name=name,
        result=Result.PASSED if compared.within(tolerance) else Result.FAILED,
        sentences=(f"output {output!r}: {compared}{allowed}",),
    )


def _describe(compared: NodeComparison, tolerance: float, *, failed: bool) -> Iterator[str]:
    first = compared.first
    if first is not None and not failed:
        yield (
            f"the outputs agree, though the plan holds another value {first.value!r} of {first.node}: "
            f"{first.difference} (command {first.command}, {first.op})"
        )
        return
    if first is not None:
        yield (
            f"the first node that differs is {first.node}: value {first.value!r}, {first.difference} "
            f"(command {first.command}, {first.op}); {compared.agreeing} of {compared.total} values agree before it"
        )
        return
    others = compared.total - compared.agreeing
    yield (
        f"{compared.agreeing} of {compared.total} values agree within {tolerance:.2g}, none differs; "
        f"the plan does not have the other {others} (fused, folded or padded)"
    )


def _misfits(program: Program, model: "ModelProto") -> Iterator[str]:
    """Yield the signs that a plan was not made from a model."""
    inputs = {tensor.name: tensor for tensor in model_file.inputs(model)}
    found = {tensor.name for tensor in program.inputs}
    if found != set(inputs):
        advice = ": give those that it has as constants by --constant" if found < set(inputs) else ""
        yield f"its inputs are {_names(t.name for t in program.inputs)}, the model's {_names(inputs)}{advice}"
        return
    for tensor in program.inputs:
        declared = inputs[tensor.name]
        shown = _shape(declared.shape)
        if tensor.dtype != declared.dtype:
            yield f"input {tensor.name!r} is {tensor.dtype} in the plan, {declared.dtype} in the model"
        elif not _fits(tensor.shape, declared.shape):
            yield f"input {tensor.name!r} has the shape {_shape(tensor.shape)} in the plan, {shown} in the model"
    outputs = [value.name for value in model.graph.output]
    if {tensor.name for tensor in program.outputs} != set(outputs):
        yield f"its outputs are {_names(t.name for t in program.outputs)}, the model's {_names(outputs)}"


def _fits(shape: tuple[int, ...], declared: tuple[int | None, ...] | None) -> bool:
    if declared is None:
        return True
    return len(shape) == len(declared) and all(d in (None, n) for n, d in zip(shape, declared, strict=True))


def _shape(shape: tuple[int | None, ...] | None) -> str:
    if shape is None:
        return "of any rank"
    return "x".join("?" if n is None else str(n) for n in shape) or "scalar"


def _type(array: np.ndarray) -> str:
    return f"{array.dtype} {_shape(array.shape)}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
