"""Sizes that depend on values, sequences and optionals: within a model, and as outputs that a run cuts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
import torch
from numpy.typing import ArrayLike
from onnx import ModelProto, TensorProto, helper, numpy_helper
from parsed_models import Feed, check, compiled, normal, parse
from torch import nn

import nimblert
from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.inspect.verification import Result, verify
from nimblec.plan import encoder
from nimblert.check import verify as rules
from nimblert.errors import InputError, PlanInvalidError
from nimblert.plan import Crop, Fit, Plan, Pointer, Region, Weight

NONE, SOME, ALL = (np.array(row, np.float32) for row in ([0, 0, 0, 0], [0, 1, 0, 2], [3, 1, 2, 4]))


def mask(dtype: str = "float", opset: int = 20) -> ModelProto:
    return parse(f"({dtype}[4] x, bool[4] k) => ({dtype}[n] y) {{ y = Compress <axis = 0> (x, k) }}", opset)


def masks(dtype: type = np.float32) -> list[Feed]:
    return [{"x": np.arange(4).astype(dtype), "k": np.array(k, bool)} for k in ([0] * 4, [0, 1, 0, 1], [1] * 4)]


OUTPUTS: Mapping[str, tuple[str, dict[str, ArrayLike], Sequence[Feed]]] = {
    "NonZero": ("(float[4] x) => (int64[1, n] y) { y = NonZero (x) }", {}, [{"x": x} for x in (NONE, SOME, ALL)]),
    "Unique": (
        "(int64[4] x) => (int64[n] y, int64[n] i, int64[4] back) { y, i, back = Unique (x) }",
        {},
        [{"x": np.array(x)} for x in ([7, 7, 7, 7], [3, 1, 3, 2], [4, 3, 2, 1])],
    ),
    "Unique along an axis": (
        "(float[4, 2] x) => (float[n, 2] y) { y = Unique <axis = 0> (x) }",
        {},
        [{"x": np.ones((4, 2), np.float32)}, {"x": normal(4, 2)}],
    ),
    "NonMaxSuppression": (
        "(float[1, 5, 4] b, float[1, 2, 5] s) => (int64[n, 3] y) { y = NonMaxSuppression (b, s, most, iou, least) }",
        {"most": [3], "iou": np.float32([0.5]), "least": np.float32([0.0])},
        [{"b": normal(1, 5, 4), "s": s} for s in (normal(1, 2, 5), -np.ones((1, 2, 5), np.float32))],
    ),
    "If": (
        (
            "(float[2, 4] x, bool c) => (float[n, m] y) { y = If (c) <then_branch = g () => (float[2, 4] t) "
            "{t = Neg (x)}, else_branch = h () => (float[4, 2] e) {e = Transpose (x)}> }"
        ),
        {},
        [{"x": normal(2, 4), "c": np.array(c)} for c in (True, False)],
    ),
    "TopK": (
        "(float[8] x, int64[1] k) => (float[n] y, int64[n] i) { y, i = TopK (x, k) }",
        {},
        [{"x": normal(8), "k": np.array([k])} for k in (0, 3, 8)],
    ),
    "Slice": (
        "(float[8] x, int64[1] e) => (float[n] y) { y = Slice (x, start, e) }",
        {"start": [0]},
        [{"x": normal(8), "e": np.array([e])} for e in (0, 3, 100)],
    ),
    "bounds pass on": (
        """(float[2, 8] x) => (float[n] y, float[m, k] outer) {
            i = NonZero (x)
            t = Transpose <perm = [1, 0]> (i)
            y = GatherND (x, t)
            column = Unsqueeze (y, one)
            double = Concat <axis = 0> (y, y)
            outer = Mul (column, double)
        }""",
        {"one": [1]},
        [{"x": x} for x in (np.zeros((2, 8), np.float32), np.float32(normal(2, 8) > 0), normal(2, 8))],
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_has_the_size_of_each_run(name: str) -> None:
    text, constants, feeds = OUTPUTS[name]
    plan = check(parse(text, **constants), feeds)
    assert any(isinstance(command, Crop) for command in plan.programs[0].commands)


INNER = {
    "NonZero": "(float[4] x) => (int64 y) { z = NonZero (x) s = Shape (z) y = ReduceSum <keepdims = 0> (s) }",
    "the sum of what is positive": """(float[4] x) => (float y) {
        p = Greater (x, zero) c = Compress (x, p) y = ReduceSum <keepdims = 0> (c) }""",
    "a size that comes back": """(float[4] x) => (float[4] y) {
        z = NonZero (x) s = Size (z) h = Mul (s, two) e = Reshape (h, one) l = Slice (long, start, e)
        t = ReduceSum <keepdims = 0> (l) y = Add (x, t) }""",
    "a sequence": """(float[4] x) => (float[4] y) {
        d = Neg (x) q = SequenceConstruct (x, d) l = SequenceLength (q) i = Sub (l, int) y = SequenceAt (q, i) }""",
    "an output that declares its size": """(float[4] x) => (float[8] y) {
        q = SequenceConstruct (x, x) y = ConcatFromSequence <axis = 0> (q) }""",
}


@pytest.mark.parametrize("name", INNER)
def test_a_value_of_any_size_stays_within_one_kernel(name: str) -> None:
    constants = {"zero": np.float32(0), "two": 2, "one": [1], "start": [0], "int": 1, "long": normal(16)}
    model = parse(INNER[name])
    read = {value for node in model.graph.node for value in node.input}
    for value in read & constants.keys():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(constants[value]), value))
    check(model, [{"x": x} for x in (NONE, SOME, ALL)])


def test_a_list_grows_in_a_loop() -> None:
    model = parse(
        """(int64 n, float[4] x) => (int64 y) {
            empty = SequenceEmpty <dtype = 1> ()
            list = Loop (n, , empty) <body = b (int64 i, bool c, seq(float[4]) l) => (bool go, seq(float[4]) m) {
                go = Identity (c)
                m = SequenceInsert (l, x)
            }>
            y = SequenceLength (list)
        }"""
    )
    check(model, [{"n": np.array(n), "x": SOME} for n in (0, 1, 5)])


def test_values_of_any_size_in_the_body_of_a_loop() -> None:
    model = parse(
        """(int64 n, float[4] x) => (float[4] y) {
            y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool go, float[4] w) {
                go = Identity (c)
                p = Greater (v, zero)
                kept = Compress (v, p)
                total = ReduceSum <keepdims = 0> (kept)
                d = Sub (v, total)
                w = Softmax (d)
            }>
        }""",
        zero=np.float32(0),
    )
    plan = check(model, [{"n": np.array(n), "x": normal(4)} for n in (0, 3)])
    assert len(plan.bodies) == 1


@pytest.mark.parametrize("dtype", ["float16", "int16", "uint8", "bool", "double"])
def test_outputs_of_every_dtype(dtype: str) -> None:
    check(mask(dtype), masks(np.dtype(dtype).type))


def test_an_old_opset_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"output 'y': its size .* needs a model of opset 11 or newer"):
        compiled(mask(opset=9))


REPEAT = "(int64 n) => (int64[k] y) { y = Range (zero, n, one) }"


def test_bound_of_an_output_that_nothing_bounds() -> None:
    model = parse(REPEAT, zero=0, one=1)
    with pytest.raises(UnsupportedModelError, match=r"\(Range\): the size of output 'y' .*, --bound y=SHAPE$"):
        compiled(model)
    with pytest.raises(CompileError, match=r"^--bound z: is not one of the model's outputs \['y'\]$"):
        compiled(model, bounds={"z": 8})
    plan = check(model, [{"n": np.array(n)} for n in (0, 3, 8)], bounds={"y": (8,)}, examples={"n": np.array(5)})
    with nimblert.load(plan) as executable:
        with pytest.raises(InputError, match=r"^output 'y': has the shape \(9,\) .* a larger --bound y=9$"):
            executable.run({"n": np.array(9)})
        assert executable.run({"n": np.array(2)})["y"].tolist() == [0, 1]


def test_bound_of_an_output_that_one_example_would_fix() -> None:
    """The runs that show shapes draw the number of trips from the example's range: twice the same."""
    body = "(int64 i, bool c, float[] v) => (bool d, float[] w) {d = Identity (c) w = Concat <axis = 0> (v, one)}"
    text = f"(int64 n, float[2] x) => (float[k] y) {{ y = Loop <body = b {body}> (n, , x) }}"
    model = parse(text, one=np.float32([1]))
    feeds = [{"n": np.array(n), "x": normal(2)} for n in (0, 3, 5)]
    check(model, feeds, bounds={"y": (8,)}, examples={"n": np.array(5)})


