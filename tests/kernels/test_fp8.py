"""Products of e4m3: calibration, rounding, the kernel against its emulation in torch, and its code for Hopper."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import check, optimize, record, rewritten, run
from torch import Tensor, fx
from torch.nn import functional
from triton_process import BY_ARCHITECTURE, interpret, needs_triton
from triton_process import run as in_process

from nimblec.base.errors import CompileError
from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblec.cuda.compile import compile_cuda
from nimblec.cuda.selection import refuse_without_fp8
from nimblec.graph.rewriter import bound, fake
from nimblec.kernels.gpu import KNOWN, SM_90
from nimblec.kernels.products.fp8 import FP8, as_fp8, calibrate, column_factors, factors_of, largest_read
from nimblec.kernels.products.gemm_match import requests
from nimblec.kernels.products.gemm_op import linear, linear_and_moments, linear_moments_and_fp8
from nimblec.kernels.products.gemm_rewrite import tilings
from nimblec.kernels.products.gemm_tilings import Fp8Tiling, Tiling, candidates
from nimblec.kernels.products.packing import pack_fp8, unpack_rows
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.fp8_results import write_fp8
from nimblec.kernels.reductions.norm_op import layer_norm_and_fp8
from nimblec.kernels.shapes import product
from nimblec.optimize.o2 import KERNELS, first
from nimblec.optimize.pipeline import Setting

CASES = {
    "plain": "check(37, 80, 50, [16, 32, 32, 1, 4, 2])",
    "split, residual": "check(37, 200, 50, [16, 32, 32, 3, 4, 2], 'gelu', residual=True)",
    "saturated": "check(20, 96, 33, [32, 16, 64, 1, 4, 2], largest=0.5)",
    "large": "check(20, 96, 33, [32, 16, 64, 1, 4, 2], spread=3000, largest=12000)",
    "of e4m3, to e4m3": "check(37, 96, 48, [16, 32, 32, 1, 4, 2], 'gelu', residual=True, chained=True)",
    "of e4m3, to e4m3, split": "check(37, 96, 48, [16, 32, 32, 2, 4, 2], chained=True)",
    "moments, besides float16": "check(37, 96, 48, [16, 16, 32, 2, 4, 2], residual=True, copied=True)",
    "a norm": "norm(37, 80, [4, 4])",
    "of a norm": "check(20, 96, 32, [16, 16, 32, 2, 4, 2], normed=True)",
}

INTERPRET = """
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from nimblec.kernels.launch import prepared
from nimblec.kernels.products.fp8 import FP8, as_fp8, factors_of, to_bytes
from nimblec.kernels.products.gemm_op import linear, linear_moments_and_fp8
from nimblec.kernels.products.gemm_reference import moments_of
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.packing import pack_fp8
from nimblec.kernels.reductions.norm_op import layer_norm_and_fp8

convert = interpreter._convert_float

def converted(x, dtype, to, rounding):
    # The interpreter's own conversion neither saturates nor carries into the exponent.
    if to != tl.float8e4nv:
        return convert(x, dtype, to, rounding)
    numbers = x.view(np.float16 if dtype == tl.float16 else np.float32).astype(np.float32)
    return as_fp8(torch.from_numpy(numbers)).view(torch.uint8).numpy()

interpreter._convert_float = converted

