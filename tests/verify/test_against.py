"""verify --against: plans beside ONNX Runtime, value by value."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import CommandLine
from cpu_plans import floats, plan_file, write_model
from onnx import TensorProto, helper

import nimblec
from nimblec.base.difference import difference, same_numbers
from nimblec.cpu.reference import read_nodes, run_values
from nimblec.inspect.node_values import compare_nodes
from nimblec.onnx_import import model_file, model_nodes
from nimblec.plan import encoder
from nimblert import golden, loading
from nimblert.check.verify import read_plan
from nimblert.plan import Plan, Target

node = helper.make_node
RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


CHANNELS = 32
CONSTANTS = {
    "w1": weights(CHANNELS, 3, 3, 3),
    "w2": weights(CHANNELS, CHANNELS, 3, 3),
    "w3": weights(CHANNELS, CHANNELS, 1, 1),
    "scale": np.abs(weights(CHANNELS, 1)).reshape(-1) + 0.5,
    "shift": weights(CHANNELS, 1).reshape(-1),
    "mean": weights(CHANNELS, 1).reshape(-1),
    "var": np.abs(weights(CHANNELS, 1)).reshape(-1) + 0.5,
    "w4": weights(10, CHANNELS).T.copy(),
    "w5": weights(10, 10),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write convolutions that ONNX Runtime fuses and lays out in blocks of as many bytes, and a head."""
    nodes = [
        node("Conv", ["x", "w1"], ["c1"], name="conv1", pads=[1] * 4),
        node("BatchNormalization", ["c1", "scale", "shift", "mean", "var"], ["b1"], name="norm1"),
        node("Relu", ["b1"], ["r1"], name="relu1"),
        node("Conv", ["r1", "w2"], ["c2"], name="conv2", pads=[1] * 4),
        node("Add", ["c2", "r1"], ["s2"], name="add2"),
        node("Tanh", ["s2"], ["t2"], name="tanh2"),
        node("Conv", ["t2", "w3"], ["c3"], name="conv3"),
        node("GlobalAveragePool", ["c3"], ["p3"], name="pool3"),
        node("Flatten", ["p3"], ["f3"], name="flatten3"),
        node("MatMul", ["f3", "w4"], ["m4"], name="matmul4"),
        node("Sigmoid", ["m4"], ["s4"], name="sigmoid4"),
        node("MatMul", ["s4", "w5"], ["y"], name="matmul5"),
        node("ArgMax", ["y"], ["digit"], name="argmax", axis=1, keepdims=0),
    ]
    outputs = [floats("y", 1, 10), ("digit", TensorProto.INT64, (1,))]
    path = tmp_path_factory.mktemp("models") / "model.onnx"
    return write_model(path, nodes, [floats("x", 1, 3, 16, 16)], outputs, constants=CONSTANTS)


@pytest.fixture(scope="module")
def plan(model: Path) -> Path:
    path = model.with_suffix(".plan")
    nimblec.compile(model, target="cpu").save(path)
    return path


def lines(out: str, name: str) -> list[str]:
    return [line for line in out.splitlines() if line[9:].startswith(name)]


