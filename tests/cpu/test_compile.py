"""The whole way to a CPU plan file: golden record, examples, PyTorch modules, and what is refused."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from calling import place
from command_line import CommandLine
from cpu_plans import floats, write_model
from families import mobilenet
from onnx import TensorProto, helper
from onnxruntime import InferenceSession
from onnxscript import opset18 as op
from torch.nn.attention.flex_attention import flex_attention

import nimblec
from nimblec.base.errors import CompileError
from nimblec.base.options import Options, read_options
from nimblec.base.source import Source
from nimblec.cpu import capture, timing
from nimblec.cpu.compile import compile_cpu
from nimblec.onnx_export.constants import like
from nimblec.onnx_export.export import accuracy
from nimblec.onnx_export.exporting import exporting_onnx
from nimblec.onnx_export.translations import COMMON
from nimblec.pytorch.state import WithState
from nimblert import golden, loading
from nimblert.check.verify import read_plan
from nimblert.cpu.onnx_session import session_options
from nimblert.cpu.streams import Pool
from nimblert.plan import Plan

node = helper.make_node


def compile_file(path: Path, output: Path, **options: object) -> list[str]:
    """Compile an ONNX file; the stages that were reported as ended."""
    stages = []
    source = Source(kind="onnx", model=str(path))
    compile_cpu(source, Options(**options), output, lambda stage, seconds: seconds is not None and stages.append(stage))
    return stages


def test_a_model_may_spell_out_the_domain_of_onnx(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["a"]), node("Exp", ["a"], ["y"])]
    plain = write_model(tmp_path / "plain.onnx", nodes, [floats("x", 2, 3)], [floats("y", 2, 3)])
    model = onnx.load(plain)
    for part in (*model.opset_import, *model.graph.node):
        part.domain = part.domain or "ai.onnx"
    onnx.save(model, tmp_path / "spelled.onnx")
    graphs = [capture.capture(tmp_path / name) for name in ("plain.onnx", "spelled.onnx")]
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize(
    ("sizes", "notes"),
    [
        ((2,), ["optimise: ONNX Runtime: 2 nodes -> 1"]),
        ((2, 3), [f"optimise: ONNX Runtime of main[batch={size}]: 2 nodes -> 1" for size in (2, 3)]),
    ],
    ids=["one program", "two sizes"],
)
@pytest.mark.parametrize("refittable", [False, True])
def test_the_optimiser_is_noted_as_a_pass(
    sizes: tuple[int, ...], notes: list[str], refittable: bool, tmp_path: Path
) -> None:
    nodes = [node("Identity", ["x"], ["a"]), node("Exp", ["a"], ["y"])]
    write_model(tmp_path / "m.onnx", nodes, [floats("x", "batch", 3)], [floats("y", "batch", 3)])
    for print_passes in (False, True):
        options = read_options(
            target="cpu", dims={"batch": sizes}, print_passes=print_passes, refittable=refittable, plan_cache=None
        )
        source = Source(kind="onnx", model=str(tmp_path / "m.onnx"))
        given = compile_cpu(source, options, tmp_path / "m.plan", lambda *_: None)
        assert [note for note in given if note.startswith("optimise")] == (notes if print_passes else [])


@pytest.fixture
def embedding(tmp_path: Path) -> Path:
    """Write a model of rows 1 to 4 of a table, by index minus 9: indices 0 and 1 are out of it."""
    return write_model(
        tmp_path / "embedding.onnx",
        [node("Sub", ["i", "base"], ["k"]), node("Gather", ["w", "k"], ["y"], name="table")],
        [("i", TensorProto.INT64, ("batch",))],
        [floats("y", "batch", 40)],
        constants={"w": np.arange(160, dtype=np.float32).reshape(4, 40), "base": np.array(9)},
    )


def test_an_example_gives_shape_and_range(embedding: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.plan"
    stages = compile_file(embedding, output, examples=(("i", np.array([9, 12, 10])),))
    assert stages == ["read", "optimise", "schedule", "golden run", "write", "check"]
    plan = read_plan(output)
    (tensor,) = plan.programs[0].inputs
    assert (tensor.shape, tensor.sample_range) == ((3,), (9, 12))
    with loading.load(plan) as model:
        np.testing.assert_array_equal(model(np.array([12, 9, 9]))[:, 0], [120, 0, 0])


@pytest.mark.parametrize("is_module", [False, True])
def test_a_range_ends_with_the_largest_integer_that_a_plan_holds(is_module: bool, tmp_path: Path) -> None:
    x = ("x", TensorProto.UINT64, (2,))
    path = write_model(tmp_path / "m.onnx", [node("Identity", ["x"], ["y"])], [x], [("y", *x[1:])])

    def made(*example: int) -> Plan:
        array = np.array(example, np.uint64)
        if is_module:
            return nimblec.compile(lambda x: x.float(), torch.from_numpy(array), target="cpu")
        return nimblec.compile(path, target="cpu", examples={"x": array})

    assert made(7, 2**64 - 1).programs[0].inputs[0].sample_range == (7, 2**63 - 1)
    with pytest.raises(CompileError, match=r"input 'x': its example holds only integers above 2\*\*63 - 1: give"):
        made(2**63, 2**64 - 1)


def test_compile_compares_sums_on_one_thread(tmp_path: Path) -> None:
    """Several threads split those of convolutions of one axis, and round otherwise."""
    drawn = np.random.default_rng(0)
    weights, bias = drawn.standard_normal((32, 80, 3)), drawn.standard_normal(32)
    path = write_model(
        tmp_path / "cut.onnx",
        [node("Conv", ["x", "w", "b"], ["y"], kernel_shape=[3], pads=[1, 1])],
        [floats("x", 1, 80, 100)],
        [floats("y", 1, 32, 100)],
        constants={"w": weights.astype(np.float32), "b": bias.astype(np.float32)},
    )
    x = drawn.standard_normal((1, 80, 100)).astype(np.float32)
    session = InferenceSession(path, session_options(Pool(count=1)), providers=["CPUExecutionProvider"])
    plan = nimblec.compile(path, target="cpu", plan_cache=None)
    with loading.load(plan, threads=1) as model:
        np.testing.assert_array_equal(model(x), session.run(None, {"x": x})[0])


def test_a_named_dimension_gives_the_shape(embedding: Path, tmp_path: Path) -> None:
    bounded = write_model(
        tmp_path / "dims.onnx",
        [node("Add", ["x", "x"], ["y"])],
        [floats("x", "batch", 2)],
        [floats("y", "batch", 2)],
    )
    plan = nimblec.compile(bounded, target="cpu", dims={"batch": 5})
    assert [t.shape for t in (*plan.programs[0].inputs, *plan.programs[0].outputs)] == [(5, 2), (5, 2)]
    with pytest.raises(CompileError, match="--dim rows: no input has a dimension of that name; the names are 'batch'"):
        nimblec.compile(embedding, target="cpu", dims={"rows": 5})


def test_random_integers_out_of_range_point_to_the_example_flag(embedding: Path, tmp_path: Path) -> None:
    spec = nimblec.base.options.InputSpec(name="i", shape=(3,))
    with pytest.raises(CompileError, match=r"out of data bounds.*give --example NAME=FILE\.npy"):
        compile_file(embedding, tmp_path / "model.plan", inputs=(spec,))
    assert not (tmp_path / "model.plan").exists()


def test_examples_of_a_module_bound_the_integers_drawn_later() -> None:
    """A division by zero would end the compilation."""
    x, y = torch.tensor([7, 9, 0]), torch.tensor([2, 5, 3])
    plan = nimblec.compile(lambda x, y: x % y, (x, y), target="cpu")
    assert [tensor.sample_range for tensor in plan.programs[0].inputs] == [(0, 9), (2, 5)]
    with loading.load(plan) as model:
        assert np.array_equal(model(x.numpy(), y.numpy()), (x % y).numpy())


@pytest.mark.parametrize(("factor", "is_refused"), [(1.0, False), (1.02, True)])
def test_a_result_that_the_exporter_changes_is_refused(
    monkeypatch: pytest.MonkeyPatch, factor: float, is_refused: bool
) -> None:
    def translation(self: Any) -> Any:
        return op.Mul(op.Exp(self), like(factor, self))

    monkeypatch.setitem(COMMON, torch.ops.aten.exp.default, translation)
    expected: AbstractContextManager[object] = nullcontext()
    if is_refused:
        expected = pytest.raises(CompileError, match=r"PyTorch computes \(.* 0\.02 of the largest magnitude")
    with expected:
        nimblec.compile(torch.exp, (torch.randn(4, 3),), target="cpu")


def test_compile_refuses_other_integers_than_pytorchs() -> None:
    """PyTorch's maximum is a NaN, ONNX Runtime's is not."""
    with pytest.raises(CompileError, match=r"'output' of the ONNX file .* differs from what PyTorch computes"):
        nimblec.compile(torch.argmax, (torch.tensor([1.0, torch.nan, 2.0]),), target="cpu")


def test_compile_notes_another_dtype_than_pytorchs(caplog: pytest.LogCaptureFixture) -> None:
    nimblec.compile(lambda x: x.sum(-1), (torch.randn(2, 4).half(),), target="cpu")
    assert "output 'output' is float32, PyTorch's is float16" in caplog.text


def test_a_pytorch_module_through_onnx(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module, (x,) = mobilenet.small()
    plan = nimblec.compile(module, x, target="cpu")
    assert "the module: ONNX Runtime differs from PyTorch by at most" in caplog.text
    assert "of the largest magnitude of an output ('output')" in caplog.text
    assert plan.programs[0].golden is not None
    with loading.load(plan) as model, torch.no_grad():
        assert [tensor.name for tensor in model.inputs] == ["x"]
        np.testing.assert_allclose(model(x.numpy()), module(x).numpy(), rtol=1e-4, atol=1e-5)
        outputs = model.run(golden.draw_inputs(model.program, plan.programs[0].golden.seed))
        verdicts = golden.check(plan.programs[0].golden, list(outputs.values()))
    assert [comparison.verdict for comparison in verdicts] == [golden.Verdict.BIT_EXACT]


class _Calls(torch.nn.Module):
    """A module of this test's own, which other processes cannot import."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self._function(x)