def check(rows, columns, out, tiling, activation="none", *, residual=False, spread=1, largest=4, normed=False,
          chained=False, copied=False):
    torch.manual_seed(0)
    x = (torch.randn(rows, columns) * spread).half()
    weight = torch.randn(columns, out) / columns**0.5
    weight[:, 3] = 0
    kind = Tiling.of(tiling)
    norm = {"moments": moments_of(x, 32), "column_sums": weight.sum(0), "eps": 1e-2} if normed else {}
    arrived = torch.zeros(99, dtype=torch.int32)
    args = (x, pack_fp8(weight.half(), kind), torch.randn(out).half(),
        torch.randn(rows, out).half() if residual else None, arrived, out, activation, tiling, "none")
    factors = factors_of(weight.half(), largest)
    if chained:
        args = (to_bytes(x, factors[0]), *args[1:])
        norm["out_factor"] = torch.tensor([16.0])
    if copied:
        given = {"factors": factors, "out_factor": torch.tensor([16.0])}
        made = prepared(linear_moments_and_fp8, *args, **given)
        made.launch()
        (found, moments, copy), (expected, wanted, exact) = made.results, linear_moments_and_fp8(*args, **given)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(moments, wanted, atol=2e-2, rtol=2e-3)
        assert (copy != exact).float().mean() < 0.01
        return
    made = prepared(linear, *args, factors=factors, **norm)
    made.launch()
    expected = linear(*args, factors=factors, **norm)
    found, expected = (y.view(FP8) if chained else y for y in (made.results, expected))
    # A sum in another order may be rounded to a neighbour.
    tolerance = 2**-3 if chained else 2e-3
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-3 * spread, rtol=tolerance)
    assert (found.float() != expected.float()).float().mean() < (0.01 if chained else 0.5)
    assert not arrived.any()

def norm(rows, columns, tiling):
    torch.manual_seed(0)
    args = (torch.randn(rows, columns).half(), torch.randn(columns).half(), None, 1e-5, False, torch.float16, tiling,
        "none", torch.tensor([32.0]))
    made = prepared(layer_norm_and_fp8, *args)
    made.launch()
    (found, copy), (expected, exact) = made.results, layer_norm_and_fp8(*args)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    assert (copy != exact).float().mean() < 0.01
"""

COMPILE = """
import torch
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products.gemm_op import linear

def empty(*size, dtype=torch.float16):
    return torch.empty(*size, dtype=dtype, device="meta")

for tiling, dtype in (
    ([64, 64, 128, 1, 4, 3], torch.float16),
    ([128, 128, 64, 4, 8, 3], torch.float16),
    ([32, 64, 128, 1, 4, 3], torch.float16),
    ([64, 64, 128, 3, 4, 3], torch.uint8),
):
    wide = empty(2305, dtype=torch.float32)
    launch = launch_of(linear, empty(128, 768, dtype=dtype), empty(1, dtype=torch.uint8), empty(2304), None,
        empty(99, dtype=torch.int32), 2304, "gelu", tiling, "late", factors=wide, out_factor=wide)
    code = compile_job(launch.job, architecture=ARCHITECTURE).asm["ptx"]
    wait, copy = code.index("griddepcontrol.wait"), code.index("cp.async.cg.shared.global")
    assert code.index("cp.async.bulk.prefetch.L2") < wait < copy
    assert ("cvt.rn.satfinite.e4m3x2.f16x2" in code) == (dtype == torch.float16)
    assert "cvt.rn.satfinite.e4m3x2.f32" in code
    print(*(any(word in line and kind in line for line in code.splitlines())
        for word, kind in (("wgmma.mma_async", ".e4m3.e4m3"), ("mma.sync", "f16.f16"))))
"""


@needs_triton
def test_values_in_the_interpreter(tmp_path: Path) -> None:
    interpret(INTERPRET, CASES, tmp_path)


@needs_triton
@pytest.mark.parametrize("architectures", BY_ARCHITECTURE)
def test_code_multiplies_e4m3(architectures: tuple[int, ...], tmp_path: Path) -> None:
    """Hopper's narrow tiles, whose instructions take no e4m3, multiply the same numbers as float16."""
    for architecture in architectures:
        if architecture >= 90:
            found = in_process(COMPILE.replace("ARCHITECTURE", str(architecture)), tmp_path).splitlines()
            assert architecture != 90 or found == ["True False", "True False", "False True", "True False"]


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("largest", [0.0, 1e-7, 0.3, 1.0, 448.0, 449.0, 65504.0])
def test_factor_is_a_power_of_two_that_fits_the_range(largest: float) -> None:
    weight = _drawn(8, 3)
    factor, *columns = factors_of(weight, largest).tolist()
    assert math.frexp(factor)[0] == 0.5
    assert float(torch.tensor(factor).half()) == factor
    assert largest * factor <= 448 < max(largest, 1e-4) * factor * 4 or factor == 2**15 or not largest
    assert columns == pytest.approx([largest / 448 / factor for largest in weight.abs().amax(0).tolist()], rel=1e-6)


