"""Loops and branches of ONNX run their bodies as programs of the plan."""

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto
from parsed_models import check, compiled, normal, parse

import nimblert
from nimblec.base.errors import UnsupportedModelError
from nimblec.inspect.verification import Result, verify
from nimblert.errors import InputError
from nimblert.plan import Launch, Switch, While

COUNTED = """(int64 n, float[4] x) => (float[4] y) {
    y = Loop (n, , x) <body = body (int64 i, bool c, float[4] v) => (bool go, float[4] w) {
        go = Identity (c)
        m = MatMul (v, k)
        w = BODY (m)
    }>
}"""


def counted(operator: str = "Tanh") -> ModelProto:
    return parse(COUNTED.replace("BODY", operator), k=normal(4, 4, seed=1))


@pytest.mark.parametrize("operator", ["Tanh", "Softmax", "Relu"])
def test_a_loop_of_a_run_time_count_runs_any_operator(operator: str) -> None:
    plan = check(counted(operator), [{"n": np.array(n), "x": normal(4)} for n in (0, 1, 2, 50)])
    (body,) = plan.bodies
    assert [type(command).__name__ for command in plan.programs[0].commands].count("While") == 1
    assert sum(isinstance(command, Launch) for command in body.commands) == 1, "the nodes of a trip are one stretch"


def test_a_scan_of_opset_8_is_refused() -> None:
    model = parse(
        """(float[1, 2] first, float[1, 3, 2] x) => (float[1, 2] last, float[1, 3, 2] sums) {
            last, sums = Scan <num_scan_inputs = 1, body = step (float[2] s, float[2] row) =>
                (float[2] t, float[2] kept) { t = Add (s, row)  kept = Identity (t) }> ("", first, x)
        }"""
    )
    model.opset_import[0].version = 8
    with pytest.raises(UnsupportedModelError, match="Scan of opset 8 is no operator that a plan may call"):
        compiled(model)


def test_a_loop_ends_by_its_condition() -> None:
    model = parse(
        """(float[4] x) => (float[4] y, int64 steps) {
            y, steps = Loop (, true, x, zero) <body = body (int64 i, bool c, float[4] v, int64 s) =>
                (bool go, float[4] w, int64 t) {
                total = ReduceSum <keepdims = 0> (v)
                go = Greater (total, one)
                w = Mul (v, half)
                t = Add (s, step)
            }>
        }""",
        true=np.True_,
        zero=np.array(0),
        one=np.float32(1),
        half=np.float32(0.5),
        step=np.array(1),
    )
    check(model, [{"x": np.full(4, value, np.float32)} for value in (0, 100, 1e30)])


def test_a_loop_swaps_what_it_carries() -> None:
    model = parse(
        """(int64 n, float[2] a, float[2] b) => (float[2] p, float[2] q) {
            p, q = Loop (n, , a, b) <body = body (int64 i, bool c, float[2] v, float[2] w) =>
                (bool go, float[2] first, float[2] second) {
                go = Identity (c)
                first = Identity (w)
                second = Identity (v)
            }>
        }"""
    )
    check(model, [{"n": np.array(n), "a": normal(2), "b": normal(2, seed=1)} for n in (0, 1, 2, 3)])


def test_a_large_carried_value_is_written_in_place() -> None:
    model = parse(
        """(int64 n, float[4096, 8] x) => (float[4096, 8] y) {
            y = Loop (n, , x) <body = body (int64 i, bool c, float[4096, 8] v) => (bool go, float[4096, 8] w) {
                go = Identity (c)
                at = Reshape (i, place)
                w = ScatterND (v, at, row)
            }>
        }""",
        place=np.array([1, 1]),
        row=normal(1, 8, seed=1),
    )
    plan = check(model, [{"n": np.array(n), "x": normal(4096, 8)} for n in (0, 3)])
    copied = [command.nbytes for command in plan.bodies[0].commands if hasattr(command, "src")]
    assert max(copied) <= 8, "only the counter and the condition are copied in a trip"


