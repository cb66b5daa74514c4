"""Plans that would read or write memory outside of a region, each refused by the rule that it attacks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hostile_plans import node_plan, placed, refusal, with_program
from onnx import NodeProto, helper

from fuzz import wrapped
from nimblert.check import verify
from nimblert.plan import Memset, Plan, Pointer, Region

node = helper.make_node
Shape = tuple[int, ...]


def disguised(call: NodeProto, model: Sequence[Any], claimed: Sequence[Any], output: Shape, kind: str) -> Plan:
    """Return a plan that says of the operands of a node what is ``claimed``, while its model says what it needs.

    Operands are pairs of dtype and shape. All parts of the plan but the model agree.
    """
    said, needed = (
        node_plan(
            *(np.ones(shape, dtype) for dtype, shape in operands), call=call, outputs=[("float32", output)], kind=kind
        )
        for operands in (claimed, model)
    )
    return replace(said, modules=needed.modules)


DTYPES = [("float32", "float64"), ("float32", "uint8"), ("float32", "int64")]
CALLS: list[tuple[NodeProto, Shape]] = [
    (node("Identity", ["w"], ["y"]), (64, 64)),
    (node("Transpose", ["w"], ["y"], perm=[1, 0]), (64, 64)),
    (node("Concat", ["w", "w"], ["y"], axis=0), (128, 64)),
    (node("Flatten", ["w"], ["y"], axis=1), (64, 64)),
    (node("Relu", ["w"], ["y"]), (64, 64)),
]


@pytest.mark.parametrize("kind", ["external", "input"])
@pytest.mark.parametrize(("needed", "claimed"), DTYPES, ids=str)
@pytest.mark.parametrize(("call", "output"), CALLS, ids=lambda value: getattr(value, "op_type", ""))
def test_verify_refuses_foreign_dtype(call: NodeProto, output: Shape, needed: str, claimed: str, kind: str) -> None:
    """ONNX Runtime takes the memory for what the model says: it reads or writes past the region."""
    plan = disguised(call, [(needed, (64, 64))], [(claimed, (64, 64))], output, kind)
    what = "initializers" if kind == "external" else "inputs"
    assert refusal(plan).startswith(f"kernels[0].parameters: [('w', '{claimed}', (64, 64))] are {what}, those of")


def floats(*shapes: Shape) -> list[tuple[str, Shape]]:
    return [("float32", shape) for shape in shapes]


SMALLER: list[tuple[NodeProto, list[Any], list[Any], Shape]] = [
    (node("Identity", ["w"], ["y"]), floats((4096,)), floats((4,)), (4096,)),
    (node("Identity", ["w"], ["y"]), floats((4,)), floats((4096,)), (4,)),
    (
        node("Conv", ["x", "w", "b"], ["y"]),
        floats((1, 1, 1, 1), (512, 1, 1, 1), (512,)),
        floats((1, 1, 1, 1), (512, 1, 1, 1), (1,)),
        (1, 512, 1, 1),
    ),
    (
        node("Conv", ["x", "w"], ["y"]),
        floats((1, 64, 8, 8), (512, 64, 3, 3)),
        floats((1, 64, 8, 8), (1, 1, 3, 3)),
        (1, 512, 6, 6),
    ),
    (
        node("BatchNormalization", ["x", "a", "b", "c", "d"], ["y"]),
        floats((1, 512, 1, 1), *[(512,)] * 4),
        floats((1, 512, 1, 1), *[(1,)] * 4),
        (1, 512, 1, 1),
    ),
    (node("LayerNormalization", ["x", "a"], ["y"], axis=1), floats((1, 512), (512,)), floats((1, 512), (1,)), (1, 512)),
    (
        node("Gemm", ["x", "w", "b"], ["y"]),
        floats((1, 64), (64, 512), (512,)),
        floats((1, 64), (64, 512), (3,)),
        (1, 512),
    ),
    (node("MatMul", ["x", "w"], ["y"]), floats((1, 64), (64, 512)), floats((1, 64), (64, 1)), (1, 512)),
    (node("PRelu", ["x", "w"], ["y"]), floats((512,), (512,)), floats((512,), (3,)), (512,)),
    (
        node("InstanceNormalization", ["x", "a", "b"], ["y"]),
        floats((1, 512, 2), (512,), (512,)),
        floats((1, 512, 2), (1,), (1,)),
        (1, 512, 2),
    ),
    *(
        (
            node(operator, ["x", "w", "r"], ["y"], hidden_size=32),
            floats((2, 1, 64), (1, gates * 32, 64), (1, gates * 32, 32)),
            floats((2, 1, 64), (1, 1, 1), (1, 1, 1)),
            (2, 1, 1, 32),
        )
        for operator, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
    ),
]


@pytest.mark.parametrize("kind", ["external", "input"])
@pytest.mark.parametrize(("call", "needed", "claimed", "output"), SMALLER, ids=[case[0].op_type for case in SMALLER])
def test_verify_refuses_foreign_shape(call: NodeProto, needed: Any, claimed: Any, output: Shape, kind: str) -> None:
    what = "initializers" if kind == "external" else "inputs"
    found = refusal(disguised(call, needed, claimed, output, kind)).split("; ")
    assert found[0].startswith("kernels[0].parameters: ")
    assert f" are {what}, those of the model " in found[0]


@pytest.mark.parametrize("value", [100, 3000, 1 << 40])
def test_verify_refuses_output_over_its_indices(value: int) -> None:
    """Gather would write numbers over indices that it has checked and not yet used."""
    call = node("Gather", ["w", "i"], ["y"])
    w, i = np.full(4, value), np.zeros(64, np.int64)
    plan = node_plan(w, i, call=call, outputs=[("int64", (64,))], kind="input")
    w_at, *_ = (relocation.pointer for relocation in plan.programs[0].commands[0].relocations)
    i_at, y_at = (Pointer(region=Region.ARENA, offset=offset) for offset in (0, 8))
    fill = Memset(stream=0, op=0, dst=i_at, value=0, element_nbytes=4, count=130)
    over = with_program(plan, commands=(fill, placed(plan, [w_at, i_at, y_at])), arena_nbytes=1024, outputs=())
    assert refusal(over) == (
        "programs[0].commands[1].relocations: ARENA(0) is written from 8 to 512, and used otherwise too"
    )


def test_verify_refuses_output_over_end_of_long_operand() -> None:
    """A shorter operand lies between the start of the long one and the output."""
    x, mask = np.ones((4, 8), np.float32), np.ones((4, 8), bool)
    call = node("Where", ["m", "x", "z"], ["y"])
    plan = node_plan(mask, x, np.ones(1, np.float32), call=call, outputs=[("float32", (4, 8))], kind="input")
    m_at, x_at, z_at, y_at = (Pointer(region=Region.ARENA, offset=offset) for offset in (512, 0, 8, 96))
    fill = Memset(stream=0, op=0, dst=x_at, value=0, element_nbytes=4, count=256)
    over = with_program(plan, commands=(fill, placed(plan, [m_at, x_at, z_at, y_at])), arena_nbytes=1024, outputs=())
    assert refusal(over) == (
        "programs[0].commands[1].relocations: ARENA(0) is written from 96 to 128, and used otherwise too"
    )


@pytest.mark.parametrize("attribute", ["scan_input_axes", "scan_output_axes"])
def test_verify_refuses_axes_of_a_scan_in_a_body(attribute: str) -> None:
    """Its sizes are not known there, and the kernel divides by one of them."""

    def nested(axis: int) -> Plan:
        call = onnx.parser.parse_node(
            f"""y = If (c) <
            then_branch = yes () => (float[2,2] p) {{
                p = Scan <num_scan_inputs = 1, {attribute} = [{axis}],
                          body = step (float[2] r) => (float[2] t) {{ t = Neg (r) }}> (x)
            }}, else_branch = no () => (float[2,2] q) {{ q = Neg (x) }}>"""
        )
        arrays = {"c": np.array(True), "x": np.ones((2, 2), np.float32)}
        outputs = [wrapped.output(0, "y", "float32", (2, 2))]
        return wrapped.plan_of(call, 18, arrays, dict.fromkeys(arrays, "input"), outputs)

    assert list(verify.problems(nested(0))) == []
    assert refusal(nested(1)) == (
        "kernels[0].Scan: is in the body of a loop or branch, where its sizes are not known before a run"
    )
