"""Integers that a division by -1 does not fit: ONNX Runtime ends the process by SIGFPE."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from cpu_plans import plan_file, write_model
from hostile_plans import outcomes, refusal
from onnx import TensorProto, helper

import nimblert
from fuzz import wrapped
from nimblert.check import division, onnx_trust, verify
from nimblert.errors import InputError
from nimblert.plan import Plan

node = helper.make_node
LEAST = {"int32": -(2**31), "int64": -(2**63)}


def divided(operator: str, dtype: str, kinds: tuple[str, str]) -> Plan:
    """Return the plan of a node that divides the least integers of a dtype by -1; operands are passed as ``kinds``."""
    arrays = {"a": np.full(4, LEAST[dtype], dtype), "b": np.full(4, -1, dtype)}
    call = node(operator, ["a", "b"], ["y"], domain="", overload="")
    return wrapped.plan_of(call, 18, arrays, dict(zip("ab", kinds, strict=True)), [wrapped.output(0, "y", dtype, (4,))])


def test_run_fails_where_a_division_overflows(tmp_path: Path) -> None:
    hostile = [divided(*case) for case in product(("Div", "Mod"), LEAST, product(wrapped.KINDS, repeat=2))]
    assert outcomes(tmp_path, hostile) == {"fails": len(hostile)}


@pytest.mark.parametrize("threads", [1, 2])
def test_run_names_a_division_that_overflows(tmp_path: Path, threads: int) -> None:
    """Only an element that is both the least and divided by -1 fails the run."""
    path = write_model(
        tmp_path / "m.onnx",
        [node("Neg", ["d"], ["a"]), node("Div", ["x", "a"], ["b"], name="part"), node("Neg", ["b"], ["y"])],
        [("x", TensorProto.INT64, (2, 1)), ("d", TensorProto.INT64, (2,))],
        [("y", TensorProto.INT64, (2, 2))],
    )
    least = LEAST["int64"]
    with nimblert.load(plan_file(path), threads=threads) as model:
        for run in (model.run, lambda arrays: list(model.steps(arrays))):
            with pytest.raises(
                InputError, match=rf"^op Div \(part\): failed on these inputs: {least} is divided by -1"
            ):
                run({"x": np.array([[7], [least]]), "d": np.array([2, 1])})
        assert model.run({"x": np.array([[7], [least + 1]]), "d": np.array([2, 1])})["y"].tolist() == [
            [3, 7],
            [least // 2 + 1, least + 1],
        ]


def branches(dtype: str, yes: str, no: str, constants: str = "") -> str:
    """Return the text of an If whose branches return p and q; ``constants`` are those of the first."""
    first = f"then_branch = yes () => ({dtype}[1] p) {constants} {{ {yes} }}"
    return f"If (go) <{first}, else_branch = no () => ({dtype}[1] q) {{ {no} }}>"


IN_BODIES = [
    ("b = Div (v, v)", None, False),
    ("b = Mod (v, v)", None, False),
    ("b = Div (v, w)", None, False),
    ("b = Div (i, v)", None, False),
    ("b = Div (v, d)", [2], True),
    ("b = Mod (v, d)", [2, 3], True),
    ("b = Div (d, v)", [2], True),
    ("b = Div (v, d)", [2, -1], False),
    ("b = Div (d, v)", [2, LEAST["int64"]], False),
    ("b = Div (x, d)", np.float32([-1]), True),
    ("f = Cast <to = 1> (v)  b = Div (f, f)", None, True),
    ("f = Cast <to = 7> (x)  b = Div (f, f)", None, False),
    ("b = Div (x, x)", None, True),
    ("f = Exp (x)  g = Where (go, f, f)  h = Concat <axis = 0> (g, f)  b = Div (h, x)", None, True),
    ("g = Where (go, v, v)  h = Add (g, v)  b = Div (h, h)", None, False),
    ("f = Shape (x)  b = Div (f, f)", None, False),
    ("f = ConstantOfShape (v)  b = Div (f, f)", None, True),
    ("f = ConstantOfShape <value = int64[1] {-1}> (v)  b = Div (f, f)", None, False),
    (f"b = {branches('int64', 'p = Div (v, v)', 'q = Neg (v)')}", None, False),
    (f"f = {branches('int64', 'p = Neg (v)', 'q = Neg (v)')}  b = Div (f, f)", None, False),
    (f"f = {branches('float', 'p = Neg (x)', 'q = Neg (x)')}  b = Div (f, f)", None, True),
    # The constant k of one branch is a computed value in the other.
    (f"b = {branches('int64', 'p = Div (v, k)', 'k = Neg (v)  q = Div (v, k)', '<int64[1] k = {2}>')}", None, False),
]
"""Nodes of a loop's body, whose integers are i, v and w, and whose float is x; a constant d; whether they are safe."""


@pytest.mark.parametrize(("nodes", "constant", "safe"), IN_BODIES, ids=[nodes[:60] for nodes, *_ in IN_BODIES])
def test_verify_refuses_division_of_integers_in_a_body(nodes: str, constant: object, safe: bool) -> None:
    """Nobody can look at the operands of a node in a body."""
    loop = onnx.parser.parse_node(
        "last = Loop (n, yes, v) <body = step (int64 i, bool go, int64[1] w) => (bool on, int64[1] then)"
        f"{{ on = Identity (go)  then = Identity (w)  {nodes} }}>"
    )
    arrays = {"n": np.array(2), "yes": np.array(True), "v": np.array([3]), "x": np.ones(1, np.float32)}
    kinds = dict.fromkeys(arrays, "input")
    if constant is not None:
        arrays["d"], kinds["d"] = np.array(constant), "embedded"
    plan = wrapped.plan_of(loop, 18, arrays, kinds, [wrapped.output(0, "last", "int64", (1,))])
    if safe:
        assert list(verify.problems(plan)) == []
        nimblert.load(plan).close()
    else:
        assert "divides integers in the body of a loop or branch" in refusal(plan)


def test_division_knows_operators_that_change_the_dtype() -> None:
    """`division` tells integers in bodies by that, in every version of every operator, but those that it names."""
    named = {"Cast", "ConstantOfShape", "If", "Loop", "Scan"} | division._INTEGERS | division._ELEMENTS
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain or schema.name not in onnx_trust.ANY_SHAPE - named:
            continue
        for output in schema.outputs:
            given = schema.inputs[schema.name == "Where"].type_str if schema.inputs else None
            types = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
            integers = {"tensor(int32)", "tensor(int64)"}.intersection(types.get(output.type_str, [output.type_str]))
            assert output.type_str == given or not integers, schema.name