class Masked(nn.Module):
    """What is positive, and its sum."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute it."""
        return x[x > 0], x[x > 0].sum()


class Halved(nn.Module):
    """The sum of the first columns."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        return x[:, : n.item()].sum(1)


class Repeated(nn.Module):
    """Rows, each as often as a number says."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        return torch.repeat_interleave(x, n, dim=0)


@pytest.mark.parametrize(
    ("module", "calls", "bounds"),
    [
        (Masked(), [(torch.randn(8),), (torch.ones(8),), (-torch.ones(8),)], {}),
        (Halved(), [(torch.randn(2, 8), torch.tensor(n)) for n in (3, 0, 8)], {}),
        (
            Repeated(),
            [(torch.randn(3, 2), torch.tensor(n)) for n in ([1, 2, 3], [0, 0, 0])],
            {"output": (9, 2)},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sizes_of_a_pytorch_module(module: nn.Module, calls: Sequence[Any], bounds: dict[str, Any]) -> None:
    plan = compiled(module.eval(), calls[0], bounds=bounds)
    with nimblert.load(plan) as executable:
        for call in calls:
            wanted, got = module(*call), executable(*(x.numpy() for x in call))
            for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (wanted, got)), strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_arrays_of_the_caller_get_the_filled_part() -> None:
    out = np.full(4, 9, np.float32)
    feed = masks()[1]
    with nimblert.load(compiled(mask())) as executable:
        executable.run(feed)
        assert executable.run(feed, reuse_outputs=True)["y"].tolist() == [1, 3]
        found = executable.run(feed, out={"y": out})["y"]
        assert (found.tolist(), out.tolist(), found.base is out) == ([1, 3], [1, 3, 9, 9], True)
        executable.bind("y", out)
        assert executable.run(masks()[0])["y"].shape == (0,)
        with pytest.raises(InputError, match=r"out 'y': shape \(2,\), expected \(4,\)"):
            executable.run(feed, out={"y": np.empty(2, np.float32)})


def test_verify_compares_the_filled_part(tmp_path: Path) -> None:
    model, path = mask(), tmp_path / "m.plan"
    compiled(model).save(path)
    onnx.save(model, tmp_path / "m.onnx")
    assert {one.result for one in verify(path)} <= {Result.PASSED, Result.SKIPPED}


def test_several_sizes_are_exact() -> None:
    model = parse("(float[T] x) => (int64[1, n] y) { y = NonZero (x) }")
    plan = check(model, [{"x": np.ones(n, np.float32)} for n in (2, 8)], dims={"T": (2, 8)})
    assert {program.fits for program in plan.programs} == {(Fit.EXACT,)}
    padded = replace(plan, programs=tuple(replace(program, fits=(Fit.PADDED,)) for program in plan.programs))
    assert any("'T' is PADDED, and the program crops an output" in found for found in rules.problems(padded))


@pytest.fixture(scope="module")
def masked() -> Plan:
    return compiled(mask())


def with_crop(plan: Plan, **fields: Any) -> Plan:
    """Return the plan with other fields of its Crop."""
    (program,) = plan.programs
    commands = tuple(replace(c, **fields) if isinstance(c, Crop) else c for c in program.commands)
    return replace(plan, programs=(replace(program, commands=commands),))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"output": 1}, "output: 1 is out of range (there are 1 outputs)"),
        ({"rank": 2}, "rank: 2, the output has 1 dimensions"),
        ({"sizes": Pointer(region=Region.ARENA, offset=1 << 20)}, "sizes: 8 bytes at 1048576 lie outside ARENA(0)"),
        ({"sizes": Pointer(region=Region.ARENA, offset=-8)}, "sizes: 8 bytes at -8 lie outside ARENA(0)"),
    ],
)
def test_a_hostile_crop_is_refused(masked: Plan, fields: dict[str, Any], sentence: str) -> None:
    assert any(sentence in found for found in rules.problems(with_crop(masked, **fields)))


