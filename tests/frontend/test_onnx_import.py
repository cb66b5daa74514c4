"""What comes out of `import_model`: the graph, its constants, its names; and what is refused."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph import recorder
from nimblec.onnx_import.importer import OnnxInput, OnnxProgram, import_model

OPSET = 21


def model_of(body: str, signature: str, opset: int = OPSET, **initializers: np.ndarray) -> ModelProto:
    """Parse ``body`` as the nodes of a model with initializers by name."""
    text = f'<ir_version: 10, opset_import: ["": {opset}, "test": 1, "com.microsoft": 1]> main {signature} {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in initializers.items())
    return model


def calls(program: OnnxProgram) -> list[str]:
    """Name the ATen calls of a program in order."""
    return [str(node.target) for node in program.module.graph.nodes if node.op == "call_function"]


def run(program: OnnxProgram, *inputs: Any) -> list[np.ndarray]:
    """Run a program on arrays."""
    return [tensor.numpy() for tensor in program.module(*(torch.from_numpy(np.asarray(x)) for x in inputs))]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def test_import_keeps_names_and_order() -> None:
    model = model_of("s = Sub (b, a)  p = Mul (a, b)", "(float[2,3] b, float[2,3] a) => (float[2,3] p, float[2,3] s)")
    program = import_model(model)
    assert program.inputs == (
        OnnxInput(name="b", dtype="float32", shape=(2, 3)),
        OnnxInput(name="a", dtype="float32", shape=(2, 3)),
    )
    assert program.outputs == ("p", "s")
    b, a = random(2, 3), random(2, 3) + 1
    product, difference = run(program, b, a)
    np.testing.assert_array_equal(product, a * b)
    np.testing.assert_array_equal(difference, b - a)


def test_every_call_names_the_onnx_node_it_came_from() -> None:
    model = model_of("y = Relu (x)  z = Softmax (y)", "(float[2,3] x) => (float[2,3] z)")
    model.graph.node[0].name = "first"
    sources = [n.meta["source"] for n in import_model(model).module.graph.nodes if n.op == "call_function"]
    assert sources == ["Relu 'first'", "Softmax '-> z'"]


def test_every_value_has_a_fake_tensor_of_its_dtype_and_shape() -> None:
    model = model_of("y = Conv (x, w)", "(float[1,3,8,8] x) => (float[1,4,6,6] y)", w=random(4, 3, 3, 3))
    shapes = [tuple(n.meta["val"].shape) for n in import_model(model).module.graph.nodes if n.op != "output"]
    assert sorted(shapes) == [(1, 3, 8, 8), (1, 4, 6, 6), (4, 3, 3, 3)]


def test_shape_arithmetic_leaves_no_trace() -> None:
    model = model_of(
        """
        shape = Shape (x)
        zero = Constant <value_int = 0> ()
        batch = Gather (shape, zero)
        axes = Constant <value_ints = [0]> ()
        batch1 = Unsqueeze (batch, axes)
        rest = Constant <value_ints = [-1]> ()
        target = Concat <axis = 0> (batch1, rest)
        r = Reshape (x, target)
        y = Relu (r)
        """,
        "(float[2,3,4] x) => (float[2,12] y)",
    )
    program = import_model(model)
    assert calls(program) == ["aten.reshape.default", "aten.relu.default"]
    assert not [n for n in program.module.graph.nodes if n.op == "get_attr"]


def test_what_is_known_is_computed_at_import() -> None:
    body = "t = Transpose (w)  s = Sqrt (t)  y = MatMul (x, s)"
    w = np.abs(random(5, 3))
    program = import_model(model_of(body, "(float[2,3] x) => (float[2,5] y)", w=w))
    assert calls(program) == ["aten.mm.default"]
    x = random(2, 3)
    np.testing.assert_allclose(run(program, x)[0], x @ np.sqrt(w.T), rtol=1e-5)


def test_fused_calls_stay_fused() -> None:
    body = """
        c = Conv (x, w)
        n = BatchNormalization (c, one, one, one, one)
        f = Flatten (n)
        g = Gemm <transB = 1> (f, v, one)
        y = LayerNormalization (g, one, one)
    """
    weights = {"w": random(4, 3, 1, 1), "one": np.ones(4, np.float32), "v": random(4, 16)}
    program = import_model(model_of(body, "(float[1,3,2,2] x) => (float[1,4] y)", **weights))
    assert [call for call in calls(program) if "getitem" not in call] == [
        "aten.convolution.default",
        "aten._native_batch_norm_legit_no_training.default",
        "aten.reshape.default",
        "aten.addmm.default",
        "aten.native_layer_norm.default",
    ]


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_opsets_below_13_count_axes_from_the_end_too(operator: str, axis: int) -> None:
    signature = "(float[2,3,4] x) => (float[2,3,4] y)"
    x = random(2, 3, 4)
    found, expected = (
        run(import_model(model_of(f"y = {operator} <axis = {n}> (x)", signature, opset=11)), x)[0]
        for n in (axis, axis + 3)
    )
    np.testing.assert_array_equal(found, expected)


ASYMMETRIC = '<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">'
BIG = 1 << 63

VALUES = {
    "a scale is a float32: 3 / 0.6 is 5": (
        f"y = Resize {ASYMMETRIC} (x, empty, scale)",
        "(float[10] x) => (float[?] y)",
        {"empty": np.zeros(0, np.float32), "scale": np.array([0.6], np.float32)},
        [np.arange(10, dtype=np.float32)],
        np.array([0, 1, 3, 5, 6, 8], np.float32),
    ),
    "a scale is a float32: 5 * 1.4 is 7": (
        f"y = Resize {ASYMMETRIC} (x, empty, scale)",
        "(float[5] x) => (float[?] y)",
        {"empty": np.zeros(0, np.float32), "scale": np.array([1.4], np.float32)},
        [np.arange(5, dtype=np.float32)],
        np.array([0, 0, 1, 2, 2, 3, 4], np.float32),
    ),
    "uint32 is resized": (
        f"y = Resize {ASYMMETRIC} (x, empty, scale)",
        "(uint32[2] x) => (uint32[?] y)",
        {"empty": np.zeros(0, np.float32), "scale": np.array([2.0], np.float32)},
        [np.array([1, 1 << 31], np.uint32)],
        np.array([1, 1, 1 << 31, 1 << 31], np.uint32),
    ),
    "a padding of int64 keeps all bits": (
        "y = Pad (x, pads, value)",
        "(int64[1] x) => (int64[2] y)",
        {"pads": np.array([0, 1]), "value": np.array(BIG - 1)},
        [np.array([3])],
        np.array([3, BIG - 1]),
    ),
    "the largest uint16 is found among what is scattered": (
        'y = ScatterElements <reduction = "max"> (x, i, u)',
        "(uint16[2] x, int64[2] i, uint16[2] u) => (uint16[2] y)",
        {},
        [np.array([1, 40000], np.uint16), np.array([0, 1]), np.array([50000, 2], np.uint16)],
        np.array([50000, 40000], np.uint16),
    ),
    "the smallest uint64 is found among what is scattered": (
        'y = ScatterND <reduction = "min"> (x, i, u)',
        "(uint64[2] x, int64[2,1] i, uint64[2] u) => (uint64[2] y)",
        {},
        [np.array([1, BIG + 9], np.uint64), np.array([[0], [1]]), np.array([BIG + 1, 2], np.uint64)],
        np.array([1, 2], np.uint64),
    ),
    "uint64 is clipped": (
        "y = Clip (x, low, high)",
        "(uint64[3] x) => (uint64[3] y)",
        {"low": np.array(2, np.uint64), "high": np.array(BIG, np.uint64)},
        [np.array([1, 3, BIG + 5], np.uint64)],
        np.array([2, 3, BIG], np.uint64),
    ),
    "uint64 has a sign": (
        "y = Sign (x)",
        "(uint64[3] x) => (uint64[3] y)",
        {},
        [np.array([0, 3, BIG + 5], np.uint64)],
        np.array([0, 1, 1], np.uint64),
    ),
    "opset 10 resizes to the next element where it shrinks": (
        "y = Resize (x, s)",
        "(float[1,1,2,4] x) => (float[1,1,1,2] y)",
        {"s": np.array([1, 1, 0.6, 0.6], np.float32)},
        [np.arange(1, 9, dtype=np.float32).reshape(1, 1, 2, 4)],
        np.array([1, 3], np.float32).reshape(1, 1, 1, 2),
    ),
    "opset 6 clips a half at one end": (
        "y = Clip <max = 2.0> (x)",
        "(float16[3] x) => (float16[3] y)",
        {},
        [np.array([-np.inf, 1, 3], np.float16)],
        np.array([-np.inf, 1, 2], np.float16),
    ),
    "a known bound and a computed one clip": (
        "y = Clip (x, low, high)",
        "(float[3] x, float high) => (float[3] y)",
        {"low": np.float32(-1)},
        [np.array([-3, 0, 3], np.float32), np.float32(0.5)],
        np.array([-1, 0, 0.5], np.float32),
    ),
    "indices count from the end": (
        "y = Gather <axis = 1> (w, i)",
        "(int64[3] i) => (float[2,3] y)",
        {"w": random(2, 5)},
        [np.array([-1, 0, -5])],
        random(2, 5)[:, [-1, 0, -5]],
    ),
    "no uint32 is below zero": (
        "y = PRelu (x, x)",
        "(uint32[2] x) => (uint32[2] y)",
        {},
        [np.array([1, 1 << 31], np.uint32)],
        np.array([1, 1 << 31], np.uint32),
    ),
    "uint32 takes a bias": (
        "y = Gemm (x, x, c)",
        "(uint32[1,1] x, uint32[1] c) => (uint32[1,1] y)",
        {},
        [np.array([[3]], np.uint32), np.array([1 << 31], np.uint32)],
        np.array([[(1 << 31) + 9]], np.uint32),
    ),
    "pixels of uint16 are shuffled": (
        'y = DepthToSpace <blocksize = 2, mode = "CRD"> (x)',
        "(uint16[1,4,1,1] x) => (uint16[1,1,2,2] y)",
        {},
        [np.array([1, 2, 3, 40000], np.uint16).reshape(1, 4, 1, 1)],
        np.array([1, 2, 3, 40000], np.uint16).reshape(1, 1, 2, 2),
    ),
    "uint64 that is not zero is found": (
        "n = NonZero (w)  y = Mul (x, n)",
        "(int64[1] x) => (int64[1,2] y)",
        {"w": np.array([0, 5, BIG], np.uint64)},
        [np.array([1])],
        np.array([[1, 2]]),
    ),
    "rows of bytes are added up": (
        'y = Einsum <equation = "ij->i"> (x)',
        "(uint8[2,2] x) => (uint8[2] y)",
        {},
        [np.array([[0, 1], [2, 255]], np.uint8)],
        np.array([1, 1], np.uint8),
    ),
    "a matrix of halves has a determinant": (
        "y = Det (x)",
        "(float16[2,2] x) => (float16 y)",
        {},
        [np.array([[1, 2], [3, 4]], np.float16)],
        np.array(-2, np.float16),
    ),
    "blocks of uint16 have zero points": (
        "y = QuantizeLinear <axis = 0, block_size = 2> (x, s, z)",
        "(float[4] x) => (uint16[4] y)",
        {"s": np.ones(2, np.float32), "z": np.array([1, 40000], np.uint16)},
        [np.arange(4, dtype=np.float32)],
        np.array([1, 2, 40002, 40003], np.uint16),
    ),
    "an image one pixel high ends at its edges": (
        "y = DeformConv <pads = [1, 0, 1, 0]> (x, w, o)",
        "(float[1,1,1,3] x, float[1,6,1,3] o) => (float[1,1,1,3] y)",
        {"w": np.array([1, 2, 4], np.float32).reshape(1, 1, 3, 1)},
        [np.ones((1, 1, 1, 3), np.float32), np.zeros((1, 6, 1, 3), np.float32)],
        np.full((1, 1, 1, 3), 2, np.float32),
    ),
    "an infinite loss is ignored": (
        'y = NegativeLogLikelihoodLoss <ignore_index = -1, reduction = "sum"> (x, t)',
        "(float[2,2] x, int64[2] t) => (float y)",
        {},
        [np.array([[-np.inf, 0], [-3, -np.inf]], np.float32), np.array([-1, 0])],
        np.array(3, np.float32),
    ),
    "a real signal has frames without an axis of parts": (
        "y = STFT (x, step, , length)",
        "(float[1,2] x) => (float[1,2,1,2] y)",
        {"step": np.array(1), "length": np.array(1)},
        [np.array([[1, 2]], np.float32)],
        np.array([1, 0, 2, 0], np.float32).reshape(1, 2, 1, 2),
    ),
    "the grid of one image is shifted": (
        "y = AffineGrid (theta, size)",
        "(float[1,2,3] theta) => (float[1,1,2,2] y)",
        {"size": np.array([1, 3, 1, 2])},
        [np.array([[[1, 0, 0.25], [0, 1, 2]]], np.float32)],
        np.array([-0.25, 2, 0.75, 2], np.float32).reshape(1, 1, 2, 2),
    ),
    "an aligned grid one pixel high ends at 1": (
        "y = AffineGrid <align_corners = 1> (theta, size)",
        "(float16[2,2,3] theta) => (float16[2,1,2,2] y)",
        {"size": np.array([2, 3, 1, 2])},
        [np.array([[[1, 0, 0], [0, 1, 0]], [[0, 1, 0], [1, 0, 0]]], np.float16)],
        np.array([-1, 1, 1, 1, 1, -1, 1, 1], np.float16).reshape(2, 1, 2, 2),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_node_gives_its_values(name: str) -> None:
    body, signature, constants, inputs, expected = VALUES[name]
    opset = int(name.split()[1]) if name.startswith("opset") else OPSET
    (found,) = run(import_model(model_of(body, signature, opset, **constants)), *inputs)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_bytes_that_cubic_weights_lead_out_of_range_are_clamped() -> None:
    body = 'y = Resize <mode = "cubic"> (x, empty, scale)'
    constants = {"empty": np.zeros(0, np.float32), "scale": np.array([2.0], np.float32)}
    x = np.array([0, 0, 255, 255, 0], np.uint8)
    found, real = (
        run(import_model(model_of(body, f"({name}[5] x) => ({name}[10] y)", **constants)), x.astype(dtype))[0]
        for name, dtype in (("uint8", np.uint8), ("float", np.float32))
    )
    assert (real.min() < 0, real.max() > 255) == (True, True)
    np.testing.assert_array_equal(found, real.round().clip(0, 255))


def test_zeros_are_quantized_by_a_scale_that_is_not_zero() -> None:
    signature = "(float[2] x) => (uint8[2] y, float s, uint8 z)"
    y, scale, zero_point = run(
        import_model(model_of("y, s, z = DynamicQuantizeLinear (x)", signature)), np.zeros(2, np.float32)
    )
    assert (y.tolist(), scale, zero_point) == ([0, 0], 1, 0)


def test_statistics_of_another_dtype_are_as_exact_as_the_images() -> None:
    body, signature = "y = BatchNormalization (x, one, zero, mean, var)", "(float[2,1,3] x) => (float[2,1,3] y)"
    constants = {"one": np.ones(1, np.float32), "zero": np.zeros(1, np.float32)}
    statistics = {"mean": np.array([3.3], np.float16), "var": np.array([0.57], np.float16)}
    found, expected = (
        run(import_model(model_of(body, signature, **constants, **given)), random(2, 1, 3))[0]
        for given in (statistics, {name: array.astype(np.float32) for name, array in statistics.items()})
    )
    np.testing.assert_array_equal(found, expected)


def test_a_normalised_bfloat16_takes_the_dtype_of_its_scale() -> None:
    model = model_of(
        "y = RMSNormalization (x, s)", "(bfloat16[1,2] x) => (float16[1,2] y)", opset=23, s=np.ones(2, np.float16)
    )
    assert import_model(model).module(torch.ones(1, 2, dtype=torch.bfloat16))[0].dtype == torch.float16


@pytest.mark.parametrize("operator", ["InstanceNormalization", "GroupNormalization <num_groups = 2>"])
def test_groups_of_a_transposed_array_are_normalised(operator: str) -> None:
    signature = "(float[2,3,4] x) => (float[2,4,3] y)"
    ones = {"scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32)}
    plain = import_model(model_of(f"y = {operator} (x, scale, bias)", "(float[2,4,3] x) => (float[2,4,3] y)", **ones))
    turned = f"t = Transpose <perm = [0, 2, 1]> (x)  y = {operator} (t, scale, bias)"
    x = random(2, 3, 4)
    found = run(import_model(model_of(turned, signature, **ones)), x)
    np.testing.assert_array_equal(found, run(plain, x.swapaxes(1, 2).copy()))


@pytest.mark.parametrize("add", ["Add (p, b)", "Add (b, p)"])
def test_a_bias_after_a_product_of_any_rank_is_fused(add: str) -> None:
    signature = "(float[2,3,4] x) => (float[2,3,5] y)"
    model = model_of(f"p = MatMul (x, w)  y = {add}", signature, w=random(4, 5), b=random(5))
    program = import_model(model)
    assert calls(program) == ["aten.reshape.default", "aten.addmm.default", "aten.reshape.default"]
    x = random(2, 3, 4)
    np.testing.assert_allclose(run(program, x)[0], x @ random(4, 5) + random(5), rtol=1e-5, atol=1e-6)
    sources = [node.meta["source"] for node in program.module.graph.nodes if str(node.target) == "aten.addmm.default"]
    assert sources == ["MatMul '-> p' + Add '-> y'"]


@pytest.mark.parametrize(
    ("body", "bias"),
    [
        ("p = MatMul (x, w)  y = Add (p, b)  z = Relu (p)", (3,)),
        ("p = MatMul (x, w)  y = Add (p, b)  z = Relu (y)", (3, 1)),
        ("p = MatMul (x, w)  y = Add (p, p)  z = Add (y, b)", (3,)),
    ],
)
def test_what_is_no_bias_stays_a_sum(body: str, bias: tuple[int, ...]) -> None:
    model = model_of(body, "(float[3,3] x) => (float[3,3] y, float[3,3] z)", w=random(3, 3), b=random(*bias))
    program = import_model(model)
    assert "aten.addmm.default" not in calls(program)
    x = random(3, 3)
    product = x @ random(3, 3)
    y = product + (product if "(p, p)" in body else random(*bias))
    np.testing.assert_allclose(run(program, x)[0], y, rtol=1e-5, atol=1e-6)


def test_an_initializer_is_one_constant_wherever_it_is_used() -> None:
    body = "a = MatMul (x, w)  b = MatMul (a, w)  y = Add (b, w)"
    program = import_model(model_of(body, "(float[3,3] x) => (float[3,3] y)", w=random(3, 3), unused=random(9)))
    constants = dict(program.module.named_buffers())
    assert [tuple(tensor.shape) for tensor in constants.values()] == [(3, 3)]
    sources = {n.meta["source"] for n in program.module.graph.nodes if n.op == "get_attr"}
    assert sources == {"initializer 'w'"}


def test_a_transposed_use_of_a_weight_shares_its_memory() -> None:
    body = "e = Gather (w, ids)  t = Transpose (w)  y = MatMul (e, t)"
    program = import_model(model_of(body, "(int64[2] ids) => (float[2,7] y)", w=random(7, 3)))
    first, second = program.module.buffers()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_outputs_have_memory_of_their_own() -> None:
    body = "y = Identity (x)  z = Reshape (x, flat)  c = Identity (w)  d = Identity (w)"
    model = model_of(
        body, "(float[2,2] x) => (float[2,2] y, float[4] z, float[2] c, float[2] d)", flat=np.array([4]), w=random(2)
    )
    program = import_model(model)
    x = torch.ones(2, 2)
    outputs = program.module(x)
    memory = [t.untyped_storage().data_ptr() for t in (x, *program.module.buffers(), *outputs)]
    assert len(set(memory)) == len(memory)
    np.testing.assert_array_equal(outputs[2], numpy_helper.to_array(model.graph.initializer[1]))


def test_the_graph_for_cuda_is_the_graph_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
        c = Conv <pads = [1, 1, 1, 1]> (x, w)
        p = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c)
        r = Resize <mode = "linear"> (p, , scales)
        q = QuantizeLinear (r, scale, zero)
        d = DequantizeLinear (q, scale, zero)
        f = Flatten (d)
        i = Cast <to = 7> (f)
        y = MatMul (i, m)
    """
    model = model_of(
        body,
        "(float[1,3,4,4] x) => (int64[1,2] y)",
        w=random(4, 3, 3, 3),
        scales=np.array([1, 1, 2, 2], np.float32),
        scale=np.array(0.1, np.float32),
        zero=np.array(3, np.uint8),
        m=np.ones((256, 2), np.int64),
    )
    monkeypatch.setattr(recorder, "on_device", lambda constants, _: dict(constants))
    cuda, cpu = import_model(model, device="cuda"), import_model(model)
    assert calls(cuda) == calls(cpu)
    for node in cuda.module.graph.nodes:
        assert node.op == "output" or isinstance(node.meta["val"], tuple) or node.meta["val"].device.type == "cuda"
    assert not any("mkldnn" in call or "copy_" in call for call in calls(cuda))


