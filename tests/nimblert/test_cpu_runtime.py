"""The CPU backend: errors, poison, streams, copies and fills, and plans that do not fit their models."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from concurrency import thread_count, threads_beyond
from cpu_plans import assert_same, backend_of, floats, plan_file, run_plan, write_model
from onnx import TensorProto, helper
from subprocesses import python

from nimblec.plan import encoder
from nimblert.check.verify import read_plan
from nimblert.cpu import onnx_session
from nimblert.errors import DeviceMismatchError, InputError, PlanInvalidError
from nimblert.plan import (
    Command,
    Launch,
    Memcpy,
    Memset,
    Module,
    Op,
    ParameterKind,
    Plan,
    Pointer,
    Program,
    Record,
    Region,
    Relocation,
    Wait,
)

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 64)).astype(np.float32)
node = helper.make_node


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write relu(x @ w) @ w as a plan, where w is 64 x 64."""
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Tanh", ["a"], ["r"]), node("MatMul", ["r", "w"], ["y"])]
    weight = RNG.standard_normal((64, 64)).astype(np.float32)
    return write_model(
        tmp_path / "model.onnx", nodes, [floats("x", 4, 64)], [floats("y", 4, 64)], constants={"w": weight}
    )


def with_program(plan: Plan, **changes: object) -> Plan:
    return replace(plan, programs=(replace(plan.programs[0], **changes),))


def test_weights_of_equal_kernels_are_one_and_stay_in_the_file(path: Path, tmp_path: Path) -> None:
    encoder.write(plan_file(path, joins=False), tmp_path / "model.plan")
    plan = read_plan(tmp_path / "model.plan")
    assert len(plan.weights) == 1
    assert [command.kernel for command in plan.programs[0].commands] == [0, 1, 0]
    backend = backend_of(plan)
    memory = backend.memory.range(Pointer(region=Region.WEIGHTS), plan.weights[0].data.nbytes)
    assert memory.ctypes.data == np.frombuffer(plan.weights[0].data, np.uint8).ctypes.data
    backend.close()
    assert_same(path, {"x": X}, plan=plan)


def test_runs_again_and_after_poison(path: Path) -> None:
    plan = plan_file(path)
    backend = backend_of(plan, poison=True)
    assert np.isnan(backend.outputs[0]).all()
    results = []
    for scale in (1, 2, 1):
        np.copyto(backend.inputs[0], X * scale)
        backend.run()
        results.append(backend.outputs[0].copy())
    backend.replay()
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_array_equal(backend.outputs[0], results[2])
    assert not np.array_equal(results[0], results[1])
    backend.close()


def test_values_that_a_kernel_refuses(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model.onnx",
        [node("Gather", ["w", "i"], ["y"], name="table")],
        [("i", TensorProto.INT64, (2,))],
        [floats("y", 2, 64)],
        constants={"w": RNG.standard_normal((4, 64)).astype(np.float32)},
    )
    with pytest.raises(InputError, match=r"op Gather \(table\): failed on these inputs: .*indices"):
        run_plan(plan_file(path), {"i": np.array([1, 9])})


def _wide(tmp_path: Path) -> Path:
    """Write two Gathers of their own indices, added, as a plan of two streams that may fail."""
    nodes = [
        node("Gather", ["w", "i"], ["a"], name="left"),
        node("Gather", ["w", "j"], ["b"], name="right"),
        node("Add", ["a", "b"], ["y"], name="sum"),
    ]
    indices = [("i", TensorProto.INT64, (2,)), ("j", TensorProto.INT64, (2,))]
    weight = RNG.standard_normal((4, 64)).astype(np.float32)
    return write_model(tmp_path / "wide.onnx", nodes, indices, [floats("y", 2, 64)], constants={"w": weight})


def test_two_streams_meet_and_a_failure_on_either_ends_the_run(tmp_path: Path) -> None:
    path = _wide(tmp_path)
    plan = plan_file(path, streams=None)
    assert plan.programs[0].stream_count == 2
    good, bad = np.array([1, 2]), np.array([1, 9])
    backend = backend_of(plan)
    for i, j, failing in ((good, bad, "right"), (bad, good, "left"), (good, good, None), (good, bad, "right")):
        for view, value in zip(backend.inputs, (i, j), strict=True):
            np.copyto(view, value)
        if failing:
            with pytest.raises(InputError, match=failing):
                backend.run()
        else:
            backend.run()
            weight = np.frombuffer(plan.weights[0].data, np.float32).reshape(4, 64)
            np.testing.assert_array_equal(backend.outputs[0], weight[i] + weight[j])
    backend.close()


def test_threads_of_streams_end_with_the_backend(tmp_path: Path) -> None:
    plan = plan_file(_wide(tmp_path), streams=None)
    before = thread_count()
    backend = backend_of(plan)
    backend.run()
    assert thread_count() > before
    backend.close()
    del backend
    assert threads_beyond(before) == 0