def test_two_crops_of_an_output_are_refused(masked: Plan) -> None:
    (program,) = masked.programs
    twice = replace(program, commands=(*program.commands, replace(program.commands[-1])))
    found = [*rules.problems(replace(masked, programs=(twice,)))]
    assert found == ["programs[0].commands[2].output: 0 is cropped by a command before this one"]


@pytest.mark.parametrize("size", [-1, 5, -(2**63), 2**63 - 1])
def test_a_size_beyond_the_bound_is_an_error(masked: Plan, size: int) -> None:
    weight = Weight(name="size", dtype="int64", shape=(1,), offset=0, data=memoryview(np.array([size]).tobytes()))
    plan = replace(masked, weights=(weight,), weights_nbytes=8)
    plan = with_crop(plan, sizes=Pointer(region=Region.WEIGHTS, offset=0))
    with (
        nimblert.load(encoder.encode_file(plan)) as executable,
        pytest.raises(InputError, match=rf"^output 'y': has the shape \({size},\) for these inputs"),
    ):
        executable.run(masks()[1])


def with_node(operator: str, *, declared: bool = False) -> Callable[[ModelProto], None]:
    """Return a change by which an operator is applied to the value of unknown size before it is padded."""

    def change(model: ModelProto) -> None:
        graph = model.graph
        (pad,) = (node for node in graph.node if node.op_type == "Pad")
        node = helper.make_node(operator, [pad.input[0]], ["more"])
        node.domain = node.overload = ""
        pad.input[0] = "more"
        graph.node.insert(len(graph.node) - 1, node)
        graph.value_info.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [4] if declared else None))

    return change


