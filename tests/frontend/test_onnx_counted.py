"""Sizes that depend on values: graphs of ATen calls on tensors of a bound against ONNX Runtime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, numpy_helper
from onnx_conformance import run_onnxruntime
from rewriting import optimize

from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.graph import recorder
from nimblec.graph.definitions import Interpreter
from nimblec.onnx_import.importer import OnnxProgram, import_model
from nimblec.onnx_import.torch_model import load_onnx
from nimblec.pytorch.outputs import cut_outputs

CONSTANTS: dict[str, object] = {
    "half": np.float32(0.5),
    "minus": [-1],
    "zero": np.array(0),
    "zeros": [0],
    "one": np.array(1),
    "ones": [1],
    "two": [2],
    "three": [3],
    "four": [4],
    "end": [1 << 60],
    "pairs": [-1, 1, 3],
    "sizes": [6, 3],
    "five": np.array(5),
    "weight": np.array([[2, 0, 1], [0, 1, 3], [1, 1, 2]], np.float32),
}
PICK = """
    above = Greater (s, half)  found = NonZero (above)  place = Transpose (found)  index = Squeeze (place, minus)
    r = Gather (x, index)
"""


def model_of(body: str, signature: str) -> ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 19]> main {signature} {{ {body} }}')
    used = {name for node in model.graph.node for name in node.input}
    arrays = {name: np.asarray(value) for name, value in CONSTANTS.items() if name in used}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def agree(model: ModelProto, draws: Sequence[Mapping[str, np.ndarray]]) -> list[list[np.ndarray]]:
    """Compare the graph, and what -O1 makes of it, with ONNX Runtime for each draw, and return the outputs."""
    program, again = import_model(model), import_model(model)
    assert targets(imported_for_cuda(model).module) == targets(program.module)
    runs = []
    for given in draws:
        arrays = [given[described.name] for described in program.inputs]
        runs.append(run_onnxruntime(model, arrays))
        for module in (program.module, optimize(again.module, device="cuda")):
            with torch.no_grad():
                results = Interpreter(module).run(*(torch.from_numpy(array.copy()) for array in arrays))
            found = [tensor.numpy() for tensor in cut_outputs(results, program.cropped)]
            for mine, other in zip(found, runs[-1], strict=True):
                assert mine.dtype == other.dtype
                np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6, strict=True)
    return runs


def imported_for_cuda(model: ModelProto) -> OnnxProgram:
    """Import a model for a GPU, which need not be there."""
    with patch.object(recorder, "on_device", _left):
        return import_model(model, device="cuda")


def _left(constants: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    del device
    return dict(constants)


def targets(module: torch.fx.GraphModule) -> list[str]:
    return [str(getattr(node.target, "__name__", node.target)) for node in module.graph.nodes]


def picked(count: int = 6) -> list[dict[str, np.ndarray]]:
    """Return inputs in which no score, each, some and one is above a half."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, 3)).astype(np.float32)
    scores = np.zeros(count), np.ones(count), rng.random(count), np.eye(count)[2]
    return [{"s": s.astype(np.float32), "x": x} for s in scores]