def test_import_multiplies_integers_exactly() -> None:
    rng = np.random.default_rng(1)
    for dtype in (np.int32, np.uint32, np.int64, np.uint64):
        limits = np.iinfo(dtype)
        a, b = (rng.integers(limits.min, limits.max, shape, dtype, endpoint=True) for shape in ((3, 40), (40, 5)))
        name = np.dtype(dtype).name
        program = import_model(model_of("y = MatMul (a, b)", f"({name}[3,40] a, {name}[40,5] b) => ({name}[3,5] y)"))
        np.testing.assert_array_equal(run(program, a, b)[0], a @ b)
        products = [n for n in program.module.graph.nodes if str(n.target) in ("aten.mm.default", "aten.bmm.default")]
        assert products
        assert all(n.meta["val"].dtype == torch.float64 for n in products)


def test_weights_keep_their_dtype() -> None:
    model = model_of("y = Add (x, w)", "(bfloat16[2] x) => (bfloat16[2] y)", w=np.ones(2, ml_dtypes.bfloat16))
    program = import_model(model)
    assert [tensor.dtype for tensor in program.module.buffers()] == [torch.bfloat16]
    assert torch.equal(program.module(torch.ones(2, dtype=torch.bfloat16))[0], torch.full((2,), 2.0).bfloat16())


