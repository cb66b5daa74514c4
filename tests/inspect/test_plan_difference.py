"""The difference of two plans names what was changed, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from parsed_models import compiled, normal, parse
from plans import cuda_plan, several_entries, weight

from nimblec.inspect.plan_difference import Change, compare
from nimblec.plan import encoder
from nimblert.check.verify import read_plan
from nimblert.plan import GoldenOutput, Module, Op, Plan, Program

WEIGHT = normal(8, 8, seed=1)


def stored(plan: Plan) -> Plan:
    """Return the plan as its file holds it."""
    return read_plan(encoder.encode_file(plan))


def found(before: Plan, after: Plan) -> list[Change]:
    """Return every change but those of bytes, which follow from the others."""
    return [change for change in compare(before, after).changes if change.section != "memory"]


@cache
def cpu(operator: str = "Tanh", rows: int = 4, output: str = "y", change: float = 0.0) -> Plan:
    """Return the plan of an ONNX model, compiled for the CPU."""
    text = f"(float[{rows}, 8] x) => (float[{rows}, 8] {output}) {{ a = MatMul (x, w) {output} = {operator} (a) }}"
    changed = WEIGHT.copy()
    changed[2, 3] += change
    return stored(compiled(parse(text, w=changed)))


def with_command(program: Program, index: int, **fields: Any) -> Program:
    commands = [*program.commands]
    commands[index] = replace(commands[index], **fields)
    return replace(program, commands=tuple(commands))


def cuda(**fields: Any) -> Plan:
    """Return `cuda_plan` with other fields in its program."""
    plan = cuda_plan()
    return stored(replace(plan, programs=(replace(plan.programs[0], **fields),)))


def cuda_with_weight() -> Plan:
    golden = replace(cuda_plan().programs[0].golden, outputs=(GoldenOutput(sha256=bytes(32), samples=(0.5, -1.0)),))
    weights = (weight("scale", (1.0, 2.0, 3.5, 4.0), 0), cuda_plan().weights[1])
    return stored(replace(cuda(golden=golden), weights=weights))


def cuda_with_kernel() -> Plan:
    plan = cuda_plan()
    kernels = (*plan.kernels[:2], replace(plan.kernels[2], symbol="tanh"))
    ops = (*plan.programs[0].ops, Op(name="aten.tanh.default", source="model.relu"))
    program = with_command(replace(plan.programs[0], ops=ops), 8, op=3)
    return stored(replace(plan, kernels=kernels, programs=(program,)))


def cuda_with_size() -> Plan:
    (x,) = cuda_plan().programs[0].inputs
    return cuda(inputs=(replace(x, shape=(2, 4)),))


def cuda_with_name() -> Plan:
    (y,) = cuda_plan().programs[0].outputs
    return cuda(outputs=(replace(y, name="z"),))


def said(change: Change) -> str:
    """Return a change in words, without the figures of outputs, which depend on the machine."""
    what = f"{change.section}: {change.what}"
    return what if change.section == "numerics" else f"{what}: {change.note or f'{change.before} -> {change.after}'}"


CASES: dict[str, tuple[Callable[[], Plan], Callable[[], Plan], set[str]]] = {
    "cuda weight": (
        cuda,
        cuda_with_weight,
        {"weights: scale: values differ by up to 0.5, read by model.scale", "numerics: output 'y'"},
    ),
    "cuda kernel": (
        cuda,
        cuda_with_kernel,
        {
            "ops: aten.relu.default: 2 -> 1",
            "ops: aten.tanh.default: None -> 1",
            "kernels: relu (triton): gone",
            "kernels: tanh (triton): added",
        },
    ),
    "cuda size": (cuda, cuda_with_size, {"interface: input 0: x: float32 4x4 -> x: float32 2x4"}),
    "cuda name": (cuda, cuda_with_name, {"interface: output 0: y: float32 4x4 -> z: float32 4x4"}),
    "cpu weight": (
        cpu,
        lambda: cpu(change=0.25),
        {"weights: w: values differ by up to 0.25, read by a", "numerics: output 'y'"},
    ),
    "cpu kernel": (
        cpu,
        lambda: cpu("Erf"),
        {
            "ops: Tanh: 1 -> None",
            "ops: Erf: None -> 1",
            "kernels: MatMul to Tanh (2 ops) (onnxruntime): gone",
            "kernels: MatMul to Erf (2 ops) (onnxruntime): added",
            "numerics: output 'y'",
        },
    ),
    "cpu size": (
        cpu,
        lambda: cpu(rows=6),
        {
            "interface: input 0: x: float32 4x8 -> x: float32 6x8",
            "interface: output 0: y: float32 4x8 -> y: float32 6x8",
            "kernels: MatMul to Tanh (2 ops) (onnxruntime): other code in 1 launch",
            "schedule: commands: 1 with another stream, other places or sizes in memory, or other parameters",
        },
    ),
    "cpu name": (cpu, lambda: cpu(output="z"), {"interface: output 0: y: float32 4x8 -> z: float32 4x8"}),
}


@pytest.mark.parametrize("case", CASES)
def test_difference_is_what_was_changed(case: str) -> None:
    before, after, expected = CASES[case]
    assert {said(change) for change in found(before(), after())} == expected


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (
            lambda p: replace(p, programs=(with_command(p.programs[0], 6, grid=(16, 2, 1)),)),
            "another tiling (grid 32x2x1 to 16x2x1)",
        ),
        (
            lambda p: replace(p, programs=(with_command(p.programs[0], 6, dynamic_smem_nbytes=8),)),
            "another tiling (smem 4096 to 8)",
        ),
        (lambda p: replace(p, modules=(Module(origin="aten", code=memoryview(bytes(64))), p.modules[1])), "other code"),
    ],
)
def test_kernel_of_one_symbol_has_another_tiling(change: Callable[[Plan], Plan], note: str) -> None:
    changes = {c.what: c for c in found(cuda(), stored(change(cuda_plan())))}
    assert changes["_Z3addPfS_ (aten)"].note == f"{note} in 1 launch of model.relu"
    assert {c.section for c in changes.values()} == {"kernels"}


def test_body_of_a_loop_counts() -> None:
    text = """(int64 n, float[4] x) => (float[4] y) {
        y = Loop (n, , x) <body = body (int64 i, bool c, float[4] v) => (bool go, float[4] w) {
            go = Identity (c)
            w = OPERATOR (v)
        }>
    }"""
    tanh, erf = (stored(compiled(parse(text.replace("OPERATOR", operator)))) for operator in ("Tanh", "Erf"))
    assert {said(change) for change in found(tanh, erf)} == {
        "ops: Tanh: 1 -> None",
        "ops: Erf: None -> 1",
        "kernels: Identity to And (5 ops) (onnxruntime): other code in 1 launch",
        "numerics: output 'y'",
    }
    assert not found(tanh, stored(tanh))


def test_programs_that_were_added_are_named_with_their_sizes() -> None:
    changes = {(c.program, c.what): c.after for c in found(cuda(profile=(("batch", 4),)), stored(several_entries()))}
    assert changes["main[batch=2]", "sizes"] == "batch=2 (exact)"
    assert changes["tail", "entry"] == "tail"


def test_what_has_no_row_is_a_difference_too() -> None:
    ops = (Op(name="aten.mul.Tensor", source="model.other"), *cuda_plan().programs[0].ops[1:])
    (change,) = compare(cuda(), cuda(ops=ops)).changes
    assert (change.section, change.what) == ("made", "bytes")


def test_nan_in_one_weight_is_infinitely_far() -> None:
    weights = (weight("scale", (1.0, float("nan"), 3.0, 4.0), 0), cuda_plan().weights[1])
    (change,) = found(cuda(), stored(replace(cuda_plan(), weights=weights)))
    assert change.largest == float("inf")
