"""Plans for GPUs that are not here, compiled where Triton is installed, and checked without running them."""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch
from command_line import CommandLine
from torch._subclasses.fake_tensor import FakeTensorMode

import nimblert
from nimblec.base.ir import Access, BufferKind
from nimblec.base.options import TargetChoice
from nimblec.cuda import compile as cuda_compile
from nimblec.cuda.absent.buffers import BufferTable
from nimblec.cuda.absent.worker import find_gpu
from nimblec.inspect.plan_difference import compare
from nimblec.inspect.verification import Result, verify
from nimblec.kernels.gpu import GPU, KNOWN
from nimblert.check.verify import read_plan

SAMPLES = Path(__file__).parents[2] / "samples"
needs_cuda_build = pytest.mark.skipif(
    find_spec("triton") is None or torch.version.cuda is None, reason="needs PyTorch's CUDA build and Triton"
)
TARGETS = [target for target in get_args(TargetChoice) if target.startswith("sm_")]

MODEL = """
import torch
from torch import nn
from torch.nn import functional

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.SiLU(),
            nn.MaxPool2d(2), nn.Conv2d(16, 32, 1), nn.Upsample(scale_factor=2),
        )
        self.groups = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.filter = nn.Conv1d(32, 32, 5, padding=2)
        self.norm = nn.LayerNorm(32)
        self.joined = nn.Linear(32, 96)
        self.steps = nn.LSTM(32, 16)
        self.register_buffer("total", torch.zeros(1, 36, 32))

    def forward(self, image):
        pixels = self.groups(self.images(image)).flatten(2)
        rows = self.norm(self.filter(pixels).transpose(1, 2))
        heads = self.joined(rows).reshape(1, -1, 6, 16).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(*heads.chunk(3, 1))
        self.total += torch.bmm(seen[0], seen[0].transpose(1, 2)).sum() + torch.cumsum(rows > 0, 1).type_as(rows)
        states = self.steps(rows[:, :4])[0]
        return self.total.softmax(-1), states, torch.zeros_like(states)

def network():
    torch.manual_seed(0)
    return Network().eval(), (torch.randn(1, 3, 8, 8),)

def transposed():
    return nn.ConvTranspose2d(4, 4, 3, stride=2), (torch.randn(1, 4, 8, 8),)
"""


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def test_each_target_has_a_record() -> None:
    assert [f"sm_{find_gpu(target).architecture}" for target in TARGETS] == TARGETS
    assert len(KNOWN) == len(TARGETS)


def test_options_of_other_plans_are_refused(tmp_path: Path, command_line: CommandLine) -> None:
    given = ("compile", SAMPLES / "digits.onnx", "-o", tmp_path / "digits.plan", "--target")
    assert "leave -O out" in command_line.refused(*given, "sm_90", "-O1")
    assert "leave it out" in command_line.refused(*given, "sm_90", "--refittable")
    assert "'sm_33' is not one of" in command_line.refused(*given, "sm_33")


def test_missing_triton_is_named(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_compile, "find_spec", lambda _: None)
    said = command_line.refused("compile", SAMPLES / "digits.onnx", "-o", tmp_path / "a.plan", "--target", "sm_80")
    assert said.endswith("pip install triton")