def changed_weight(plan: Path, path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """Return a copy of a plan with another weight."""
    opened = read_plan(plan)
    (index,) = [i for i, weight in enumerate(opened.weights) if weight.name == name]
    weight = opened.weights[index]
    values = change(np.frombuffer(weight.data, weight.dtype).copy())
    made = replace(weight, data=memoryview(values).cast("B"))
    encoder.write(replace(opened, weights=(*opened.weights[:index], made, *opened.weights[index + 1 :])), path)
    return path


# --- outputs


def test_outputs_are_compared_one_by_one(nimblec: CommandLine, plan: Path, model: Path) -> None:
    done = nimblec("verify", plan, "--against", model, "--seed", 7)
    assert (done.status, done.err) == (0, "")
    floats, integers = lines(done.out, "against")
    assert re.fullmatch(r"ok       against: output 'y': (equal|largest difference .*, 0\.0001 allowed)", floats)
    assert integers == "ok       against: output 'digit': equal"
    assert lines(done.out, "nodes") == []


def test_against_fails_above_tolerance(nimblec: CommandLine, plan: Path, model: Path, tmp_path: Path) -> None:
    other = changed_weight(plan, tmp_path / "other.plan", "w5", lambda w: w * np.float32(1.01))
    done = nimblec("verify", other, "--against", model)
    assert done.status == 2
    (y, digit) = lines(done.out, "against")
    assert y.startswith("FAILED   against: output 'y': largest difference ")
    assert y.endswith("0.01 of the largest magnitude, 0.0001 allowed")
    assert digit == "ok       against: output 'digit': equal"
    assert "failed the checks of golden, against" in done.err
    (allowed, _) = lines(nimblec("verify", other, "--against", model, "--tolerance", "0.011").out, "against")
    assert allowed.startswith("ok ")


def test_inputs_keep_to_their_sample_ranges(nimblec: CommandLine, tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "rows.onnx",
        [node("Sub", ["i", "base"], ["k"]), node("Gather", ["w", "k"], ["y"], name="table")],
        [("i", TensorProto.INT64, ("batch",))],
        [floats("y", "batch", 40)],
        constants={"w": np.arange(160, dtype=np.float32).reshape(4, 40), "base": np.array(1000)},
    )
    np.save(tmp_path / "i.npy", np.array([1000, 1003]))
    compiled = nimblec(
        "compile", path, "-o", tmp_path / "rows.plan", "--target", "cpu", "--example", f"i={tmp_path / 'i.npy'}"
    )
    assert compiled.status == 0, compiled.err
    out = nimblec.prints("verify", tmp_path / "rows.plan", "--against", path, "--per-node")
    assert lines(out, "against") == ["ok       against: output 'y': equal"]


# --- nodes


def test_nodes_agree_however_they_are_fused_and_laid_out(nimblec: CommandLine, plan: Path, model: Path) -> None:
    out = nimblec.prints("verify", plan, "--against", model, "--per-node")
    (line,) = lines(out, "nodes")
    assert line.startswith("ok       nodes: ")
    agreeing, of, total = line.split()[2:5]
    assert (of, total) == ("of", "13")
    assert 7 <= int(agreeing) < 13
    assert f"the plan does not have the other {13 - int(agreeing)} (fused, folded or padded)" in line


@pytest.mark.parametrize(("weight", "node_name"), [("w4", "MatMul 'matmul4': value 'm4'"), ("w5", "MatMul 'matmul5'")])
def test_the_first_node_that_differs_is_named(
    nimblec: CommandLine, plan: Path, model: Path, tmp_path: Path, weight: str, node_name: str
) -> None:
    other = changed_weight(plan, tmp_path / "other.plan", weight, lambda w: w + np.float32(0.1))
    done = nimblec("verify", other, "--against", model, "--per-node")
    assert done.status == 2
    (line,) = lines(done.out, "nodes")
    assert line.startswith("FAILED   nodes: the first node that differs is " + node_name)
    assert "of 13 values agree before it" in line


def test_against_passes_if_outputs_agree(nimblec: CommandLine, tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["m"], name="matmul"),
        node("Clip", ["m", "zero", "zero"], ["c"], name="clip"),
        node("Add", ["c", "x"], ["y"], name="add"),
    ]
    constants = {"w": weights(32, 32), "zero": np.zeros((), np.float32)}
    path = write_model(tmp_path / "m.onnx", nodes, [floats("x", 2, 32)], [floats("y", 2, 32)], constants=constants)
    encoder.write(plan_file(path), tmp_path / "m.plan")
    other = changed_weight(tmp_path / "m.plan", tmp_path / "other.plan", "w", lambda w: w + np.float32(0.1))
    done = nimblec("verify", other, "--against", path, "--per-node")
    (line,) = lines(done.out, "nodes")
    assert line.startswith("ok       nodes: the outputs agree, though the plan holds another value 'm' of MatMul")
    assert done.status == 0


