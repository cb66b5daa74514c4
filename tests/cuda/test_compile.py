"""Every way into the compiler, for the GPU: plans compute what torch computes there, bit for bit."""

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import eager
import gpu_models
import numpy as np
import pytest
import torch
from subprocesses import ROOT

import nimblec
import nimblert
from nimblert import golden
from nimblert.plan import Plan, Target

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = [
    pytest.mark.gpu,
    # What torch tells its own developers is not what is tested.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

MODELS = ("families.inception:small", "gpu_models:transformer", "families.resnet:small", "families.unet:small")
DIGITS = ROOT / "samples" / "digits.onnx"


@pytest.fixture(scope="module")
def resnet_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a ResNet as an ONNX file."""
    torch.manual_seed(0)
    module, args = importlib.import_module("families.resnet").small()
    path = tmp_path_factory.mktemp("onnx") / "resnet.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, args, path, dynamo=False)
    return path


@pytest.fixture(scope="module")
def perceptron_pt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model as a file of torch.export.save."""
    torch.manual_seed(0)
    module, args = gpu_models.perceptron()
    path = tmp_path_factory.mktemp("exported") / "perceptron.pt2"
    torch.export.save(torch.export.export(module, args), path)
    return path


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler", resnet_onnx: Path, perceptron_pt2: Path) -> None:
    gpu_compiler.start(*MODELS, DIGITS, resnet_onnx, perceptron_pt2)


def replayed(plan: Plan, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what a plan computes in poisoned memory."""
    with nimblert.load(plan, poison=True) as executable:
        return executable.run(inputs)


def test_a_module_of_this_process() -> None:
    torch.manual_seed(3)
    module, (x,) = gpu_models.perceptron()
    plan = nimblec.compile(module, (x,), target="cuda", level=0)
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    (expected,) = eager.Eager(module, (x,))([x.numpy()])
    with nimblert.load(plan) as executable:
        by_position, by_name = executable(x.numpy()), executable(x=x.numpy())
    assert isinstance(by_position, np.ndarray)
    assert isinstance(by_name, np.ndarray)
    assert by_position.tobytes() == by_name.tobytes() == expected.tobytes()


def test_a_module_whose_class_no_other_process_can_import() -> None:
    class Local(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.conv(x)).flatten(1)

    torch.manual_seed(4)
    module, x = Local().eval(), torch.randn(1, 3, 9, 9)
    plan = nimblec.compile(module, (x,), target="cuda", level=0)
    inputs = golden.draw_inputs(plan.programs[0], 1)
    eager.assert_equal(plan, replayed(plan, inputs), eager.Eager(module, (x,))(list(inputs.values())))


@pytest.mark.parametrize("model", MODELS)
def test_a_model_by_its_name(gpu_compiler: "GpuCompiler", model: str) -> None:
    plan = gpu_compiler.plan(model)
    assert plan.target is Target.CUDA
    reference = eager.build(model)
    for seed in (1, 2):
        inputs = golden.draw_inputs(plan.programs[0], seed)
        expected = reference(list(inputs.values()))
        assert all(np.isfinite(e.astype(np.float64)).all() for e in expected)
        eager.assert_equal(plan, replayed(plan, inputs), expected)


@pytest.mark.parametrize("model", [m for m in MODELS if m != "families.unet:small"])
def test_models_without_atomics_are_equal_in_every_bit(gpu_compiler: "GpuCompiler", model: str) -> None:
    record = gpu_compiler.plan(model).programs[0].golden
    assert record is not None
    assert record.tolerance == 0


def test_bfloat16_goes_in_and_comes_out(gpu_compiler: "GpuCompiler") -> None:
    program = gpu_compiler.plan("gpu_models:transformer").programs[0]
    assert [t.dtype for t in (*program.inputs, *program.outputs)] == ["bfloat16", "bfloat16"]
    assert golden.draw_inputs(program, 1)["x"].dtype.name == "bfloat16"


def test_ops_know_where_in_the_model_they_are(gpu_compiler: "GpuCompiler") -> None:
    program = gpu_compiler.plan("families.resnet:small").programs[0]
    assert ("aten.convolution.default", "stem.0") in {(op.name, op.source) for op in program.ops}


def test_an_exported_file(gpu_compiler: "GpuCompiler", perceptron_pt2: Path) -> None:
    plan = gpu_compiler.plan(perceptron_pt2)
    inputs = golden.draw_inputs(plan.programs[0], 1)
    expected = eager.build("gpu_models:perceptron")(list(inputs.values()))
    eager.assert_equal(plan, replayed(plan, inputs), expected)


def test_an_onnx_file_agrees_with_onnxruntime(gpu_compiler: "GpuCompiler", resnet_onnx: Path) -> None:
    from cpu_plans import run_onnxruntime

    plan = gpu_compiler.plan(resnet_onnx)
    for seed in (1, 2):
        inputs = golden.draw_inputs(plan.programs[0], seed)
        (expected,) = run_onnxruntime(resnet_onnx, inputs)
        (actual,) = replayed(plan, inputs).values()
        assert actual.shape == expected.shape
        assert np.abs(actual - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("digit", [0, 3, 7, 9])
def test_the_digits_sample(gpu_compiler: "GpuCompiler", digit: int) -> None:
    from cpu_plans import run_onnxruntime

    image = np.load(ROOT / "samples" / f"digit_{digit}.npy")
    outputs = replayed(gpu_compiler.plan(DIGITS), {"image": image})
    assert outputs["digit"].tolist() == [digit]
    assert outputs["digit"].dtype == np.int64
    _, probabilities = run_onnxruntime(DIGITS, {"image": image})
    np.testing.assert_allclose(outputs["probabilities"], probabilities, rtol=0, atol=1e-3)