def with_type(element_type: int, shape: Sequence[int] | None) -> Callable[[ModelProto], None]:
    """Return a change by which the value of unknown size is declared so."""

    def change(model: ModelProto) -> None:
        (value,) = model.graph.value_info
        value.CopyFrom(helper.make_tensor_value_info(value.name, element_type, shape))

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_node("Hardmax"), "Hardmax: takes or gives a value whose size is not known before a run"),
        (with_node("Relu", declared=True), "Relu: the declared shape of a value that it makes cannot be inferred"),
        (with_type(TensorProto.FLOAT, [4]), "value 't0' is declared float32 (4,), ONNX Runtime infers"),
        (with_type(TensorProto.INT64, None), "value 't0' is declared int64 None, ONNX Runtime infers"),
    ],
)
def test_a_hostile_region_is_refused(masked: Plan, change: Callable[[ModelProto], None], sentence: str) -> None:
    model = ModelProto.FromString(bytes(masked.modules[0].code))
    change(model)
    code = memoryview(model.SerializeToString(deterministic=True))
    first, last = model.graph.node[0].op_type, model.graph.node[-1].op_type
    kernel = replace(masked.kernels[0], symbol=f"{first} to {last} ({len(model.graph.node)} ops)")
    plan = replace(masked, kernels=(kernel,), modules=(replace(masked.modules[0], code=code),))
    with pytest.raises(PlanInvalidError) as refused:
        nimblert.load(encoder.encode_file(plan))
    assert sentence in str(refused.value)