def test_int4_weights_are_dequantized_and_nothing_else() -> None:
    weights = helper.make_tensor("w", TensorProto.INT4, [4], [-8, -1, 0, 7])
    body, signature = "d = DequantizeLinear (w, s)  y = Mul (x, d)", "(float[4] x) => (float[4] y)"
    model = model_of(body, signature, s=np.array(0.5, np.float32))
    model.graph.initializer.append(weights)
    np.testing.assert_array_equal(run(import_model(model), np.ones(4, np.float32))[0], [-4, -0.5, 0, 3.5])
    cast = model_of("d = Cast <to = 1> (w)  y = Mul (x, d)", "(float[4] x) => (float[4] y)")
    cast.graph.initializer.append(weights)
    with pytest.raises(UnsupportedModelError, match="'w' is INT4, which only DequantizeLinear may read"):
        import_model(cast)


def test_scalars_and_empty_tensors() -> None:
    body = "a = Add (x, s)  y = Concat <axis = 0> (a, e)  n = ReduceMax (e, axes)"
    signature = "(float[2] x) => (float[2] y, float[1] n)"
    constants = {"s": np.array(1, np.float32), "e": np.zeros(0, np.float32), "axes": np.array([0])}
    y, lowest = run(import_model(model_of(body, signature, **constants)), np.zeros(2, np.float32))
    np.testing.assert_array_equal(y, [1, 1])
    assert lowest == -np.inf