@needs_cuda_build
@pytest.mark.parametrize(
    "target", [t if t == "sm_90" else pytest.param(t, marks=pytest.mark.slow) for t in TARGETS]
)
def test_network_compiles_for_absent_gpu(
    target: str, tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernels, generated ones, a product of two computed matrices, and state that is written in place."""
    (tmp_path / "absent_network.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "network.plan"
    how = ("--target", target, "--precision", "fp16", "--no-plan-cache", "--quiet")
    command_line.prints("compile", "absent_network:network", "-o", output, *how)
    checks = {check.name: check for check in verify(output)}
    assert not [check for check in checks.values() if check.result is Result.FAILED]
    plan = read_plan(output)
    assert plan.device.compute_capability == find_gpu(target).capability
    assert [tensor.name for tensor in plan.state if tensor.name] == ["total"]
    assert {"convolution", "depthwise", "pool", "attention", "recurrence"} <= {kernel.symbol for kernel in plan.kernels}
    assert plan.programs[0].golden is not None


@needs_cuda_build
def test_fp8_halves_weights_and_tells_fp16_error_too(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "absent_layers.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def layers():\n"
        "    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval(), (torch.randn(40, 64),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    how = ("compile", "absent_layers:layers", "-o", tmp_path / "layers.plan", "--precision", "fp8", "--no-plan-cache")
    done = command_line(*how, "--target", "sm_90")
    assert "largest magnitude (fp16: " in done.out
    assert not [check for check in verify(tmp_path / "layers.plan") if check.result is Result.FAILED]
    # A byte for each weight, besides biases and factors.
    assert 2 * 64 * 256 < read_plan(tmp_path / "layers.plan").weights_nbytes < 1.2 * 2 * 64 * 256
    said = command_line.refused(*how, "--target", "sm_86", "--quiet")
    assert "the GPU has 8.6: give --precision fp16" in said


@pytest.mark.gpu
def test_absent_plan_runs_on_its_gpu(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden record is the CPU's; state is written by two runs, as torch writes it."""
    architecture = f"sm_{GPU.current().architecture}"
    if architecture not in TARGETS:
        pytest.skip(f"{architecture} has no record")
    (tmp_path / "absent_here.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "network.plan"
    how = ("--target", architecture, "--no-plan-cache", "--quiet")
    command_line.prints("compile", "absent_here:network", "-o", output, *how)
    checks = {check.name: check.result for check in verify(output)}
    assert checks["golden"] is Result.PASSED
    module = importlib.import_module("absent_here").network()[0]
    image = torch.randn(1, 3, 8, 8)
    with nimblert.load(output) as executable:
        for _ in range(2):
            found = executable.run({"image": image.numpy()}).values()
            for output, expected in zip(found, module(image), strict=True):
                torch.testing.assert_close(torch.from_numpy(output), expected.detach(), rtol=1e-2, atol=1e-3)


@needs_cuda_build
def test_memory_recorded_on_the_cpu_is_on_the_gpu() -> None:
    tracer = importlib.import_module("nimblec.cuda.absent.tracer").Tracer(KNOWN[0], BufferTable())
    with FakeTensorMode(), tracer:
        memory = torch.empty_strided((2, 3), (3, 1), device="cpu")
    assert memory.device.type == "cuda"


DIFFERENT = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self, activation, name):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Linear(16, 10)
        self.activation, self.name = activation, name

    def forward(self, image):
        pixels = self.activation(self.second(torch.relu(self.first(image))))
        return {self.name: self.last(pixels.mean((2, 3)))}

def network(activation=torch.tanh, name="y", size=16, more=0.0):
    torch.manual_seed(0)
    made = Network(activation, name).eval()
    with torch.no_grad():
        made.second.weight[2, 3, 1, 1] += more
    return made, (torch.randn(1, 3, size, size),)

def weight():
    return network(more=0.25)

def kernel():
    return network(activation=torch.sigmoid)

def size():
    return network(size=20)

def name():
    return network(name="z")
"""


@needs_cuda_build
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_diff_of_absent_plans_names_change(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "absent_different.py").write_text(DIFFERENT)
    monkeypatch.syspath_prepend(tmp_path)
    plans = {}
    for name in ("network", "weight", "kernel", "size", "name"):
        how = ("--target", "sm_90", "--precision", "fp16", "--no-plan-cache", "--quiet")
        command_line.prints("compile", f"absent_different:{name}", "-o", tmp_path / f"{name}.plan", *how)
        plans[name] = read_plan(tmp_path / f"{name}.plan")
    said: dict[str, dict[str, list[str]]] = {}
    for name in ("weight", "kernel", "size", "name"):
        for change in compare(plans["network"], plans[name]).changes:
            said.setdefault(name, {}).setdefault(change.section, []).append(change.note or f"{change.after}")
    assert said["weight"].keys() == {"weights", "numerics"}
    assert said["weight"]["weights"] == ["values differ by up to 0.25, read by second"]
    assert said["kernel"].keys() - {"memory"} == {"kernels", "numerics"}
    assert said["kernel"]["kernels"] == ["other code in 1 launch of second"]
    assert said["size"]["interface"] == ["image: float32 1x3x20x20"]
    assert "weights" not in said["size"]
    assert said["name"] == {"interface": ["z: float32 1x10"]}


@needs_cuda_build
def test_call_of_a_library_is_named(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "absent_transposed.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "transposed.plan"
    how = ("--target", "sm_90", "--no-plan-cache", "--quiet")
    said = command_line.refused("compile", "absent_transposed:transposed", "-o", output, *how)
    assert "only a library's kernel computes it" in said
    assert not output.exists()


def test_buffer_table_knows_views_by_their_storage() -> None:
    table = BufferTable()
    with FakeTensorMode():
        weight = torch.empty(4, 8, device="meta")
        result = torch.empty(4, 8, dtype=torch.float16, device="meta")
    value = torch.arange(32.0).reshape(4, 8)
    table.add_constant(weight, value, "weight", is_state=False)
    output = table.add_output("y", result[:, 2:])
    assert (output.offset, output.strides) == (4, (8, 1))
    assert list(table.accesses(weight[1])) == [Access(buffer=0, offset=32, nbytes=32)]
    constant, written = table.buffers([1])
    assert (constant.kind, written.kind) == (BufferKind.CONSTANT, BufferKind.OUTPUT)
    assert constant.data is not None
    assert bytes(constant.data) == value.numpy().tobytes()
    assert table.buffers([0])[0].kind is BufferKind.STATE