def test_only_kernels_that_gain_by_it_have_threads_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    counts = {}
    for name, size in (("small", 8), ("large", 256)):
        weights = RNG.standard_normal((1, 3 * size, size)).astype(np.float32)
        x = floats("x", 2, 1, size)
        models = {
            "GRU": (node("GRU", ["x", "w", "r"], ["y"], hidden_size=size), floats("y", 2, 1, 1, size)),
            "MatMul": (node("MatMul", ["x", "wt"], ["y"]), floats("y", 2, 1, 3 * size)),
        }
        constants = {"w": weights, "r": weights, "wt": weights[0].T.copy()}
        for operator, (made, y) in models.items():
            path = write_model(tmp_path / "model.onnx", [made], [x], [y], constants=constants)
            counts[name, operator] = _threads_opened(plan_file(path))
    assert counts == {("small", "GRU"): 0, ("small", "MatMul"): 0, ("large", "GRU"): 3, ("large", "MatMul"): 3}


def _threads_opened(plan: Plan) -> int:
    """Return how many threads a backend starts and keeps."""
    before = thread_count()
    backend = backend_of(plan)
    started = min(thread_count() for _ in range(3)) - before
    backend.close()
    del backend
    assert threads_beyond(before) == 0
    return started


def test_copies_and_fills(path: Path) -> None:
    plan = plan_file(path)
    arena, output = Pointer(region=Region.ARENA), Pointer(region=Region.OUTPUT)
    op = len(plan.programs[0].ops)
    commands = (
        Memset(stream=0, op=op, dst=arena, value=0x3F80, element_nbytes=2, count=512),
        Memcpy(stream=1, op=op, dst=output, src=arena, nbytes=512),
        Record(stream=1, event=0),
        Wait(stream=0, event=0),
        Memset(stream=0, op=op, dst=replace(output, offset=512), value=7, element_nbytes=4, count=128),
    )
    ordered = (commands[0], Record(stream=0, event=1), Wait(stream=1, event=1), *commands[1:])
    ops = (*plan.programs[0].ops, Op(name="fill", source=""))
    changed = with_program(plan, commands=ordered, ops=ops, stream_count=2, event_count=2, arena_nbytes=4096)
    (result,) = run_plan(changed, {"x": X})
    raw = result.reshape(-1).view(np.uint8)
    assert (raw[:512].view(np.uint16) == 0x3F80).all()
    assert (raw[512:1024].view(np.uint32) == 7).all()


def _first_launch(program: Program) -> Launch:
    launch = program.commands[0]
    assert isinstance(launch, Launch)
    return launch


def _redirected(plan: Plan, parameter: int, pointer: Pointer) -> Plan:
    launch = _first_launch(plan.programs[0])
    relocations = list(launch.relocations)
    relocations[parameter] = Relocation(param_offset=8 * parameter, pointer=pointer)
    changed = replace(launch, relocations=tuple(relocations))
    return with_program(plan, commands=(changed, *plan.programs[0].commands[1:]))


@pytest.mark.parametrize(
    ("pointer", "message"),
    [
        (Pointer(region=Region.ARENA, offset=1 << 40), "outside"),
        (Pointer(region=Region.ARENA, offset=-1), "outside"),
        (Pointer(region=Region.INPUT), "only be read"),
        (Pointer(region=Region.WEIGHTS), "only be read"),
        (Pointer(region=Region.OUTPUT, index=3), "no such region"),
    ],
)
def test_addresses_outside_memory_are_refused(path: Path, pointer: Pointer, message: str) -> None:
    plan = plan_file(path)
    kinds = [parameter.kind.name for parameter in plan.kernels[0].parameters]
    changed = _redirected(plan, kinds.index("OUTPUT"), pointer)
    with pytest.raises(PlanInvalidError, match=message):
        backend_of(changed)


def test_a_parameter_of_another_dtype_than_the_models_is_refused(path: Path) -> None:
    plan = plan_file(path, joins=False)
    kernel = plan.kernels[0]
    parameters = tuple(replace(p, dtype="uint8") if p.name == "o0" else p for p in kernel.parameters)
    changed = replace(plan, kernels=(replace(kernel, parameters=parameters), *plan.kernels[1:]))
    with pytest.raises(PlanInvalidError, match=r"kernel MatMul: parameters .*uint8"):
        backend_of(changed)


def test_a_parameter_of_another_shape_than_the_models_is_refused_at_the_run(path: Path) -> None:
    plan = plan_file(path, joins=False)
    kernel = plan.kernels[0]
    parameters = tuple(replace(p, shape=(4, 32)) if p.name == "o0" else p for p in kernel.parameters)
    changed = replace(plan, kernels=(replace(kernel, parameters=parameters), *plan.kernels[1:]))
    with pytest.raises(InputError, match=r"invalid dimensions|shape"):
        run_plan(changed, {"x": X})