def test_names_need_not_be_identifiers() -> None:
    model = model_of("y = Relu (x)", "(float[2] x) => (float[2] y)")
    model.graph.node[0].input[0] = model.graph.input[0].name = "a/b:0"
    model.graph.node[0].output[0] = model.graph.output[0].name = "1 - 2"
    program = import_model(model)
    assert (program.inputs[0].name, program.outputs) == ("a/b:0", ("1 - 2",))
    assert (run(program, np.ones(2, np.float32))[0] == 1).all()


FUNCTIONS = """
<ir_version: 10, opset_import: ["": 18, "test": 1]>
main (float[2] x) => (float[2] y) { y = test.Twice <slope = 0.5> (x) }
<domain: "test", opset_import: ["": 18, "test": 1]>
Leak <slope> (a) => (b) { b = LeakyRelu <alpha: float = @slope> (a) }
<domain: "test", opset_import: ["": 18, "test": 1]>
Twice <slope> (a) => (b) { c = test.Leak <slope: float = @slope> (a)  b = test.Leak <slope: float = @slope> (c) }
"""


def test_a_resize_to_one_element_takes_the_first() -> None:
    attributes = '<mode = "cubic", coordinate_transformation_mode = "pytorch_half_pixel">'
    body, signature = f"y = Resize {attributes} (x, none, none, size)", "(float[6] x) => (float[1] y)"
    model = model_of(body, signature, size=np.array([1]))
    model.graph.node[0].input[1:3] = ["", ""]
    x = random(6)
    np.testing.assert_allclose(run(import_model(model), x)[0], x[:1], rtol=1e-6)