def test_rounding_saturates_and_keeps_nan() -> None:
    found = as_fp8(torch.tensor([1e9, -math.inf, math.nan, 17.0, -0.001])).float()
    torch.testing.assert_close(found, torch.tensor([448, -448, math.nan, 16, -(2**-9)]), equal_nan=True)


def test_packed_weights_stand_for_weights() -> None:
    """The largest of each column is exact; a column of zeros stays zeros."""
    weight = _drawn(70, 20)
    weight[:, 4] = 0
    packed = pack_fp8(weight, Tiling(block_m=16, block_n=16, block_k=32))
    found = unpack_rows(packed, 20, 70).view(FP8).float().t() * column_factors(weight)
    assert packed.dtype == torch.uint8
    assert (found - weight.float()).abs().max() <= weight.abs().max() / 16
    assert torch.equal(found[:, 4], weight[:, 4].float())
    largest = weight.abs().argmax(0)
    torch.testing.assert_close(found[largest, range(20)], weight.float()[largest, range(20)])


def test_tilings_fit_shared_memory() -> None:
    for gpu in KNOWN:
        for rows, columns in ((128, 2304), (197, 768), (4096, 3072)):
            for tiling in candidates(product(rows, 768, columns), gpu, itemsize=1):
                nbytes = tiling.block_k * (2 * tiling.block_m + tiling.block_n) * tiling.num_stages
                assert nbytes <= gpu.shared_per_block


WEIGHTS = [_drawn(*shape, seed=seed) / 10 for seed, shape in enumerate([(96, 64), (64, 96), (32, 64)])]
SCALE, SHIFT = _drawn(64, seed=7) / 4 + 1, _drawn(64, seed=8)


def _network(x: Tensor) -> Tensor:
    y = x + functional.linear(functional.gelu(functional.linear(x, WEIGHTS[0])), WEIGHTS[1])
    return functional.linear(functional.layer_norm(y, (64,), SCALE, SHIFT), WEIGHTS[2])