@pytest.mark.parametrize(
    "use",
    [
        "y = Identity (r)",
        "e = Exp (r)  f = Mul (e, half)  g = Sub (f, e)  h = Less (g, f)  y = Where (h, g, f)",
        "q = Gather (s, index)  u = Unsqueeze (q, minus)  y = Mul (r, u)",
        "y = MatMul (r, weight)",
        "t = Transpose (r)  y = Gemm <transA = 1, transB = 1> (t, weight)",
        "y = GatherND (x, place)",
        "y = Compress <axis = 0> (x, above)",
        "c = ReduceMax <keepdims = 0> (r, ones)  p = Greater (c, half)  y = Compress <axis = 0> (r, p)",
        "n = Neg (r)  y = Concat <axis = 0> (r, x, n)",
        "n = Neg (r)  b = Concat <axis = 1> (r, n)  c = Slice (b, three, end, ones)  y = Reshape (c, pairs)",
        "y = Slice (r, ones, end, zeros)",
        "y = Slice (r, zeros, minus, zeros)",
        "y = Slice (r, minus, end, zeros)",
        "y = Slice (r, minus, end, ones)",
        "y = Softmax <axis = 0> (r)",
        "y = CumSum <reverse = 1> (r, zero)",
        "a, b, c = Split <axis = 1, num_outputs = 3> (r)  y = Concat <axis = 1> (c, b, a)",
        """
            c = ReduceMax <keepdims = 0> (r, ones)  p = Greater (c, half)  n = NonZero (p)  t = Transpose (n)
            u = Squeeze (t, minus)  y = Gather (r, u)
        """,
        """
            c = Shape (index)  k = Squeeze (c, zeros)  o = Range (zero, k, one)  f = Cast <to = 1> (o)
            u = Unsqueeze (f, minus)  y = Add (r, u)
        """,
        "c = Shape (index)  d = Concat <axis = 0> (c, three)  z = ConstantOfShape (d)  y = Add (r, z)",
        "c = Shape (index)  d = Concat <axis = 0> (c, ones)  e = Expand (half, d)  y = Add (r, e)",
        "c = Shape (index)  k = Min (c, four)  q = Gather (s, index)  v, i = TopK (q, k)  y = Gather (r, i)",
        "c = Size (index)  u = Unsqueeze (c, zeros)  y = Slice (x, zeros, u, zeros)",
    ],
)
def test_users_of_counted_values_agree(use: str) -> None:
    runs = agree(model_of(PICK + use, "(float[6] s, float[6,3] x) => (y)"), picked())
    assert len({run[0].shape for run in runs}) > 1


