"""Networks quantised to 8 bits: convolutions and products of integers, exact on every target."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from quantized_models import PRODUCTS, SETTINGS, image, quantized_network
from rewriting import check, optimize, run
from torch import fx
from triton_process import interpret, needs_triton
from triton_process import run as in_process

from nimblec.graph.quantized import quantized_convolution
from nimblec.kernels.gpu import SM_90
from nimblec.kernels.products.quantized_op import convolution_of_integers
from nimblec.kernels.products.quantized_rewrite import QUANTIZED, requests
from nimblec.onnx_import.importer import import_model

CASES = {
    "product": "check((1, 37), 80, 50, [16, 32, 32, 1, 4, 2])",
    "product, split unevenly": "check((1, 5), 200, 50, [16, 32, 32, 3, 4, 2], zero=9)",
    "padding with a zero point": "check((9, 7), 32, 40, [16, 16, 32, 1, 4, 2], kernel=3, padding=1, zero=121, batch=2)",
    "signed, split, strided": (
        "check((9, 7), 8, 40, [32] * 3 + [4, 4, 2], I8, I8, kernel=3, padding=1, zero=-5, out_zero=7, stride=2)"
    ),
    "stem": "check((15, 13), 3, 20, [32, 32, 32, 2, 4, 2], U8, I8, kernel=7, padding=3, stride=2, zero=125)",
    "residual": "check((9, 7), 16, 24, [16, 16, 32, 1, 4, 2], U8, I8, out_zero=99, again=U8, residual=True)",
    "residual, split": "check((9, 7), 96, 24, [16, 16, 32, 3, 4, 2], I8, U8, zero=5, again=I8, residual=True)",
    "quantised again": "check((9, 7), 16, 24, [16, 16, 32, 1, 4, 2], again=I8)",
    "dilation": "check((11, 9), 16, 24, [32, 16, 32, 1, 4, 2], I8, U8, kernel=3, padding=2, dilation=2, zero=-128)",
}

INTERPRET = """
from dataclasses import replace
import torch
from nimblec.graph.quantized import quantized_convolution
from nimblec.kernels.launch import prepared
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.packing import pack_convolution
from nimblec.kernels.products.quantized_op import Levels, convolution_of_integers, requantized, zero_sums

U8, I8 = torch.uint8, torch.int8

def check(size, channels, out, tiling, dtype=U8, out_dtype=U8, *, zero=0, out_zero=0, batch=1, kernel=1, stride=1,
          padding=0, dilation=1, again=None, residual=False):
    torch.manual_seed(0)
    limits = torch.iinfo(dtype), torch.iinfo(out_dtype)
    x = torch.randint(limits[0].min, limits[0].max + 1, (batch, channels, *size), dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randint(-127, 128, (out, channels, kernel, kernel), dtype=I8)
    bias = torch.randint(-9999, 9999, (out,), dtype=torch.int32)
    factors = torch.rand(out) / (60 * weight[0].numel() ** 0.5)
    own = Levels(x_zero=zero, own_zero=out_zero, own_low=limits[1].min, own_high=limits[1].max)
    levels = own if again is None else replace(own, own_scale=0.0123, residual_zero=-7, residual_scale=0.0171,
        scale=0.0391, zero=21, low=torch.iinfo(again).min, high=torch.iinfo(again).max)
    geometry = [[n, n] for n in (stride, padding, dilation)]
    expected = quantized_convolution(x, weight, factors, bias, zero, out_zero, out_dtype, *geometry)
    other = torch.randint(-128, 128, expected.shape, dtype=I8).contiguous(memory_format=torch.channels_last)
    other = other if residual else None
    expected = expected if again is None else requantized(expected, other, levels, again)
    arrived = torch.zeros(99, dtype=torch.int32)
    made = prepared(convolution_of_integers, x, pack_convolution(weight, Tiling.of(tiling)), factors,
        bias - zero_sums(weight, zero, dtype), other, levels.tensor(x.device), arrived, out, [kernel, kernel],
        *geometry, zero != 0 and padding > 0, again is not None, again or out_dtype, tiling, "none")
    made.launch()
    assert torch.equal(made.results, expected)
    assert len(expected.unique()) > 50
    assert not arrived.any()
"""

COMPILE = """
import torch
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products.quantized_op import convolution_of_integers

def empty(*size, dtype=torch.int32):
    return torch.empty(*size, dtype=dtype, device="meta")

for dtype, has_zero, tiling in (
    (torch.int8, False, [64, 64, 128, 4, 4, 3]),
    (torch.uint8, True, [64, 64, 64, 1, 4, 3]),
    (torch.uint8, False, [32, 64, 128, 1, 4, 3]),
):
    x = empty(1, 256, 14, 14, dtype=dtype).contiguous(memory_format=torch.channels_last)
    geometry = [[n, n] for n in (3, 1, 1, 1)]
    launch = launch_of(convolution_of_integers, x, empty(1, dtype=torch.int8), empty(1, dtype=torch.float32), empty(1),
        x, empty(11, dtype=torch.float32), empty(9), 256, *geometry, has_zero, True, torch.int8, tiling, "late")
    ptx = compile_job(launch.job, architecture=90).asm["ptx"]
    assert "fma.rn.f32" not in ptx
    wait, copy = ptx.index("griddepcontrol.wait"), ptx.index("cp.async.cg.shared.global")
    print(*(any(word in line and ".s8.s8" in line for line in ptx.splitlines()) for word in ("wgmma", "mma.sync")),
        ptx.index("cp.async.bulk.prefetch.L2") < wait < copy)
"""


@pytest.fixture(scope="module", params=SETTINGS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, fx.GraphModule]:
    model = quantized_network(SETTINGS[request.param], tmp_path_factory.mktemp("quantized"))
    return model.SerializeToString(), import_model(model).module


def _count(module: fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in module.graph.nodes)


def test_import_agrees_with_onnxruntime(network: tuple[bytes, fx.GraphModule]) -> None:
    model, module = network
    assert _count(module, quantized_convolution) == PRODUCTS
    (wanted,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": image(9)})
    (found,) = run(module, torch.from_numpy(image(9)))
    step = np.diff(np.unique(wanted)).min()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1.001 * step)
    assert len(np.unique(wanted)) > PRODUCTS


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_kernels_equal_the_reference(network: tuple[bytes, fx.GraphModule], dtype: torch.dtype | None) -> None:
    module = optimize(network[1], device="cuda", dtype=dtype)
    assert [request.residual is not None for request in requests(module)].count(True) == 1
    x = torch.from_numpy(image(9))
    (expected,) = run(module, x)
    QUANTIZED.use_first(module, SM_90)
    check(module)
    assert (_count(module, convolution_of_integers), _count(module, quantized_convolution)) == (PRODUCTS, 0)
    assert torch.equal(run(module, x)[0], expected)


def test_padding_alone_tells_requests_apart(network: tuple[bytes, fx.GraphModule]) -> None:
    """Zero points and scales are values that a kernel reads, so that convolutions of one shape share a kernel."""
    found = list(requests(network[1]))
    with_padding = [request for request in found if any(request.shape.padding)]
    assert all(request.has_zero == (request.given["zero"] != 0) for request in with_padding)
    assert not any(request.has_zero for request in found if request not in with_padding)


@needs_triton
def test_values_in_the_interpreter(tmp_path: Path) -> None:
    interpret(INTERPRET, CASES, tmp_path)


@needs_triton
def test_code_for_hopper_multiplies_integers(tmp_path: Path) -> None:
    found = in_process(COMPILE, tmp_path).splitlines()
    assert found == ["True False True", "True False True", "False True True"]
