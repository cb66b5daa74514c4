"""The time of each command of a loaded plan, with its op."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import helper

import nimblert
from nimblert import Executable, InputError, golden
from nimblert.plan import Record, Wait

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)

X = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
node = helper.make_node


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Executable]:
    """Yield a model of tanh(x @ v) * (x @ w) on two streams."""
    weights = np.random.default_rng(1).standard_normal((2, 256, 256)).astype(np.float32)
    path = write_model(
        tmp_path / "model.onnx",
        [
            node("MatMul", ["x", "v"], ["a"], name="left"),
            node("MatMul", ["x", "w"], ["b"], name="right"),
            node("Tanh", ["a"], ["c"], name="bend"),
            node("Mul", ["b", "c"], ["y"], name="join"),
        ],
        [floats("x", 4, 256)],
        [floats("y", 4, 256)],
        constants=dict(zip("vw", weights, strict=True)),
    )
    with nimblert.load(plan_file(path, streams=None, joins=False)) as executable:
        yield executable


def test_each_command_has_its_op_its_stream_and_its_time(model: Executable) -> None:
    program = model.program
    times = model.profile({"x": X})
    assert [time.command for time in times] == [
        i for i, command in enumerate(program.commands) if not isinstance(command, Record | Wait)
    ]
    assert len(times) < len(program.commands)
    assert [time.stream for time in times] == [program.commands[time.command].stream for time in times]
    assert {time.stream for time in times} == {0, 1}
    found = {(time.kind, time.op, time.source) for time in times}
    ops = [("MatMul", "left"), ("MatMul", "right"), ("Tanh", "bend"), ("Mul", "join")]
    assert found == {("launch", *op) for op in ops}
    assert all(time.nanoseconds > 0 for time in times)
    with pytest.raises(FrozenInstanceError):
        times[0].stream = 1  # type: ignore[misc]


def test_a_profile_computes_as_a_run_does(model: Executable) -> None:
    expected = model(X)
    model(np.zeros_like(X))
    model.profile({"x": X})
    tensor = model.program.outputs[0]
    held = model.read(tensor.pointer, X.nbytes).view(np.float32).reshape(X.shape)
    assert np.array_equal(held, expected)
    assert np.array_equal(model(X), expected)


def test_what_cannot_run_cannot_be_profiled(model: Executable) -> None:
    with pytest.raises(InputError, match=r"input 'x': shape \(1, 256\), expected \(4, 256\)"):
        model.profile({"x": X[:1]})
    with pytest.raises(InputError, match="entry 'other': not found"):
        model.profile({"x": X}, entry="other")
    steps = model.steps({"x": X})
    next(steps)
    with pytest.raises(InputError, match=r"a run by steps\(\) is half done"):
        model.profile({"x": X})
    steps.close()
    model.close()
    with pytest.raises(InputError, match="this executable is closed"):
        model.profile({"x": X})


@pytest.mark.gpu
def test_commands_on_a_gpu_are_timed_by_events(gpu_compiler: "GpuCompiler") -> None:
    plan = gpu_compiler.plan("families.resnet:small")
    with nimblert.load(plan) as executable:
        inputs = golden.draw_inputs(executable.program, 1)
        expected = executable.run(inputs)
        times = [executable.profile(inputs) for _ in range(3)][-1]
        assert len(times) == sum(not isinstance(c, Record | Wait) for c in executable.program.commands)
        assert all(0 < time.nanoseconds < 50_000_000 for time in times)
        for name, output in executable.run(inputs).items():
            assert np.array_equal(output, expected[name])