def test_rows_of_a_loop_and_of_a_scan_are_stacked() -> None:
    model = parse(
        """(float[5, 3] x) => (float[3] last, float[5, 3] all, float[4, 3] rows) {
            last, all = Scan <num_scan_inputs = 1, scan_input_directions = [1], body = scan (float[3] h, float[3] e) =>
                (float[3] next, float[3] row) {
                s = Add (h, e)
                next = Tanh (s)
                row = Neg (next)
            }> (zeros, x)
            unused, rows = Loop (four, , zeros) <body = body (int64 i, bool c, float[3] v) =>
                (bool go, float[3] w, float[3] made) {
                go = Identity (c)
                w = Add (v, one)
                made = Mul (w, last)
            }>
        }""",
        zeros=np.zeros(3, np.float32),
        four=np.array(4),
        one=np.float32(1),
    )
    check(model, [{"x": normal(5, 3)}])


NESTED = """(int64 n, float[1, 3, 8, 8] x) => (float[1, 3, 8, 8] y) {
    y = Loop (n, , x) <body = body (int64 i, bool c, float[1, 3, 8, 8] v) => (bool go, float[1, 3, 8, 8] w) {
        go = Identity (c)
        odd = Mod (i, two)
        is_odd = Cast <to = 9> (odd)
        w = If (is_odd) <
            then_branch = then () => (float[1, 3, 8, 8] t) {
                made = Conv <pads = [1, 1, 1, 1]> (v, k)
                t = Relu (made)
            },
            else_branch = other () => (float[1, 3, 8, 8] e) { e = Identity (v) }
        >
    }>
}"""


def test_branches_of_convolutions_within_a_loop(tmp_path: Path) -> None:
    model = parse(NESTED, two=np.array(2), k=normal(3, 3, 3, 3, seed=1))
    plan = check(model, [{"n": np.array(n), "x": normal(1, 3, 8, 8)} for n in (0, 1, 2, 5)])
    kinds = [[type(c) for c in program.commands if isinstance(c, While | Switch)] for program in plan.bodies]
    assert kinds == [[Switch], [], []]
    plan.save(tmp_path / "m.plan")
    assert all(found.result is not Result.FAILED for found in verify(tmp_path / "m.plan"))


def test_a_branch_hands_on_what_it_reads() -> None:
    model = parse(
        """(bool c, float[4] x, float[4] k) => (float[4] y, float[4] z) {
            y, z = If (c) <
                then_branch = then () => (float[4] a, float[4] b) {
                    a = Identity (x)
                    b = Add (x, k)
                },
                else_branch = other () => (float[4] d, float[4] e) {
                    d = Identity (k)
                    e = Identity (k)
                }
            >
        }"""
    )
    check(model, [{"c": np.array(c), "x": normal(4), "k": normal(4, seed=1)} for c in (True, False)])


def test_a_loop_whose_values_grow_runs_in_onnx_runtime() -> None:
    model = parse(
        """(int64 n, float[4] x) => (float total) {
            grown = Loop (n, , x) <body = body (int64 i, bool c, float[k] v) => (bool go, float[m] w) {
                go = Identity (c)
                w = Concat <axis = 0> (v, one)
            }>
            total = ReduceSum <keepdims = 0> (grown)
        }""",
        one=np.ones(1, np.float32),
    )
    plan = check(model, [{"n": np.array(n), "x": normal(4)} for n in (0, 1, 5)])
    assert not plan.bodies


def test_a_loop_beyond_the_trip_limit_is_an_error_and_the_next_call_runs(tmp_path: Path) -> None:
    plan = compiled(counted(), trip_limit=100)
    plan.save(tmp_path / "m.plan")
    with nimblert.load(tmp_path / "m.plan") as executable:
        with pytest.raises(InputError, match=r"op Loop \(.*\): has not ended after 100 trips, the limit that"):
            executable.run({"n": np.array(101), "x": normal(4)})
        assert np.array_equal(executable.run({"n": np.array(0), "x": normal(4)})["y"], normal(4))


def test_a_failure_in_a_body_names_its_operator() -> None:
    model = parse(
        """(int64 n, int64 at, float[4] x) => (float[4] y) {
            y = Loop (n, , x) <body = body (int64 i, bool c, float[4] v) => (bool go, float[4] w) {
                go = Identity (c)
                one = Gather (v, at)
                w = Add (v, one)
            }>
        }"""
    )
    with (
        nimblert.load(compiled(model)) as executable,
        pytest.raises(InputError, match=r"op Gather \(.*\): failed on these inputs: .*out of data bounds"),
    ):
        executable.run({"n": np.array(2), "at": np.array(7), "x": normal(4)})