@pytest.mark.parametrize("name", ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp"])
@pytest.mark.parametrize("axes", ["zeros", ""])
def test_reductions_skip_what_is_not_filled(name: str, axes: str) -> None:
    body = f"{PICK} y = Reduce{name} <keepdims = 0> (r, {axes})".replace(", )", ")")
    model = model_of(body, "(float[6] s, float[6,3] x) => (y)")
    draws = picked()
    agree(model, draws[1:] if name in {"Mean", "Max", "Min", "LogSumExp"} else draws)


def test_contraction_skips_what_is_not_filled() -> None:
    body = PICK + "z = Log (r)  n = Sub (z, z)  t = Transpose (r)  y = MatMul (t, r)"
    agree(model_of(body, "(float[6] s, float[6,3] x) => (float[3,3] y)"), picked())


def test_shape_gives_the_count() -> None:
    runs = agree(model_of(PICK + "y = Shape (r)  n = Size (r)", "(float[6] s, float[6,3] x) => (y, n)"), picked())
    assert [run[0].tolist() for run in runs][:2] == [[0, 3], [6, 3]]


@pytest.mark.parametrize("in_order", [0, 1])
@pytest.mark.parametrize("axis", ["", "axis = 0,", "axis = 1,"])
def test_unique_agrees(axis: str, in_order: int) -> None:
    body = f"y, i, v, c = Unique <{axis} sorted = {in_order}> (x)"
    rng = np.random.default_rng(0)
    draws = np.ones((4, 3)), rng.permutation(12).reshape(4, 3), rng.integers(0, 2, (4, 3))
    model = model_of(body, "(float[4,3] x) => (y, i, v, c)")
    agree(model, [{"x": values.astype(np.float32)} for values in draws])


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_of_computed_k_agrees(largest: int) -> None:
    body = f"v, i = TopK <axis = 0, largest = {largest}> (x, k)"
    x = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    agree(model_of(body, "(float[5,2] x, int64[1] k) => (v, i)"), [{"x": x, "k": np.array([k])} for k in (0, 2, 5)])


@pytest.mark.parametrize("body", ["y = NonZero (x)", "y = Compress (x, c)", "y = Compress <axis = 1> (x, c)"])
def test_makers_agree(body: str) -> None:
    some = np.random.default_rng(0).integers(0, 2, (2, 3))
    chosen = (np.zeros((2, 3)), [False] * 3), (np.ones((2, 3)), [True] * 3), (some, [True, False, True])
    draws = [{"x": x.astype(np.float32), "c": np.array(c)} for x, c in chosen]
    signature = "(float[2,3] x, bool[3] c) => (y)" if "c)" in body else "(float[2,3] x) => (y)"
    agree(model_of(body, signature), draws)


def boxes(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    corner = rng.random((2, count, 2)) * 3
    return np.concatenate([corner, corner + rng.random((2, count, 2)) + 0.5], 2).astype(np.float32)


@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("most", [0, 2, 30])
def test_non_max_suppression_agrees(center: int, most: int) -> None:
    body = f"y = NonMaxSuppression <center_point_box = {center}> (b, s, most, iou, least)"
    model = model_of(body, "(float[2,9,4] b, float[2,3,9] s, int64[1] most, float[1] iou, float[1] least) => (y)")
    rng = np.random.default_rng(1)
    draws = [
        {
            "b": boxes(9, seed),
            "s": np.round(rng.random((2, 3, 9)), 1).astype(np.float32),
            "most": np.array([most]),
            "iou": np.array([iou], np.float32),
            "least": np.array([least], np.float32),
        }
        for seed, iou, least in ((0, 0.3, 0.2), (1, 0.0, 0.5), (2, 1.0, 0.0), (3, 0.5, 2.0))
    ]
    agree(model, draws)
    model.graph.initializer.append(numpy_helper.from_array(np.array([most]), "most"))
    del model.graph.input[2]
    agree(model, draws)


def test_suppression_of_boxes_above_a_score_agrees() -> None:
    body = """
        c = ReduceMax <keepdims = 0> (s, zeros)  above = Greater (c, half)  found = NonZero (above)
        place = Transpose (found)  index = Squeeze (place, minus)
        kept = Gather <axis = 1> (b, index)  t = Gather <axis = 2> (u, index)
        chosen = NonMaxSuppression (kept, t, four, iou)
        column = Gather <axis = 1> (chosen, two)  flat = Squeeze (column, minus)  y = Gather <axis = 1> (kept, flat)
    """
    model = model_of(body, "(float[1,9,4] b, float[1,9] s, float[1,1,9] u) => (y)")
    model.graph.initializer.append(numpy_helper.from_array(np.array([0.4], np.float32), "iou"))
    rng = np.random.default_rng(0)
    scores = [np.zeros((1, 9)), np.ones((1, 9)), rng.random((1, 9))]
    agree(
        model,
        [{"b": boxes(9, 5)[:1], "s": s.astype(np.float32), "u": s.astype(np.float32).reshape(1, 1, 9)} for s in scores],
    )


def test_count_passes_into_a_branch() -> None:
    body = PICK + """
        y = If (c) <
            then_branch = yes () => (float[3] a) { a = ReduceSum <keepdims = 0> (r, zeros) },
            else_branch = no () => (float[3] b) { n = Neg (r)  b = ReduceSum <keepdims = 0> (n, zeros) }
        >
    """
    draws = [{**given, "c": np.array(taken)} for given in picked() for taken in (False, True)]
    model = model_of(body, "(float[6] s, float[6,3] x, bool c) => (float[3] y)")
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zeros"))
    agree(model, draws)


@pytest.mark.parametrize("outputs", ["(float[5] y)", "(float[N] y)"])
def test_declared_shape_bounds_an_output(outputs: str) -> None:
    model = model_of("y = Range (a, b, c)", f"(float a, float b, float c) => {outputs}")
    bounds = {} if "5" in outputs else {"y": (5,)}
    program = import_model(model, bounds=bounds)
    for given in ((0, 5, 1), (0, -1, 1), (4, 0, -2), (0, 1, 0.25)):
        arrays = [np.array(value, np.float32) for value in given]
        (found,) = cut_outputs(program.module(*map(torch.from_numpy, arrays)), program.cropped)
        np.testing.assert_allclose(found.numpy(), run_onnxruntime(model, arrays)[0], strict=True)
    *_, sizes = program.module(*map(torch.tensor, (0.0, 9.0, 1.0)))
    assert sizes.tolist() == [9]


def test_bound_given_for_an_output_saves_memory() -> None:
    program = import_model(model_of("y = NonZero (x)", "(float[8] x) => (y)"), bounds={"y": (1, 4)})
    y, sizes = program.module(torch.ones(8))
    assert y.shape == (1, 4)
    assert sizes.tolist() == [1, 8]


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        ("q = Unsqueeze (r, zeros)  y = InstanceNormalization (q, half, half)", "does not take a value whose size"),
        (
            "y = Loop (five, , r) <body = b (int64 i, bool c, v) => (c2, w) { c2 = Identity (c)  w = Neg (v) }>",
            "Loop '-> y' .* does not take a value whose size depends on values",
        ),
        (
            """
                y = Scan <num_scan_inputs = 1, body = b (row) => (out) { out = Neg (row) }> (r)
            """,
            "Scan '-> y' .* does not take a value whose size depends on values",
        ),
        ("y = Add (r, x)", "combines a size known at import with one that depends on values"),
        (
            """
                o = Less (s, half)  n = NonZero (o)  t = Transpose (n)  i = Squeeze (t, minus)
                g = Gather (x, i)  y = Add (r, g)
            """,
            "combines two sizes that depend on values",
        ),
        ("y = Reshape (r, sizes)", r"makes the shape \(6, 3\) of one whose size along axis 0 depends on values"),
        ("y = Squeeze (r)", "drops an axis whose size depends on values"),
        ("t = Transpose (x)  y = MatMul (t, r)", "contracts two sizes of which one depends on values"),
        ("y = Split <axis = 0, num_outputs = 2> (r)", "splits a size that depends on values"),
    ],
)
def test_other_users_are_refused_by_name(use: str, problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        import_model(model_of(PICK + use, "(float[6] s, float[6,3] x) => (y)"))


def test_loaded_model_returns_sizes_after_its_outputs(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model_of("y = NonZero (x)  z = Neg (x)", "(float[8] x) => (y, float[8] z)"), path)
    model = load_onnx(path, device="cpu", examples={"x": np.ones(8, np.float32)}, bounds=(("y", (1, 9)),))
    assert model.cropped == (0,)
    result = model.run(lambda _: None)
    assert {name: list(tensor.shape) for name, tensor in result.items()} == {"y": [1, 8], "z": [8], "sizes of y": [2]}
    with pytest.raises(CompileError, match=r"^--bound w: is not one of the model's outputs \['y', 'z'\]$"):
        load_onnx(path, device="cpu", bounds=(("w", (1,)),))


def test_size_that_nothing_bounds_is_refused() -> None:
    model = model_of("o = Range (zero, n, one)  y = ReduceSum (o)", "(int64 n) => (y)")
    with pytest.raises(UnsupportedModelError, match=r"Range '-> o'.* nothing bounds it"):
        import_model(model)


def test_item_of_a_sequence_at_a_computed_position() -> None:
    body = "q = SequenceConstruct (x, t) y = SequenceAt (q, i)"
    draws = [{"x": np.ones(3, np.float32), "t": np.zeros(3, np.float32), "i": np.array(i)} for i in (0, 1, -1)]
    agree(model_of(body, "(float[3] x, float[3] t, int64 i) => (float[3] y)"), draws)
    with pytest.raises(UnsupportedModelError, match="the tensors differ in shape or dtype"):
        import_model(model_of(body, "(float[3] x, float[4] t, int64 i) => (float[n] y)"))


@pytest.mark.parametrize("shape", [[2, 6], [-1, 3], [0, 4], [12, 1]])
def test_a_computed_shape_fills_a_part_of_its_bound(shape: list[int]) -> None:
    model = model_of("r = Reshape (x, s)", "(float[3,4] x, int64[2] s) => (float[M,N] r)")
    program = import_model(model, bounds={"r": (12, 6)})
    x, s = np.arange(12, dtype=np.float32).reshape(3, 4), np.array(shape)
    (found,) = cut_outputs(program.module(torch.from_numpy(x), torch.from_numpy(s)), program.cropped)
    (expected,) = run_onnxruntime(model, [x, s])
    np.testing.assert_array_equal(found.numpy(), expected)


def test_a_computed_shape_of_other_elements_is_beyond_its_bound() -> None:
    model = model_of("r = Reshape (x, s)", "(float[3,4] x, int64[2] s) => (float[M,N] r)")
    *_, sizes = import_model(model, bounds={"r": (12, 6)}).module(torch.ones(3, 4), torch.tensor([5, 2]))
    assert sizes.tolist() == [13, 7]