def test_a_node_in_blocks_is_told_from_a_wrong_one(plan: Path, model: Path) -> None:
    """conv2 and what follows it keeps its bytes in blocks: the same numbers in another order."""
    opened = read_plan(plan)
    blocked = next(w for w in opened.weights if w.data.nbytes == CONSTANTS["w2"].nbytes)
    values = np.frombuffer(blocked.data, np.float32).copy()
    values[5] += 3
    index = opened.weights.index(blocked)
    wrong = replace(blocked, data=memoryview(values).cast("B"))
    compared = compare(replace(opened, weights=(*opened.weights[:index], wrong, *opened.weights[index + 1 :])), model)
    assert compared.first is not None
    assert compared.first.node == "Conv 'conv2'"
    assert compared.first.value == "c2"


def compare(plan: Plan, path: Path, tolerance: float = 1e-4) -> object:
    model = model_file.load(path)
    nodes = read_nodes(model)
    model_nodes.clear_repeated_names(model)
    with loading.load(plan) as loaded:
        inputs = golden.draw_inputs(loaded.program, 0)
        return compare_nodes(loaded, inputs, nodes, run_values(model, path.parent, inputs), tolerance)


def test_streams_nodes_without_names_and_names_used_twice(tmp_path: Path) -> None:
    nodes = [
        node("Sin", ["x"], ["a"], name="twin"),
        node("Cos", ["x"], ["b"], name="twin"),
        node("Tanh", ["a"], ["c"]),
        node("Sigmoid", ["b"], ["d"]),
        node("Sub", ["c", "d"], ["y"]),
    ]
    path = write_model(tmp_path / "m.onnx", nodes, [floats("x", 4, 5)], [floats("y", 4, 5)])
    plan = plan_file(path, streams=None)
    assert plan.programs[0].stream_count == 2
    compared = compare(plan, path)
    assert (compared.total, compared.agreeing, compared.first) == (5, 5, None)


def test_plans_of_the_gpu_name_nodes_by_operator_and_name(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.onnx",
        [node("Sin", ["x"], ["a"], name="s"), node("Cos", ["a"], ["y"])],
        [floats("x", 4)],
        [floats("y", 4)],
    )
    assert [n.description for n in read_nodes(onnx.load(path))] == ["Sin 's'", "Cos '-> y'"]
    plan = plan_file(path, joins=False)
    sine, cosine = plan.programs[0].ops
    ops = (replace(sine, source="Sin 's'"), replace(cosine, source="Cos '-> y'"))
    described = replace(plan, programs=(replace(plan.programs[0], ops=ops),))
    # A plan of the CPU names its nodes otherwise.
    assert compare(described, path).agreeing == 0
    model = model_file.load(path)
    with loading.load(described) as loaded:
        loaded.plan = replace(described, target=Target.CUDA)
        inputs = golden.draw_inputs(loaded.program, 0)
        compared = compare_nodes(loaded, inputs, read_nodes(model), run_values(model, tmp_path, inputs), 1e-6)
    assert (compared.total, compared.agreeing, compared.first) == (2, 2, None)


def test_steps_give_what_a_run_gives(plan: Path) -> None:
    with loading.load(plan) as loaded:
        inputs = golden.draw_inputs(loaded.program, 3)
        expected = loaded.run(inputs)
        loaded.run(golden.draw_inputs(loaded.program, 4))
        assert len(list(loaded.steps(inputs))) == len(loaded.program.commands)
        for tensor in loaded.outputs:
            found = loaded.read(tensor.pointer, tensor.span_nbytes).view(tensor.dtype).reshape(tensor.shape)
            np.testing.assert_array_equal(found, expected[tensor.name])


# --- what is refused


