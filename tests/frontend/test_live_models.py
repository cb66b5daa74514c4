"""Models of this process: what is exported of them, what is handed to the capture process, and how they are left."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from control_models import MODELS
from torch import Tensor, nn

import nimblec
from nimblec.base.options import Options, read_options
from nimblec.base.source import LiveModel, Source
from nimblec.cuda.load import load_models
from nimblec.cuda.request import CompileRequest
from nimblec.find_source import find_source
from nimblec.onnx_export.value_sizes import as_onnx
from nimblec.pytorch import sources
from nimblec.pytorch.dynamic_export import export_dynamic
from nimblec.pytorch.handover import ValueSizesError, hand_over
from nimblert import loading

REGISTRY: dict[str, float] = {}
"""What `Forgetful` keeps outside of itself, as libraries do."""


class Forgetful(nn.Module):
    """A copy that pickle makes lacks its table, and another process its entry in the registry."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"gain": torch.tensor([2.0, 3.0])}
        REGISTRY["shift"] = 5.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "table": None}

    def forward(self, x: Tensor) -> Tensor:
        """Map (2,) to (2,)."""
        return x * self.table["gain"] + REGISTRY["shift"]


class WithLambda(nn.Module):
    """Holds what pickle refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = lambda x: torch.relu(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        """Map any shape to the same."""
        return self.activation(x)


def live(model: Any, *args: Any, **kwargs: Any) -> Source:
    return Source(kind="live", live=LiveModel(model=model, args=args, kwargs=kwargs))


def handed(model: Any, folder: Path, *args: Any, **kwargs: Any) -> tuple[Any, tuple[str, ...]]:
    """Return what the capture process gets: the call that it loads, and the notes."""
    source, _, notes = hand_over(live(model, *args, **kwargs), Options(), folder)
    assert source.kind == "exported"
    return sources.load(source, Options())["main"], notes


class Steps(nn.Module):
    """A loop in Python, which fixes the number of steps."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the squares of rows."""
        total = torch.zeros(2)
        for step in range(x.shape[0]):
            total = total + x[step] ** 2
        return total


def test_size_fixed_by_code_hands_over_alone(tmp_path: Path) -> None:
    options = read_options(dims={"steps": (2, 5)})
    shapes = ({0: torch.export.Dim("steps", min=2, max=8)},)
    module = LiveModel(model=Steps(), args=(torch.ones(4, 2),), dynamic_shapes=shapes)
    source, options, notes = hand_over(export_dynamic(module, options), options, tmp_path)
    request = CompileRequest(source=source, options=options, output=tmp_path / "model.plan", sys_path=())
    assert "the module's code fixes one" in notes[0]
    for ((_, ((_, size),)), model) in load_models(request, device="cpu").items():
        (x,) = model.args
        assert x.shape == (size, 2)
        torch.testing.assert_close(model.module(x), {"output": Steps()(x)})


class Above(nn.Module):
    """Its output has a size that depends on values."""

    def forward(self, x: Tensor, least: Tensor) -> Tensor:
        """Return the elements above a number."""
        return x[x > least]


def test_sizes_of_values_are_bounded_in_an_onnx_file(tmp_path: Path) -> None:
    x, least = torch.tensor([1.0, -2.0, 3.0, -4.0]), torch.tensor(0.0)
    with pytest.raises(ValueSizesError) as raised:
        hand_over(live(Above(), x, least), Options(), tmp_path)
    source, options, _ = as_onnx(raised.value.call, Options(), tmp_path)
    request = CompileRequest(source=source, options=options, output=tmp_path / "model.plan", sys_path=())
    (model,) = load_models(request, device="cpu").values()
    assert [tuple(tensor.shape) for _, tensor in model.inputs] == [(4,), ()]
    values, sizes = model.module(x, least)
    assert sizes.tolist() == [2]
    assert values[:2].tolist() == [1, 3]


@pytest.mark.parametrize("name", MODELS)
def test_loops_and_branches_stay_as_exported(name: str, tmp_path: Path) -> None:
    module, args = MODELS[name]()
    source, _, _ = hand_over(live(module.eval(), *args), Options(), tmp_path)
    assert source.kind == "exported"