def _with_kernels(x: Tensor, *, args: tuple[Tensor, ...]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the network's optimised graph, and the same with kernels and calibrated on ``args``."""
    module = before = optimize(record(_network, x), device="cuda")
    module = KERNELS(module, Setting(use=first(SM_90), fp8=True), args=args)
    check(module)
    return before, module


def test_network_is_near_float16() -> None:
    """Two products and one whose norm is folded into it, all of e4m3."""
    x = _drawn(40, 64, seed=9) * 3
    before, module = _with_kernels(x, args=(x,))
    found = [node for node in module.graph.nodes if node.target in {linear, linear_and_moments}]
    assert [bound(node)["factors"] is not None for node in found] == [True] * 3
    assert [fake(bound(node)["factors"]).shape[0] for node in found] == [97, 65, 33]
    assert bound(found[2])["moments"] is not None
    written = rewritten(module, write_fp8)
    products = [node for node in written.graph.nodes if node.target in {linear, linear_moments_and_fp8}]
    assert [fake(node.args[0]).dtype for node in products] == [torch.float16, torch.uint8, torch.uint8]
    for after in (module, written):
        (exact,), (rounded,) = run(before, x), run(after, x)
        error = (rounded - exact).float().norm() / exact.float().norm()
        assert 0.01 < error < 0.08


def _attended(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a block with attention, and a product whose result others read, too."""
    heads = functional.linear(x, torch.cat(WEIGHTS[:1] * 2)).reshape(40, 3, 4, 16).permute(1, 2, 0, 3)
    mixed = functional.scaled_dot_product_attention(*heads.unsqueeze(1)).transpose(1, 2).reshape(40, 64)
    wide = functional.linear(mixed, WEIGHTS[0])
    return functional.linear(wide, WEIGHTS[1]), wide


def test_results_that_only_fp8_reads_are_fp8() -> None:
    x = _drawn(40, 64, seed=9)
    module = optimize(record(_attended, x), device="cuda")
    kernels = KERNELS(module, Setting(use=first(SM_90), fp8=True), args=(x,))
    rounded = rewritten(kernels, write_fp8)
    (attended,) = (node for node in rounded.graph.nodes if node.target is attention)
    products = [node for node in rounded.graph.nodes if node.target is linear]
    assert fake(attended).dtype == torch.uint8
    assert [fake(node).dtype for node in products] == [torch.float16] * 3
    assert float(run(rounded, x)[1].isnan().sum()) == 0
    for found, expected in zip(run(rounded, x), run(kernels, x), strict=True):
        # Attention is rounded once instead of twice.
        assert (found - expected).float().norm() < 0.03 * expected.float().norm()


def _post_norm(x: Tensor) -> Tensor:
    """Return a layer whose norm is read by a product and as a residual."""
    y = functional.layer_norm(x.reshape(2, 20, 64), (64,), SCALE, SHIFT)
    return y + functional.linear(functional.gelu(functional.linear(y, WEIGHTS[0])), WEIGHTS[1])


def test_norm_is_stored_in_fp8_besides_float16() -> None:
    x = _drawn(40, 64, seed=9)
    module = optimize(record(_post_norm, x), device="cuda")
    module = KERNELS(module, Setting(use=first(SM_90), fp8=True), args=(x,))
    written = rewritten(module, write_fp8)
    assert sum(node.target is layer_norm_and_fp8 for node in written.graph.nodes) == 1
    products = [node for node in written.graph.nodes if node.target is linear]
    assert [fake(node.args[0]).dtype for node in products] == [torch.uint8] * 2
    (found,), (expected,) = run(written, x), run(module, x)
    assert (found - expected).float().norm() < 0.03 * expected.float().norm()


def test_nothing_is_fp8_without_calibration() -> None:
    _, module = _with_kernels(_drawn(40, 64), args=())
    found = [node for node in module.graph.nodes if node.target in {linear, linear_and_moments}]
    assert len(found) == 3
    assert all(bound(node)["factors"] is None for node in found)


def test_calibrated_requests_have_times_and_tilings_of_their_own() -> None:
    x = _drawn(40, 64) * 5
    module = optimize(record(_network, x), device="cuda")
    plain = list(requests(module))
    calibrate(module, (x,))
    calibrated = list(requests(module))
    assert largest_read(calibrated[0].head) == float(x.abs().max())
    for before, after in zip(plain, calibrated, strict=True):
        assert before.signature != after.signature
        assert not any(isinstance(tiling, Fp8Tiling) for tiling in tilings(before, SM_90))
        assert isinstance(tilings(after, SM_90)[0], Fp8Tiling)
        named = {tiling.name for tiling in tilings(after, SM_90)}
        assert len(named) == len(tilings(after, SM_90)) > len(tilings(before, SM_90))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "cuda"}, "give -O2, or --precision fp16"),
        ({"target": "cuda", "level": 2, "refittable": True}, "would not fit"),
    ],
)
def test_options_that_fp8_cannot_have_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = Source(kind="onnx", model="a.onnx")
    with pytest.raises(CompileError, match=said):
        compile_cuda(source, Options(precision="fp8", **options), tmp_path / "a.plan", lambda *_: None)


def test_gpus_without_fp8_are_refused() -> None:
    refuse_without_fp8("fp16", (8, 6))
    refuse_without_fp8("fp8", (9, 0))
    with pytest.raises(CompileError, match=r"need compute capability 9\.0, the GPU has 8\.6: give --precision fp16"):
        refuse_without_fp8("fp8", (8, 6))