@pytest.mark.parametrize("code", [b"", b"not a model", bytes(100), b"\x08\x08:\x00"])
def test_code_that_is_no_model_is_refused(path: Path, code: bytes) -> None:
    plan = plan_file(path)
    modules = (Module(origin="onnxruntime", code=memoryview(code)), *plan.modules[1:])
    changed = replace(plan, modules=modules)
    with pytest.raises(PlanInvalidError, match="kernel MatMul"):
        backend_of(changed)


@pytest.mark.parametrize("location", ["weights", "secret"])
def test_a_model_cannot_read_files(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str) -> None:
    """An initializer that names a file is refused where the plan does not supply its data."""
    (tmp_path / location).write_bytes(bytes(1 << 16))
    monkeypatch.chdir(tmp_path)
    plan = plan_file(path)
    model = onnx.ModelProto.FromString(bytes(plan.modules[0].code))
    model.graph.initializer[0].external_data[0].value = location
    (initializer,) = (p for p in plan.kernels[0].parameters if p.kind is ParameterKind.INITIALIZER)
    parameters = tuple(p for p in plan.kernels[0].parameters if p is not initializer)
    parameters = tuple(replace(p, offset=8 * i) for i, p in enumerate(parameters))
    launch = _first_launch(plan.programs[0])
    relocations = tuple(r for r in launch.relocations if r.param_offset != initializer.offset)
    relocations = tuple(replace(r, param_offset=8 * i) for i, r in enumerate(relocations))
    changed = replace(
        with_program(plan, commands=(replace(launch, relocations=relocations),)),
        modules=(Module(origin="onnxruntime", code=memoryview(model.SerializeToString())), *plan.modules[1:]),
        kernels=(replace(plan.kernels[0], parameters=parameters), *plan.kernels[1:]),
    )
    with pytest.raises(PlanInvalidError, match="kernel MatMul"):
        backend_of(changed)


def test_a_plan_for_blocks_of_another_size_is_refused(path: Path) -> None:
    plan = plan_file(path)
    changed = replace(plan, modules=tuple(replace(m, origin="onnxruntime nchwc4") for m in plan.modules))
    with pytest.raises(
        DeviceMismatchError, match=f"layout nchwc4, this one has nchwc{onnx_session.nchwc_block_size()}"
    ):
        backend_of(changed)


def test_a_module_of_another_origin_is_refused(path: Path) -> None:
    plan = plan_file(path)
    changed = replace(plan, modules=tuple(replace(m, origin="cudnn") for m in plan.modules))
    with pytest.raises(PlanInvalidError, match="origin 'cudnn'"):
        backend_of(changed)


def test_without_onnxruntime_the_error_says_what_to_install(path: Path, tmp_path: Path) -> None:
    encoder.write(plan_file(path), tmp_path / "model.plan")
    code = """
import sys, nimblert.executable
try:
    nimblert.loading.load(sys.argv[1])
except nimblert.DeviceMismatchError as exc:
    print(exc)
"""
    assert "pip install 'nimblert[cpu]'" in python(code, tmp_path / "model.plan", without=["onnxruntime"])


def test_onnx_runtime_reports_to_nobody(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder.write(plan_file(path), tmp_path / "model.plan")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("ORT_DISABLE_TELEMETRY", "CI", "XDG_CACHE_HOME"):  # the last two may silence it too
        monkeypatch.delenv(name, raising=False)
    python("import sys, nimblert; nimblert.load(sys.argv[1]).close()", tmp_path / "model.plan")
    assert list(home.rglob("*")) == []  # no identifier of this machine


def test_sessions_of_others_still_work_beside_ours(path: Path) -> None:
    plan = plan_file(path)
    backend = backend_of(plan)
    assert_same(path, {"x": X})
    backend.close()


def test_a_profile_measures_each_command(path: Path) -> None:
    plan = plan_file(path, joins=False)
    backend = backend_of(plan)
    assert all(ns > 0 for ns in backend.profile())
    slow = [0.02, 0.0, 0.04]
    backend._bound = [(c, partial(time.sleep, s)) for c, s in zip(plan.programs[0].commands, slow, strict=True)]
    durations = backend.profile()
    assert all(s <= ns / 1e9 < s + 5 for ns, s in zip(durations, slow, strict=True))
    backend.close()


class _Counted(tuple[Command, ...]):
    """Commands, and how often all were looked at."""

    __slots__ = ()
    looks = 0

    def __iter__(self) -> Iterator[Command]:
        _Counted.looks += 1
        return super().__iter__()


def test_commands_are_bound_one_by_one_without_a_look_at_all_others_for_each(tmp_path: Path) -> None:
    looks = []
    for count in (10, 30):
        chain = [node("Tanh", [f"v{i}"], [f"v{i + 1}"]) for i in range(count)]
        path = write_model(tmp_path / "m.onnx", chain, [floats("v0", 2)], [floats(f"v{count}", 2)])
        plan = plan_file(path, joins=False)
        plan = with_program(plan, commands=_Counted(plan.programs[0].commands))
        backend = backend_of(plan)
        before = _Counted.looks
        assert len(backend.profile()) == count
        looks.append(_Counted.looks - before)
        backend.close()
    assert looks[0] == looks[1]