@pytest.mark.parametrize("build", [Forgetful, WithLambda])
def test_live_model_hands_over(build: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = build(), torch.tensor([-1.0, 4.0])
    expected = module(x)
    call, _ = handed(module, tmp_path, x)
    monkeypatch.setitem(REGISTRY, "shift", 0.0)
    assert [name for name, _ in call.inputs] == ["x"]
    torch.testing.assert_close(call.module(*call.args, **call.kwargs), {"output": expected})


@pytest.mark.parametrize("build", [Forgetful, WithLambda])
def test_the_cpu_target_needs_no_pickling(build: Callable[[], nn.Module]) -> None:
    module, x = build(), torch.tensor([-1.0, 4.0])
    with loading.load(nimblec.compile(module, x, target="cpu")) as model:
        np.testing.assert_allclose(model(x.numpy()), module(x).numpy())


def test_names_and_structure_are_handed_over(tmp_path: Path) -> None:
    def model(x: Tensor, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> Any:
        return {"most": torch.topk(x * scale, 2), "sum": (pair[0] + pair[1], None)}

    x, pair, scale = torch.randn(4), (torch.ones(2), torch.ones(2)), torch.tensor(2.0)
    call, notes = handed(model, tmp_path, x, pair, scale=scale)
    assert [name for name, _ in call.inputs] == ["x", "pair.0", "pair.1", "scale"]
    assert list(call.module(*call.args, **call.kwargs)) == ["most.0", "most.1", "sum.0"]
    assert notes == ("the model returns None as 'sum.1': the plan has no such output",)


class Busy(nn.Module):
    """Counts, keeps a table, registers a hook and writes statistics in its run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.count = 0
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 3) to (n, 3)."""
        self.count += 1
        self.kept["last"] = x
        self.norm.register_forward_hook(lambda *_: None)
        self.added = x
        return self.norm(x)


def test_a_module_is_left_as_it_was(tmp_path: Path) -> None:
    module = Busy()
    weight, statistics = module.norm.weight, module.norm.running_mean.clone()
    address = weight.data_ptr()
    nimblec.compile(module, torch.randn(4, 3), target="cpu")
    handed(module, tmp_path, torch.randn(4, 3))
    assert (module.count, module.kept, hasattr(module, "added")) == (0, {}, False)
    assert not module.norm._forward_hooks
    assert not module._forward_hooks
    assert module.norm.weight is weight
    assert weight.data_ptr() == address
    assert torch.equal(module.norm.running_mean, statistics)
    assert module.norm.num_batches_tracked == 0


class Counting(nn.Module):
    """Has a state that torch.export does not see."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        """Map any shape to the same."""
        self.count += 1
        return x + self.count


class Accumulating(nn.Module):
    """Has a state in a buffer, which a plan keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        """Add 2 numbers to the total, and return it."""
        self.total.add_(x)
        return self.total * 1


def test_a_state_is_handed_over_in_buffers_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(nimblec.UnsupportedModelError, match="two runs on equal inputs differ in output 'output'"):
        handed(Counting(), tmp_path, torch.ones(2))
    module = Accumulating()
    call, _ = handed(module, tmp_path, torch.ones(2))
    assert [call.module(*call.args)["output"].tolist() for _ in range(2)] == [[1, 1], [2, 2]]
    assert module.total.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_what_torch_compile_returned_is_not_handed_over(tmp_path: Path) -> None:
    with pytest.raises(nimblec.UnsupportedModelError, match=r"the module was returned by torch\.compile"):
        handed(torch.compile(nn.ReLU()), tmp_path, torch.ones(2))


class Deciding(nn.Module):
    """Asks for a value."""

    def forward(self, x: Tensor) -> Tensor:
        """Map any shape to the same."""
        if x.sum() > 0:
            return x + 1
        return x - 1


class Wrong(nn.Module):
    """Multiplies what does not fit."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 4)."""
        return x @ torch.ones(7, 3)


def _line(kind: type, text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    return next(i for i, line in enumerate(lines[first:], first + 1) if text in line)


def test_a_decision_by_value_is_told_with_its_line_and_a_way_out(tmp_path: Path) -> None:
    where = f"line {_line(Deciding, 'if x.sum')} of {__file__}"
    sentence = (
        f"the module: {where} makes control flow or a size depend on the value of a tensor, and a plan is static: use "
        "torch.where or torch.cond there, or move it out of the model"
    )
    with pytest.raises(nimblec.TraceError, match=f"^{re.escape(sentence)}$"):
        nimblec.compile(Deciding(), torch.ones(3), target="cpu")
    with pytest.raises(nimblec.TraceError, match=f"^{re.escape(sentence)}$"):
        handed(Deciding(), tmp_path, torch.ones(3))


def test_a_wrong_shape_is_told_with_its_line(tmp_path: Path) -> None:
    where = re.escape(f"line {_line(Wrong, '@')} of {__file__} raised RuntimeError: ")
    sentence = f"^the module cannot be run on its example inputs: {where}(mm: )?mat1"
    with pytest.raises(nimblec.TraceError, match=sentence):
        nimblec.compile(Wrong(), torch.ones(3, 4), target="cpu")
    with pytest.raises(nimblec.TraceError, match=sentence):
        handed(Wrong(), tmp_path, torch.ones(3, 4))


def test_exporters_log_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(nimblec.TraceError):
        nimblec.compile(Deciding(), torch.ones(3), target="cpu")
    assert capfd.readouterr() == ("", "")


def test_constants_and_missing_outputs_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def model(x: Tensor, power: int, bias: Tensor | None, mode: str = "a") -> tuple[Tensor, None]:
        return x**power if bias is None and mode == "b" else x, None

    with caplog.at_level(logging.WARNING, "nimblec"):
        plan = nimblec.compile(model, (torch.ones(2), 3, None), kwargs={"mode": "b"}, target="cpu")
    with loading.load(plan) as loaded:
        assert loaded.run({"x": np.array([2, 3], np.float32)})["output_0"].tolist() == [8, 27]
    notes = [record.getMessage() for record in caplog.records]
    for note in (
        "argument 'power' is fixed to 3: only tensors are inputs of a plan",
        "argument 'bias' is fixed to None: only tensors are inputs of a plan",
        "argument 'mode' is fixed to 'b': only tensors are inputs of a plan",
        "the model returns None as 'output_1': the plan has no such output",
    ):
        assert note in notes


# --- exported programs


class Joined(nn.Module):
    """A dimension that two inputs share, and one that is twice as long."""

    def forward(self, x: Tensor, more: dict[str, Tensor], k: int) -> Tensor:
        """Map x (n, 3) and more["y"] (n, 3) to (n, 3)."""
        return x * k + more["y"]


@pytest.fixture(scope="module")
def dynamic() -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=2, max=64)
    args = (torch.randn(4, 3), {"y": torch.randn(4, 3)}, 5)
    return torch.export.export(Joined(), args, dynamic_shapes=({0: batch}, {"y": {0: batch}}, None))


def _symbol(program: torch.export.ExportedProgram) -> str:
    (symbol,) = program.range_constraints
    return str(symbol)


def test_a_dynamic_program_is_refused_with_its_dimensions(dynamic: torch.export.ExportedProgram) -> None:
    symbol = _symbol(dynamic)
    with pytest.raises(nimblec.UnsupportedModelError) as refused:
        nimblec.compile(dynamic, target="cpu")
    assert str(refused.value) == (
        f"the ExportedProgram has dynamic dimensions, and a plan is static: {symbol} (2 to 64) is axis 0 of 'x' and "
        f"axis 0 of 'more.y': give --dim {symbol}=<size>, in Python dims={{'{symbol}': <size>}}"
    )


@pytest.mark.parametrize(
    "given", ["dims", {"inputs": {"x": (7, 3)}}, {"examples": {"more.y": np.ones((7, 3), np.float32)}}, "arguments"]
)
def test_a_dynamic_program_takes_sizes(dynamic: torch.export.ExportedProgram, given: Any) -> None:
    args = None
    if given == "arguments":
        args, given = (torch.ones(7, 3), {"y": torch.ones(7, 3)}, 5), {}
    plan = nimblec.compile(
        dynamic, args, target="cpu", **({"dims": {_symbol(dynamic): 7}} if given == "dims" else given)
    )
    x, y = np.full((7, 3), 2, np.float32), np.ones((7, 3), np.float32)
    with loading.load(plan) as model:
        assert (model.run({"x": x, "more.y": y})["output"] == 11).all()


@pytest.mark.parametrize("dims", [{"batch": 4}, {"batch": (1, 4)}])
def test_inputs_of_other_sizes_lie_in_memory_as_the_example_does(dims: dict[str, Any], tmp_path: Path) -> None:
    image = torch.randn(2, 3, 8, 6).to(memory_format=torch.channels_last)
    program = torch.export.export(nn.Conv2d(3, 4, 3), (image,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "model.pt2")
    options = read_options(dims={_symbol(program): dims["batch"]})
    source = Source(kind="exported", model=str(tmp_path / "model.pt2"))
    if options.sizes:
        calls = sources.dynamic_program(source, options).calls(options)
    else:
        calls = {(("batch", 4),): sources.load(source, options)["main"]}
    for ((_, size),), call in calls.items():
        assert call.args[0].shape == (size, 3, 8, 6)
        assert call.args[0].is_contiguous(memory_format=torch.channels_last)


def test_a_dynamic_file_is_refused_and_takes_sizes(dynamic: torch.export.ExportedProgram, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(dynamic, path)
    with pytest.raises(nimblec.UnsupportedModelError, match=r"model\.pt2 has dynamic dimensions, and a plan is static"):
        nimblec.compile(path, target="cpu")
    assert nimblec.compile(path, target="cpu", inputs={"x": (2, 3)}).programs[0].inputs[1].shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dims": {"batch": 3}}, r"--dim batch: .* no dynamic dimension of that name; the names are 's\d+' \(axis"),
        ({"dims": {"batch": 3}}, r" 0 of 'x' and axis 0 of 'more\.y'\), since torch\.export does not keep those"),
        ({"inputs": {"x": (65, 3)}}, r"s\d+ is 65, and was exported for 2 to 64"),
        ({"inputs": {"x": (3, 4)}}, r"input 'x': has the shape 3x4, the model was exported for 3x3"),
        ({"inputs": {"x": (3, 3), "more.y": (4, 3)}}, r"input 'more\.y': s\d+ is 4, and input 'x' makes it 3"),
        ({"inputs": {"z": (3, 3)}}, r"input 'z' is not one of the model's inputs \['x', 'more\.y', 'k'\]"),
    ],
)
def test_sizes_that_do_not_fit(
    dynamic: torch.export.ExportedProgram, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    source = find_source(dynamic, None, None, tmp_path)
    given = {"dims": {_symbol(dynamic): 3}} if "z" in options.get("inputs", {}) else {}
    with pytest.raises(nimblec.CompileError, match=sentence):
        sources.load(source, read_options(**given, **options))


def test_a_static_program_takes_no_sizes(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(2, 4),)), tmp_path / "model.pt2")
    with pytest.raises(nimblec.CompileError, match=r"--dim batch: .*pt2 has no dynamic dimension: leave --dim out$"):
        nimblec.compile(tmp_path / "model.pt2", target="cpu", dims={"batch": 3})


def test_live_model_mode_is_not_noted(caplog: pytest.LogCaptureFixture) -> None:
    module, x = nn.Linear(2, 2).train(), torch.ones(1, 2)
    nimblec.compile(module, (x,), target="cpu", plan_cache=None)
    assert "the module is in training mode" in caplog.text
    caplog.clear()
    nimblec.compile(torch.export.export(module.eval(), (x,)), target="cpu", plan_cache=None)
    assert "training mode" not in caplog.text


class Careful(nn.Module):
    """Divides by no zero, and is off by little, which onnxscript takes for nothing at all."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x, where it is not zero, a little off."""
        return x * x / (x.abs() + 1e-10) * (1 + 2**-20) - 2**-30


@pytest.mark.parametrize("batch", [None, torch.export.Dim("batch", min=1, max=8)], ids=["fixed", "dynamic"])
def test_small_numbers_are_not_left_out(batch: Any) -> None:
    x = torch.tensor([[0.0, 1.0], [2**-30, -1.0]])
    options: dict[str, Any] = {} if batch is None else {"dynamic_shapes": ({0: batch},), "dims": {"batch": (2,)}}
    with loading.load(nimblec.compile(Careful(), (x,), target="cpu", **options)) as model:
        np.testing.assert_allclose(model(x.numpy()), Careful()(x).numpy(), rtol=1e-7)
