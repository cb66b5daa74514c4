"""Five model families, exported from PyTorch: a plan's outputs are ONNX Runtime's, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
from cpu_plans import plan_file, run_onnxruntime, run_plan
from families import FAMILIES, export
from subprocesses import FRAMEWORKS, python

from nimblec.onnx_export.exporting import rules_by_operator, short_histories
from nimblec.plan import encoder
from nimblert import golden
from nimblert.check import verify

_REPLAY = """
import numpy as np, nimblert, nimblert.executable, nimblert.golden
import sys
for name in {families!r}:
    with nimblert.loading.load(f"{{sys.argv[1]}}/{{name}}.plan", poison=True) as model:
        outputs = model.run(nimblert.golden.draw_inputs(model.program, 1))
        np.savez(f"{{sys.argv[1]}}/{{name}}.npz", *outputs.values())
loaded = {frameworks!r} & sys.modules.keys()
assert not loaded, loaded
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write every family as NAME.onnx, NAME.plan, and NAME.npz with what a process without torch computed."""
    folder = tmp_path_factory.mktemp("families")
    with rules_by_operator(), short_histories():  # the same nodes, sooner
        files = [export(name, folder / f"{name}.onnx", dynamo=True) for name in FAMILIES]
    for file in files:
        encoder.write(plan_file(file), file.with_suffix(".plan"))
    python(_REPLAY.format(families=FAMILIES, frameworks=set(FRAMEWORKS)), folder, without=FRAMEWORKS)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_replay_without_frameworks_equals_onnxruntime(folder: Path, name: str) -> None:
    path = folder / f"{name}.onnx"
    plan = plan_file(path)
    assert list(verify.problems(plan)) == []
    expected = run_onnxruntime(path, golden.draw_inputs(plan.programs[0], 1))
    with np.load(folder / f"{name}.npz") as replayed:
        actual = list(replayed.values())
    assert len(actual) == len(expected) > 0
    for got, wanted in zip(actual, expected, strict=True):
        assert np.isfinite(wanted).all()
        assert np.ptp(wanted) > 1e-4  # an output that says something
        np.testing.assert_array_equal(got, wanted, strict=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_old_exporter_too(tmp_path: Path, name: str) -> None:
    path = export(name, tmp_path / "model.onnx", dynamo=False)
    plan = plan_file(path)
    inputs = golden.draw_inputs(plan.programs[0], 2)
    for got, wanted in zip(run_plan(plan, inputs), run_onnxruntime(path, inputs), strict=True):
        np.testing.assert_array_equal(got, wanted, strict=True)


@pytest.mark.parametrize("name", ["inception", "bert", "unet"])
def test_many_streams_equal_one(folder: Path, name: str) -> None:
    path = folder / f"{name}.onnx"
    one, many = plan_file(path), plan_file(path, streams=None)
    assert one.programs[0].stream_count == 1
    assert many.programs[0].stream_count > 1
    inputs = golden.draw_inputs(one.programs[0], 3)
    for got, wanted in zip(run_plan(many, inputs), run_plan(one, inputs), strict=True):
        np.testing.assert_array_equal(got, wanted, strict=True)


def test_a_plan_is_the_same_bytes_each_time(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.plan"
    encoder.write(plan_file(folder / "bert.onnx"), again)
    assert again.read_bytes() == (folder / "bert.plan").read_bytes()


def test_equal_nodes_and_weights_are_stored_once(folder: Path) -> None:
    plan = plan_file(folder / "inception.onnx", joins=False)
    assert len(plan.kernels) < len(plan.programs[0].commands)
    assert len({bytes(module.code) for module in plan.modules}) == len(plan.modules)
    assert len({(weight.dtype, bytes(weight.data)) for weight in plan.weights}) == len(plan.weights)
