"""What `nimblec.compile` takes, and the sentence for everything else."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from cpu_plans import floats, write_model
from onnx import helper

import nimblec
from nimblec.base.options import InputSpec, Options, read_options
from nimblert import loading

DIGITS = Path(__file__).parents[1] / "samples" / "digits.onnx"


class Scaled(torch.nn.Module):
    """A layer, and arguments of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, tables: dict[str, torch.Tensor], *, scale: torch.Tensor) -> torch.Tensor:
        """Map x (n, 3), tables["bias"] (2,) and scale () to (n, 2)."""
        return self.layer(x) * scale + tables["bias"]


@pytest.fixture
def scaled() -> tuple[Scaled, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return Scaled().eval(), (torch.randn(4, 3), {"bias": torch.randn(2)}), {"scale": torch.tensor(2.0)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": "gpu"}, "target: 'gpu', expected 'auto' or 'cuda' or 'cpu'"),
        ({"level": 9}, "level: 9, expected None or 0 or 1 or 2"),
        ({"level": True}, "level: True, expected"),
        ({"level": 1.0}, "level: 1.0, expected"),
        ({"precision": "int8"}, "precision: 'int8', expected 'keep' or 'fp32'"),
        ({"streams": "many"}, "streams: 'many', expected auto, max, or a number of streams from 1"),
        ({"streams": 0}, "streams: 0, expected"),
        ({"streams": "9" * 5000}, "streams: '999"),
        ({"memory_limit": "64 apples"}, "memory_limit: '64 apples', expected a number of bytes such as 1000000, 64MiB"),
        ({"memory_limit": -1}, "memory_limit: -1, expected"),
        ({"memory_limit": 1.5}, "memory_limit: 1.5, expected"),
        ({"reproducible": True, "level": 2}, "--reproducible: -O2 chooses kernels by timing them: give -O1 or -O0"),
        ({"max_error": float("nan")}, "max_error: nan, expected a number from 0, such as 1e-3"),
        ({"print_passes": 1}, "print_passes: 1, expected False or True"),
        ({"max_error": "little"}, "max_error: 'little', expected"),
        ({"inputs": "image:1x3"}, "inputs: 'image:1x3', expected {\"image\": (1, 3, 224, 224)}"),
        ({"inputs": ["image"]}, "inputs: 'image' is not NAME:SHAPE[:DTYPE]"),
        ({"inputs": {"image": 3}}, "inputs: 3, expected a shape such as (1, 3, 224, 224)"),
        ({"inputs": {"image": (1, "3n")}}, "inputs: '3n', expected a size such as 4, or a name"),
        ({"inputs": {"image": "int64"}}, "inputs: 'image:int64' is not NAME:SHAPE[:DTYPE], such as image:1x3x224x224,"),
        ({"inputs": ["image:nx3,4x"]}, "inputs: 'image:nx3,4x' is not NAME:SHAPE[:DTYPE]"),
        ({"inputs": {"image": (1, -3)}}, "inputs: -3, expected a size from 0 to"),
        ({"inputs": {"image": (2**63,)}}, "inputs: 9223372036854775808, expected a size from 0 to"),
        ({"inputs": ["x:n,3", "x:2x3"]}, "--input x: given twice; give it once"),
        ({"dims": ["batch=4"]}, "dims: ['batch=4'], expected a dict by name"),
        ({"dims": ("batch", 4)}, "dims: ('batch', 4), expected a dict by name"),
        ({"dynamic_shapes": 4}, "dynamic_shapes: 4, expected a dict or a list, as torch.export.export takes them"),
        ({"dims": {"batch": 4.0}}, "dims: 4.0, expected a size such as 4"),
        ({"dims": {3: 4}}, "dims: 3 is not a name: expected a string"),
        ({"examples": {"image": "photo.npy"}}, "examples: 'image' is 'photo.npy', expected an array of one of"),
        ({"examples": {"image": np.array(["text"])}}, "examples: 'image' is an array of <U4, expected"),
        ({"examples": {"image": np.ma.array([1.0])}}, "examples: 'image' is a masked array"),
        ({"timing_cache": None}, "timing_cache: None, expected a path"),
        ({"timing_cache": "~nobody-here/t"}, "timing_cache: '~nobody-here/t': the home folder is not"),
        ({"plan_cache": 3}, "plan_cache: 3, expected a path"),
        ({"plan_cache": "a\0b"}, "plan_cache: 'a\\x00b', expected a path"),
        ({"stream": "max"}, "there is no option 'stream': did you mean 'streams'?"),
        ({"verbosity": 3}, "there is no option 'verbosity': expected one of target, inputs, dims"),
    ],
)
def test_compile_refuses_option(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(nimblec.ArgumentError, match="^" + re.escape(sentence)) as refused:
        nimblec.compile(DIGITS, **{"target": "cpu", **options})
    assert isinstance(refused.value, nimblec.InputError)
    assert isinstance(refused.value, TypeError)
    assert len(str(refused.value)) < 300


def test_options_have_no_caches_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert (read_options().timing_cache, read_options().plan_cache) == (None, None)
    assert nimblec.compile(DIGITS, target="cpu").programs
    with pytest.raises(nimblec.ArgumentError, match=r"^plan_cache: '~/plans': the home folder is not known"):
        read_options(plan_cache="~/plans")
    assert read_options(timing_cache=tmp_path, plan_cache=None).timing_cache == tmp_path


def test_options_are_read_as_the_command_line_writes_them(tmp_path: Path) -> None:
    read = read_options(
        inputs={"x": (1, np.int64(3)), "ids": "1x16:int64"},
        dims={"batch": 4},
        streams=4,
        memory_limit="1.5GB",
        max_error=1,
        timing_cache=str(tmp_path),
        plan_cache="~/plans",
    )
    expected = Options(
        inputs=(InputSpec(name="x", shape=(1, 3)), InputSpec(name="ids", shape=(1, 16), dtype="int64")),
        dims=(("batch", 4),),
        streams="4",
        memory_limit=1_500_000_000,
        max_error=1.0,
        timing_cache=tmp_path,
        plan_cache=Path.home() / "plans",
    )
    assert read == expected
    assert read_options(inputs=["x:1x3", InputSpec(name="y", shape=())]).inputs == (
        InputSpec(name="x", shape=(1, 3)),
        InputSpec(name="y", shape=()),
    )
    (example,) = read_options(examples={"x": torch.ones(2)}).examples
    assert (example[0], example[1].tolist()) == ("x", [1, 1])


def test_options_reach_the_plan(tmp_path: Path) -> None:
    write_model(
        tmp_path / "m.onnx", [helper.make_node("Exp", ["x"], ["y"])], [floats("x", "n", None)], [floats("y", "n", None)]
    )
    plan = nimblec.compile(tmp_path / "m.onnx", target="cpu", inputs={"x": (2, 5)}, streams=1, memory_limit="1MiB")
    assert plan.programs[0].inputs[0].shape == (2, 5)
    with pytest.raises(nimblec.CompileError, match="memory limit: 1 bytes are too few"):
        nimblec.compile(_two_steps(tmp_path), target="cpu", memory_limit="1")


def _two_steps(folder: Path) -> Path:
    nodes = [helper.make_node("Exp", ["x"], ["a"]), helper.make_node("TopK", ["a", "k"], ["y", "i"])]
    outputs = [floats("y", 2), ("i", onnx.TensorProto.INT64, (2,))]
    return write_model(folder / "steps.onnx", nodes, [floats("x", 4)], outputs, constants={"k": np.array([2])})


@pytest.mark.parametrize("given", [onnx.load(DIGITS), DIGITS.read_bytes(), bytearray(DIGITS.read_bytes()), DIGITS])
def test_an_onnx_model_may_be_in_memory(given: Any) -> None:
    with loading.load(nimblec.compile(given, target="cpu")) as model:
        digit = model.run({"image": np.load(DIGITS.with_name("digit_7.npy"))})["digit"]
    assert digit.tolist() == [7]


def test_an_onnx_model_in_memory_has_its_weights_with_it(tmp_path: Path) -> None:
    model = onnx.load(write_model(
        tmp_path / "m.onnx", [helper.make_node("Mul", ["x", "w"], ["y"])], [floats("x", 4)], [floats("y", 4)],
        constants={"w": np.ones(4, np.float32)},
    ))  # fmt: skip
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="data", size_threshold=0)
    beside = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    with pytest.raises(
        nimblec.CompileError, match=r"initializer 'w' .* is stored in a file beside it: give the model's"
    ):
        nimblec.compile(beside, target="cpu")