_Calls.__qualname__ = "test.<locals>._Calls"


def test_results_of_classes_of_torch() -> None:
    x = torch.randn(3, 8)
    plan = nimblec.compile(_Calls(lambda x: {"all": x * 2, "most": torch.topk(x, 2)}), x, target="cpu")
    with loading.load(plan) as model:
        found = model.run({"x": x.numpy()})
    wanted = torch.topk(x, 2)
    expected = {"all": x * 2, "most.0": wanted.values, "most.1": wanted.indices}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value.numpy())


def test_a_module_that_draws_random_numbers() -> None:
    sentence = r"^the module: two runs on equal inputs differ in output 'output'.*: call \.eval\(\) first"
    with pytest.raises(CompileError, match=sentence):
        nimblec.compile(torch.nn.Dropout().train(), torch.ones(4, 3), target="cpu")


class _Counting(torch.nn.Module):
    """Has a state that is no buffer."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add as many as there were runs."""
        self.count += 1
        return x + self.count


def test_a_state_that_the_exporter_does_not_see() -> None:
    with pytest.raises(CompileError, match="two runs on equal inputs differ in output 'output'"):
        nimblec.compile(_Counting(), torch.ones(3), target="cpu")


def test_an_export_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    export = torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda _, *args, **how: export(torch.nn.ReLU(), *args, **how))
    with pytest.raises(CompileError, match=r"of the ONNX file .* differs from what PyTorch computes \(.* 0\.37 of"):
        nimblec.compile(torch.nn.Sigmoid(), torch.ones(3), target="cpu")