def test_a_plan_of_another_model_is_refused(nimblec: CommandLine, plan: Path, tmp_path: Path) -> None:
    def refused(*value: object, output: str = "y") -> str:
        inputs = [(value[0], value[1], value[2:])]
        path = write_model(tmp_path / "o.onnx", [node("Relu", [value[0]], [output])], inputs, [floats(output, None)])
        return nimblec_refused(path)

    def nimblec_refused(path: Path) -> str:
        done = nimblec("verify", plan, "--against", path)
        assert done.status == 2
        (line,) = done.err.splitlines()
        return line

    assert "was not compiled from" in refused("z", TensorProto.FLOAT, 1, 3, 16, 16)
    assert "its inputs are 'x', the model's 'z'" in refused("z", TensorProto.FLOAT, 1, 3, 16, 16)
    assert "input 'x' is float32 in the plan, float64 in the model" in refused("x", TensorProto.DOUBLE, 1, 3, 16, 16)
    shape = refused("x", TensorProto.FLOAT, 1, 3, 8, "w")
    assert "input 'x' has the shape 1x3x16x16 in the plan, 1x3x8x? in the model" in shape
    outputs = refused("x", TensorProto.FLOAT, "b", 3, 16, "w", output="q")
    assert "its outputs are 'y', 'digit', the model's 'q'" in outputs
    assert "does not exist" in nimblec_refused(tmp_path / "none.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    assert nimblec_refused(tmp_path / "pipe.onnx") == f"nimblec: {tmp_path / 'pipe.onnx'}: is not a regular file"
    assert "not an ONNX file" in nimblec_refused(plan)


@pytest.mark.parametrize("options", [("--per-node",), ("--tolerance", "0.1"), ("--seed", "1")])
def test_options_of_the_comparison_need_a_model(nimblec: CommandLine, plan: Path, options: tuple[str, ...]) -> None:
    assert "need --against MODEL.onnx" in nimblec.refused("verify", plan, *options)


# --- differences


@pytest.mark.parametrize(
    ("dtype", "expected", "found", "absolute", "relative"),
    [
        ("float32", [1, -4], [1, -4], 0, 0),
        ("float32", [1, -4], [2, -4], 1, 0.25),
        ("float64", [np.nan, np.inf, 2], [np.nan, np.inf, 1], 1, 0.5),
        ("float32", [np.nan, 1], [0, 1], np.inf, np.inf),
        ("float32", [np.inf, 1], [-np.inf, 1], np.inf, np.inf),
        ("float32", [0, 0], [0, 1e-9], 1e-9, np.inf),
        ("float32", [2**-130], [0], 2**-130, 1 / 16),
        ("float32", [0], [2**-130], 2**-130, 1 / 16),
        ("complex64", [3 + 4j], [3 + 2j], 2, 0.5),
        ("float16", [], [], 0, 0),
        ("bool", [True, False], [True, True], 1, 1),
        ("int64", [2**63 - 1, 0], [2**63 - 2, 0], 1, 2.0**-63),
        ("int64", [-(2**63)], [2**63 - 1], 2.0**64, 2),
        ("uint8", [250], [5], 245, 0.98),
    ],
)
def test_difference(dtype: str, expected: list[object], found: list[object], absolute: float, relative: float) -> None:
    made = difference(np.array(expected, dtype), np.array(found, dtype))
    assert made.absolute == pytest.approx(absolute, rel=1e-6, abs=0)
    assert made.relative == pytest.approx(relative)
    assert made.within(np.inf if not made.exact else 0) == (not made.exact or not absolute)


def test_no_tolerance_excuses_integers() -> None:
    assert not difference(np.array([10**9]), np.array([10**9 + 1])).within(1.0)


def test_the_same_numbers_in_another_order() -> None:
    a = RNG.standard_normal((4, 5, 6)).astype(np.float32)
    assert same_numbers(a, np.ascontiguousarray(a.transpose(2, 0, 1)), 1e-6)
    assert not same_numbers(a, a + np.float32(0.01), 1e-4)
    assert not same_numbers(np.array([1, 2]), np.array([2, 1]), 1.0)
