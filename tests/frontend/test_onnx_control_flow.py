"""If, Loop and Scan: taken or unrolled at import, recorded, or refused by name."""

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.control import Loop
from nimblec.onnx_import import control
from nimblec.onnx_import.importer import import_model
from nimblec.pytorch.outputs import cut_outputs

BRANCHES = """
    y = If (c) <
        then_branch = yes () => (float[2] a) { a = Add (x, x) },
        else_branch = no () => (float[2] b) { b = Neg (x) }
    >
"""
LOOP = """
    last, all = Loop (trip, keep, x) <body = step (int64 i, bool go, float[2] v) => (bool go2, float[2] w, float[2] out)
    {
        go2 = Identity (go)
        f = Cast <to = 1> (i)
        w = Add (v, f)
        out = Mul (w, x)
    }>
"""
SCAN = """
    total, sums = Scan <
        num_scan_inputs = 1,
        scan_input_directions = [1],
        scan_output_axes = [1],
        body = step (float[2] s, float[2] row) => (float[2] t, float[2] kept) { t = Add (s, row)  kept = Identity (t) }
    > (start, x)
"""


def model_of(body: str, signature: str, **initializers: np.ndarray) -> ModelProto:
    text = f'<ir_version: 10, opset_import: ["": 19]> main {signature} {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in initializers.items())
    return model


@pytest.mark.parametrize(("condition", "expected"), [(True, 6.0), (False, -3.0)])
def test_a_known_condition_takes_its_branch(condition: bool, expected: float) -> None:
    program = import_model(model_of(BRANCHES, "(float[2] x) => (float[2] y)", c=np.array(condition)))
    assert len([n for n in program.module.graph.nodes if n.op == "call_function"]) == 1
    assert torch.equal(program.module(torch.full((2,), 3.0))[0], torch.full((2,), expected))


def test_an_unknown_condition_chooses_while_the_model_runs() -> None:
    program = import_model(model_of(BRANCHES, "(float[2] x, bool c) => (float[2] y)"))
    for condition, expected in ((True, 6.0), (False, -3.0)):
        (found,) = program.module(torch.full((2,), 3.0), torch.tensor(condition))
        assert torch.equal(found, torch.full((2,), expected))


@pytest.mark.parametrize("trip", [0, 1, 4])
def test_a_loop_of_a_known_count_is_unrolled(trip: int) -> None:
    signature = "(float[2] x) => (float[2] last, float[N,2] all)"
    program = import_model(model_of(LOOP, signature, trip=np.array(trip), keep=np.array(True)))
    x = np.array([1, 2], np.float32)
    last, collected = (tensor.numpy() for tensor in program.module(torch.from_numpy(x)))
    states = [x + sum(range(i + 1)) for i in range(trip)]
    np.testing.assert_array_equal(last, states[-1] if states else x)
    np.testing.assert_array_equal(collected, np.array([s * x for s in states]).reshape(-1, 2))


def test_branches_of_other_sizes_make_a_counted_value() -> None:
    branches = BRANCHES.replace("float[2] b) { b = Neg (x) }", "float[3] b) { b = Concat <axis = 0> (x, one) }")
    one = np.ones(1, np.float32)
    program = import_model(model_of(branches, "(float[2] x, bool c) => (float[N] y)", one=one))
    for condition, expected in ((True, [6.0, 6.0]), (False, [3.0, 3.0, 1.0])):
        found = program.module(torch.full((2,), 3.0), torch.tensor(condition))
        assert [values.tolist() for values in cut_outputs(found, program.cropped)] == [expected]


@pytest.mark.parametrize("trip", [0, 3, 5])
def test_a_loop_of_unknown_count_stacks_up_to_a_bound(trip: int) -> None:
    signature = "(float[2] x, int64 trip) => (float[2] last, float[N,2] all)"
    model = model_of(LOOP, signature, keep=np.array(True))
    program = import_model(model, bounds={"all": (4, 2)})
    last, collected, sizes = program.module(torch.ones(2), torch.tensor(trip))
    sums = [1.0 + sum(range(i + 1)) for i in range(trip)]
    assert torch.equal(last, torch.full((2,), sums[-1] if sums else 1.0))
    assert sizes.tolist() == [trip, 2], "a count beyond the bound is an error of the run"
    within = min(trip, 3)
    assert collected[:within, 0].tolist() == sums[:within]


def test_a_loop_of_unknown_count_stacks_no_unbounded_output() -> None:
    signature = "(float[2] x, int64 trip) => (float[2] last)"
    with pytest.raises(UnsupportedModelError, match="stacks its output 'out' over a number of trips that is not known"):
        import_model(model_of(LOOP, signature, keep=np.array(True)))


@pytest.mark.parametrize("trip", [0, 1, 7])
def test_a_loop_of_unknown_count_is_recorded(trip: int) -> None:
    body = LOOP.replace("last, all", "last").replace(", float[2] out", "").replace("out = Mul (w, x)", "")
    program = import_model(model_of(body, "(float[2] x, int64 trip) => (float[2] last)", keep=np.array(True)))
    (last,) = program.module(torch.ones(2), torch.tensor(trip))
    assert torch.equal(last, torch.full((2,), 1.0 + sum(range(trip))))


def test_a_long_loop_is_recorded_with_its_stacked_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MOST_NODES", 20)
    signature = "(float[2] x) => (float[2] last, float[N,2] all)"
    program = import_model(model_of(LOOP, signature, trip=np.array(9), keep=np.array(True)))
    assert len(list(program.module.graph.nodes)) < 20
    last, collected = program.module(torch.ones(2))
    sums = [1.0 + sum(range(i + 1)) for i in range(9)]
    assert torch.equal(last, torch.full((2,), sums[-1]))
    assert torch.equal(collected, torch.tensor(sums)[:, None].expand(9, 2))


def test_a_scan_is_unrolled_in_its_direction() -> None:
    start = np.zeros(2, np.float32)
    signature = "(float[3,2] x) => (float[2] total, float[2,3] sums)"
    program = import_model(model_of(SCAN, signature, start=start))
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    total, sums = (tensor.numpy() for tensor in program.module(torch.from_numpy(x)))
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(sums, np.cumsum(x[::-1], 0).T)


def test_a_long_scan_is_recorded_in_its_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MOST_NODES", 5)
    signature = "(float[3,2] x) => (float[2] total, float[2,3] sums)"
    program = import_model(model_of(SCAN, signature, start=np.zeros(2, np.float32)))
    assert any(isinstance(node.target, Loop) for node in program.module.graph.nodes)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    total, sums = (tensor.numpy() for tensor in program.module(torch.from_numpy(x)))
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(sums, np.cumsum(x[::-1], 0).T)


def test_a_body_that_cannot_be_imported_is_named_once() -> None:
    body = LOOP.replace("w = Add (v, f)", "w = NonMaxSuppression (v, f)")
    model = model_of(body, "(float[2] x) => (float[2] last)", trip=np.array(5), keep=np.array(True))
    with pytest.raises(UnsupportedModelError) as caught:
        import_model(model)
    assert str(caught.value).count("NonMaxSuppression") == 1


def test_a_branch_has_initializers_of_its_own() -> None:
    model = model_of(BRANCHES, "(float[2] x) => (float[2] y)", c=np.array(True))
    branch = model.graph.node[0].attribute[0].g
    branch.initializer.append(helper.make_tensor("own", TensorProto.FLOAT, [2], [1.0, 2.0]))
    branch.node[0].input[1] = "own"
    assert import_model(model).module(torch.zeros(2))[0].tolist() == [1.0, 2.0]