class _Magnifying(torch.nn.Module):
    """Adds ``factor`` times what rounding does to numbers about 1, and scales all."""

    def __init__(self, factor: float, scale: float = 1.0) -> None:
        super().__init__()
        self.factor, self.scale = factor, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice ``x``, and the magnified difference from 1, scaled."""
        return (x * 2 + self.factor * (x - 1)) * self.scale


@pytest.mark.parametrize(
    ("factor", "differs", "refused"),
    [(0, 0.012, True), (2e3, 0.012, True), (5e3, 0.012, False), (5e3, 0.12, True), (5e4, 0.5, False)],
)
def test_accuracy_allows_what_rounding_does(factor: float, differs: float, refused: bool) -> None:
    """The momentum of a bias before a norm did so by more than the bound, on some CPUs."""
    module, x = _Magnifying(factor), torch.ones(3)
    with exporting_onnx("m"):
        program = torch.onnx.export(_Magnifying(factor, 1 - differs), (x,), dynamo=True, verbose=False)
    assert program is not None
    check = partial(accuracy, "m", program, place(module, (x,)), [("y", module(x))], max_error=None)
    if refused:
        with pytest.raises(CompileError, match=r"^m: output 'y' of the ONNX file .* 0\.\d+ of the largest magnitude"):
            check()
    else:
        assert len(check()) == 1


def test_max_error_bounds_the_difference_from_pytorch() -> None:
    module, x = torch.nn.Linear(300, 300), torch.randn(5, 300)
    said = r"^the module: ONNX Runtime differs from PyTorch by at most .* and --max-error allows 1e-12"
    with pytest.raises(CompileError, match=said):
        nimblec.compile(module, x, target="cpu", max_error=1e-12)


class _AtABend(torch.nn.Module):
    """Keeps how many numbers reach 1, of which ``factor`` times the second may be another one."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice ``x``."""
        self.count.copy_((x[1:] * self.factor >= 1).sum())
        return x * 2