def test_import_inlines_functions() -> None:
    program = import_model(onnx.parser.parse_model(FUNCTIONS))
    assert calls(program) == ["aten.leaky_relu.default"] * 2
    np.testing.assert_array_equal(run(program, np.array([-4, 4], np.float32))[0], [-1, 4])
    assert {n.meta["source"] for n in program.module.graph.nodes if n.op == "call_function"} == {"test.Twice '-> y'"}


def test_a_function_that_calls_itself_is_refused() -> None:
    model = onnx.parser.parse_model(FUNCTIONS.replace("b = LeakyRelu", "b = test.Twice").replace("alpha", "slope"))
    with pytest.raises(UnsupportedModelError, match="functions nest more than"):
        import_model(model)


def test_every_problem_is_told_at_once() -> None:
    body = "a = test.Odd (x)  b = Relu (a)  c = test.Even (b)  y = Reshape (x, x)  z = Squeeze (x, axes)"
    signature = "(float[2] x) => (float[2] c, float[2] y, float[2] z)"
    with pytest.raises(UnsupportedModelError) as caught:
        import_model(model_of(body, signature, axes=np.array([0])))
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 problems in the model:"
    assert [line.split(" (")[0].strip() for line in lines[1:]] == [
        "test.Odd '-> a'",
        "test.Even '-> c'",
        "Reshape '-> y'",
        "Squeeze '-> z'",
    ]
    assert lines[3].endswith("input 1 'shape' is torch.float32; expected an integer")