def test_positional_and_keyword_arguments(scaled: tuple[Scaled, tuple[Any, ...], dict[str, Any]]) -> None:
    module, args, kwargs = scaled
    plan = nimblec.compile(module, args, kwargs=kwargs, target="cpu")
    inputs = {"x": args[0], "tables.bias": args[1]["bias"], "scale": kwargs["scale"]}
    with loading.load(plan) as model:
        assert [tensor.name for tensor in model.inputs] == list(inputs)
        found = model.run({name: tensor.numpy() for name, tensor in inputs.items()})
    np.testing.assert_allclose(found["output"], module(*args, **kwargs).detach().numpy(), rtol=1e-5)


def test_a_dict_that_stands_last_is_a_positional_argument() -> None:
    def added(x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return x + more["y"]

    plan = nimblec.compile(added, (torch.ones(2), {"y": torch.ones(2)}), target="cpu")
    with loading.load(plan) as model:
        assert model.run({"x": np.ones(2, np.float32), "more.y": np.ones(2, np.float32)})["output"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("model", "given", "sentence"),
    [
        (3, {}, "the model is of type int: expected a torch.nn.Module or a function with its example inputs"),
        (None, {}, "the model is of type NoneType: expected"),
        ({"a": 1}, {}, "the model: entry 'a' is int, expected (module, example_inputs)"),
        ({"a": 1}, {"kwargs": {}}, "example_inputs: only a module, a function or an ExportedProgram takes them"),
        (torch.nn.Linear, {}, "the model is the class Linear: expected an instance of it"),
        (torch.nn.Identity(), {}, "example_inputs: a module or a function needs the arguments of one call"),
        (
            torch.nn.Identity(),
            {"example_inputs": {"x": torch.ones(2)}},
            "example_inputs: got dict, expected a tensor or a tuple of the positional arguments; keyword arguments",
        ),
        (torch.nn.Identity(), {"example_inputs": np.ones(2)}, "example_inputs: got ndarray, expected a tensor"),
        (torch.nn.Identity(), {"kwargs": [1]}, "kwargs: got list, expected a dict of keyword arguments by name"),
        (DIGITS, {"example_inputs": (1,)}, "example_inputs: only a module, a function or an ExportedProgram takes"),
    ],
)
def test_what_is_no_model_or_no_arguments_is_refused(model: Any, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(nimblec.ArgumentError, match="^" + re.escape(sentence)):
        nimblec.compile(model, **given, target="cpu")


Identity, Linear, ones = torch.nn.Identity(), torch.nn.Linear, torch.ones(2)
DENSE = "input 'input': a plan holds dense tensors, and this one is "
NO_VALUES = "'weight' has no values yet: load the weights"
LACKS = "the model given has no {}: expected an ONNX model"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("model", "given", "sentence"),
    [
        (Identity, (torch.ones(2, device="meta"),), "^input 'input': a tensor of the device meta has no values"),
        (Identity, (ones.to_sparse(),), f"^{DENSE}torch.sparse_coo"),
        (Identity, (lambda: torch.nested.nested_tensor([ones]),), f"^{DENSE}nested: give it padded"),
        (torch.nn.LazyLinear(2), (ones,), NO_VALUES),
        (Linear(2, 2, device="meta"), (ones,), NO_VALUES),
        (Linear(2, 2), (ones, ones), r"the example inputs do not fit Linear\.forward: too many positional"),
        (Linear(2, 2), (np.ones(2),), r"argument 'input' is a numpy array: give torch\.from_numpy of it"),
        (b"\xff\xfe", (), "the bytes given are not an ONNX model"),
        (b"", (), LACKS.format("ir_version")),
        (onnx.ModelProto(ir_version=10, graph=onnx.GraphProto()), (), LACKS.format("opset_import")),
        (onnx.ModelProto(ir_version=10, opset_import=[onnx.OperatorSetIdProto(version=18)]), (), LACKS.format("graph")),
    ],
)
def test_compile_refuses_model_or_tensor(model: Any, given: tuple[Any, ...], sentence: str) -> None:
    args = tuple(each() if callable(each) else each for each in given)
    with pytest.raises(nimblec.CompileError, match=sentence):
        nimblec.compile(model, *([args] if args else []), target="cpu")


def test_an_input_that_no_memory_holds() -> None:
    with pytest.raises(nimblec.CompileError, match=r"an input of shape \(1125899906842624, 2\) takes more memory than"):
        nimblec.compile(Identity, (torch.ones(1, 2),), target="cpu", inputs={"input": (1 << 50, 2)})


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_torchscript_is_refused_with_a_way_out() -> None:
    script = torch.jit.trace(torch.nn.ReLU(), torch.ones(2))
    with pytest.raises(nimblec.ArgumentError, match=r"TorchScript, which has no Python code .*: give the torch\.nn"):
        nimblec.compile(script, torch.ones(2), target="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), script)
    with pytest.raises(nimblec.ArgumentError, match=r"^the model's module '1' is TorchScript, which has no Python"):
        nimblec.compile(model, torch.ones(1, 2), target="cpu")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(nimblec.ArgumentError, match=r"^the model's module '1' is TorchScript, which has no Python"):
        nimblec.training_step(model, torch.nn.functional.mse_loss, sgd, (torch.ones(1, 2), torch.ones(1, 2)))


def test_example_arrays_and_shapes_replace_a_modules_inputs() -> None:
    plan = nimblec.compile(torch.nn.ReLU(), torch.ones(2), target="cpu", inputs={"input": (3, 5)})
    assert plan.programs[0].outputs[0].shape == (3, 5)
    plan = nimblec.compile(lambda x: x * 2, torch.ones(2), target="cpu", examples={"x": np.arange(7, 9)})
    assert (plan.programs[0].inputs[0].dtype, plan.programs[0].inputs[0].sample_range) == ("int64", (7, 8))
    with pytest.raises(nimblec.CompileError, match=r"--dim n: only an ONNX model and a dynamic ExportedProgram have"):
        nimblec.compile(torch.nn.ReLU(), torch.ones(2), target="cpu", dims={"n": 3})


RETURNS = """
import torch
def pair(): return torch.nn.ReLU(), torch.ones(2)
def three(): return (lambda x, *, y: x * y), (torch.ones(2),), {"y": torch.ones(2)}
def positional(): return (lambda x, more: x + more["y"]), (torch.ones(2), {"y": torch.ones(2)})
def keywords(): return torch.nn.ReLU(), {"input": torch.ones(2)}
def nothing(): return 3
"""


def test_what_a_named_callable_may_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "returns.py").write_text(RETURNS)
    monkeypatch.syspath_prepend(tmp_path)
    for name, inputs in {"pair": ["input"], "three": ["x", "y"], "positional": ["x", "more.y"]}.items():
        plan = nimblec.compile(f"returns:{name}", target="cpu")
        assert [tensor.name for tensor in plan.programs[0].inputs] == inputs
    with pytest.raises(
        nimblec.CompileError, match=r"^returns:keywords: example_inputs: got dict, expected a tensor or"
    ):
        nimblec.compile("returns:keywords", target="cpu")
    with pytest.raises(nimblec.CompileError, match=r"returned int, expected \(module, example_inputs\), \(module, ex"):
        nimblec.compile("returns:nothing", target="cpu")