@pytest.mark.parametrize(("x", "factor"), [(1.0, 1 - 2**-24), (1 - 2**-24, 1 + 2**-22)], ids=["down", "up"])
def test_a_number_that_rounding_takes_past_a_bend(x: float, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam makes whole steps of the gradients that come or go by it; a state of it is not compared."""
    export = torch.onnx.export

    def exported(module: Any, *args: Any, **how: Any) -> Any:
        if isinstance(module, WithState):  # PyTorch's own run of it is over
            module.module.factor = factor
        return export(module, *args, **how)

    monkeypatch.setattr(torch.onnx, "export", exported)
    plan = nimblec.compile(_AtABend(), torch.full((2,), x), target="cpu", streams=1, plan_cache=None)
    assert [tensor.name for tensor in plan.state] == ["count"]


def test_a_result_that_is_no_dense_tensor() -> None:
    with pytest.raises(CompileError, match=r"^output 0: a plan holds dense tensors, and this one is torch\.sparse_coo"):
        nimblec.compile(_Calls(torch.Tensor.to_sparse), torch.eye(3), target="cpu")


def test_a_function_is_a_model(nimblec: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubled.py").write_text("import torch\ndef f():\n    return lambda x: 2 * x, torch.ones(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert nimblec("compile", "doubled:f", "-o", tmp_path / "m.plan", "--target", "cpu", "-q").status == 0
    with loading.load(tmp_path / "m.plan") as model:
        assert model(np.arange(3, dtype=np.float32)).tolist() == [0, 2, 4]


def test_what_the_exporter_refuses_is_said_in_a_sentence() -> None:
    with pytest.raises(CompileError, match=r"has no translation of aten\.linalg_inv.*or compile for --ta") as refused:
        nimblec.compile(_Calls(torch.linalg.inv), torch.eye(3), target="cpu")
    assert not {"\n", "\x1b"} & set(str(refused.value))


def test_a_view_of_complex_numbers_that_the_exporter_refuses_is_called_one() -> None:
    with pytest.raises(CompileError, match=r"has no translation of aten\.cumsum of complex numbers: compute it"):
        nimblec.compile(lambda x: torch.view_as_complex(x).cumsum(0).abs(), torch.ones(3, 2), target="cpu")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_an_operator_of_functions_that_the_exporter_refuses_is_called_by_its_name() -> None:
    queries = torch.ones(1, 1, 2, 4)
    with pytest.raises(CompileError, match=r"has no translation of flex_attention: compute it by other operators"):
        nimblec.compile(lambda q: flex_attention(q, q, q), queries, target="cpu")


def test_experts_of_transformers_are_refused_with_the_way_to_compile_them() -> None:
    experts = torch.library.custom_op(
        "transformers::grouped_mm_fallback", torch.mm, mutates_args=(), schema="(Tensor x, Tensor w) -> Tensor"
    )
    experts.register_fake(torch.mm)
    with pytest.raises(CompileError, match=r'fallback: call model\.set_experts_implementation\("batched_mm"\) first$'):
        nimblec.compile(lambda x: experts(x, x), torch.eye(3), target="cpu")


def test_an_output_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(CompileError, match=r"^output 1: a set, and a plan returns tensors only: leave it out"):
        nimblec.compile(lambda x: (x + 1, {2}), torch.eye(3), target="cpu")


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_an_lstm_with_a_projection_is_refused() -> None:
    """torch.onnx exports one without, which ONNX Runtime cannot run."""
    with pytest.raises(CompileError, match=r"^the module: ONNX's LSTM has no projection \(proj_size\): compile for"):
        nimblec.compile(torch.nn.LSTM(4, 8, proj_size=3), torch.ones(2, 1, 4), target="cpu")


@pytest.mark.filterwarnings("ignore:.torch.jit.* is (deprecated|not supported)")
def test_torchscript_that_a_callable_returns_is_refused(
    nimblec: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "import torch\ndef f():\n    x = torch.ones(1, 2)\n    return torch.jit.trace(torch.nn.Linear(2, 2), x), x\n"
    (tmp_path / "scripted.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    said = nimblec.refused("compile", "scripted:f", "-o", tmp_path / "m.plan", "--target", "cpu", "-q")
    assert said.startswith("the model is TorchScript")


def test_a_module_in_bfloat16_is_refused_by_its_operator() -> None:
    module = torch.nn.Linear(2, 2).bfloat16()
    with pytest.raises(CompileError, match=r"no CPU kernel for .*: its CPU kernels take float32 rather than bfloat16"):
        nimblec.compile(module, torch.ones(1, 2).bfloat16(), target="cpu")


@pytest.mark.parametrize(
    ("module", "dtype", "named"),
    [
        (torch.nn.Identity(), torch.bfloat16, "input 'x'"),
        (torch.nn.Flatten(), torch.bfloat16, "input 'x'"),
        (torch.nn.Linear(2, 2), torch.float32, "output 'output'"),
    ],
)
def test_inputs_and_outputs_in_bfloat16_are_refused_by_name(
    module: torch.nn.Module, dtype: torch.dtype, named: str
) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return module(x).to(torch.bfloat16)

    with pytest.raises(CompileError, match=rf"^{named} is bfloat16, .*: convert it to float32 in the model, or"):
        nimblec.compile(forward, torch.ones(1, 2, dtype=dtype), target="cpu")


def test_an_output_of_uint64() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.uint64)

    plan = nimblec.compile(forward, torch.arange(4), target="cpu", plan_cache=None)
    with loading.load(plan) as loaded:
        found = loaded(np.arange(3, 7))
    assert (found.dtype, found.tolist()) == (np.uint64, [3, 4, 5, 6])


def test_what_a_model_raises_is_said_in_a_sentence() -> None:
    error = r"^the module cannot be run on its example inputs: (line \d+ of .* raised )?RuntimeError: .*mat1 and mat2"
    with pytest.raises(CompileError, match=error):
        nimblec.compile(torch.nn.Linear(2, 2), torch.ones(1, 3), target="cpu")


@pytest.mark.parametrize(
    ("seconds", "runs"), [(1e-9, 100), (0.01, 20), (0.1, 5), (0.3, 5), (0.5, 4), (2.0, 1), (30.0, 1)]
)
def test_slow_programs_are_timed_less_often(seconds: float, runs: int) -> None:
    assert timing._count(seconds) == runs


@pytest.mark.parametrize(
    ("asked", "words"), [({"level": 1}, "-O1: only CUDA plans"), ({"precision": "tf32"}, "--precision tf32: only CUDA")]
)
def test_what_only_a_cuda_plan_has_is_refused(
    asked: dict[str, Any], words: str, embedding: Path, tmp_path: Path
) -> None:
    options = Options(examples=(("i", np.array([9, 12, 10])),), **asked)
    source = Source(kind="onnx", model=str(embedding))
    with pytest.raises(CompileError, match=words):
        compile_cpu(source, options, tmp_path / "model.plan", lambda _stage, _seconds: None)
    assert not (tmp_path / "model.plan").exists()