REFUSED = {
    "input 0 'x' is missing": ("y = Relu (Z)", {}),
    "attribute 'axis' is 0.5; expected int": ("y = Softmax <axis = 0.5> (x)", {}),
    "attribute 'strange' is not supported": ("y = Relu <strange = 1> (x)", {}),
    "is torch.int64; expected torch.float32": ("y = Add (x, w)", {"w": np.ones(2, np.int64)}),
    "has 3 inputs; expected at most 2": ("y = Add (x, x, x)", {}),
    "no earlier node makes its input 'w'": ("y = Add (x, w)", {}),
    "axis 5 is out of range for 1 dimensions": ("y = Concat <axis = 5> (x, x)", {}),
    "index 7 is out of range": ("y = Gather (x, w)", {"w": np.array([7])}),
    "expected an integer": ("y = Reshape (x, w)", {"w": np.array([1.5])}),
    "'output_shape' is (1, 1, 5); expected (1, 1, 4)": (
        "y = MaxUnpool <kernel_shape = [2], strides = [2]> (w, i, s)",
        {"w": np.ones((1, 1, 2), np.float32), "i": np.array([[[1, 4]]]), "s": np.array([1, 1, 5])},
    ),
    "elements; expected at most": ("y = Expand (x, w)", {"w": np.array([1 << 40, 2])}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals_name_the_node_and_say_what_was_found(sentence: str) -> None:
    body, constants = REFUSED[sentence]
    model = model_of(body, "(float[2] x) => (float[2] y)", **constants)
    for name in [i for i, value in enumerate(model.graph.node[0].input) if value == "Z"]:
        model.graph.node[0].input[name] = ""
    with pytest.raises(UnsupportedModelError, match=r"^\w+ '-> y' \(opset 21\): ") as caught:
        import_model(model)
    assert sentence in str(caught.value)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Neg '-> y' .*: output 'y' has the name of an earlier value"):
        import_model(model_of("y = Relu (x)  y = Neg (x)", "(float[2] x) => (float[2] y)"))


def test_an_overload_of_a_function_is_its_own() -> None:
    model = onnx.parser.parse_model(FUNCTIONS)
    other = model.functions.add()
    other.CopyFrom(model.functions[1])
    other.overload = "once"
    del other.node[1:]
    other.node[0].output[0] = "b"
    model.graph.node[0].overload = "once"
    assert calls(import_model(model)) == ["aten.leaky_relu.default"]


def test_an_output_that_nothing_makes_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="output 'z': no node makes a tensor of that name"):
        import_model(model_of("y = Relu (x)", "(float[2] x) => (float[2] z)"))
