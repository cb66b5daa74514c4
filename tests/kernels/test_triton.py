"""The Triton kernels in Triton's interpreter against torch in float32, and compiled for Hopper without a GPU.

Both in processes of their own, where Triton can be imported; where it cannot, as with the CPU builds
of torch, the tests are skipped.
"""

from pathlib import Path

import pytest
from triton_process import interpret, needs_triton, run

pytestmark = needs_triton

INTERPRET = """
import torch
from torch.nn import functional
from nimblec.kernels.reference import Prologue, finish
from nimblec.kernels.shapes import Convolution, product
from nimblec.kernels.products import depthwise_op
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling
from nimblec.kernels.launch import prepared
from nimblec.kernels.products.gemm_op import convolution_launch, linear
from nimblec.kernels.reductions.norm_op import normalized
from nimblec.kernels.products.packing import pack_convolution, pack_linear
from nimblec.kernels.products.gemm_reference import RowNorm, moments_of
from nimblec.kernels.products.gemm_tilings import Tiling

def prologue(channels, images, before, gate):
    if not before and not gate:
        return Prologue()
    scale, shift = (torch.randn(channels), torch.randn(channels)) if before else (None, None)
    gate = torch.rand(images, channels, 1, 1).half() if gate else None
    return Prologue(scale=scale, shift=shift, activation=before or "none", gate=gate)

def check(size, channels, out, tiling, activation="relu", *, batch=1, kernel=1, stride=1, padding=0, dilation=1,
          bias=True, residual=False, slices=1, parts=1, before="", gate=False, groups=1, dtype=torch.float16):
    torch.manual_seed(0)
    two = lambda n: n if isinstance(n, tuple) else (n, n)
    shape = Convolution(batch=batch, height=size[0], width=size[1], channels=channels // groups, out_channels=out,
        kernel=two(kernel), stride=two(stride), padding=two(padding), dilation=two(dilation), groups=groups,
        pixel_stride=channels * slices, out_stride=out * parts, residual_stride=out * 2)
    tiling = Tiling.of(tiling)
    pixels = size if slices else (1, 1)
    x = torch.randn(batch, *pixels, channels * max(slices, 1), dtype=dtype)[..., :channels].permute(0, 3, 1, 2)
    x = x.expand(batch, channels, *size)
    weight = (torch.randn(out, shape.channels, *shape.kernel) / shape.depth ** 0.5).to(dtype)
    b = torch.randn(out, dtype=dtype) if bias else None
    read = prologue(channels, batch, before, gate)
    whole = torch.full((batch, shape.out_height, shape.out_width, out * parts), torch.nan, dtype=dtype)
    y = whole[..., -out:].permute(0, 3, 1, 2)
    r = torch.randn(batch, *y.shape[2:], out * 2, dtype=dtype)[..., out:].permute(0, 3, 1, 2) if residual else None
    down, across = tiling.tiles(shape)
    arrived = torch.zeros(down * across, dtype=torch.int32)
    convolution_launch(shape, tiling, x=x, weight=pack_convolution(weight, tiling), bias=b, residual=r,
        prologue=read, out=y, counters=arrived, activation=activation, trigger="none", arithmetic="tf32x3")()
    read = read(x.float()).to(dtype).float()
    total = functional.conv2d(read, weight.float(), b.float() if bias else None, stride, padding, dilation, groups)
    eps = torch.finfo(torch.float16).eps
    torch.testing.assert_close(y.float(), finish(total, r, activation), atol=4 * eps, rtol=eps)
    assert not arrived.any(), arrived
    assert whole[..., :-out].isnan().all()

def normed(rows, columns, out, tiling, widths, *, rms=False, residual=False, activation="none"):
    # of rows whose moments another product left, with the moments of its own result
    torch.manual_seed(0)
    tiling = Tiling.of(tiling)
    x, weight = torch.randn(rows, columns).half() * 2 + 1, (torch.randn(out, columns) / columns ** 0.5).half()
    b, r = torch.randn(out).half(), torch.randn(rows, out).half() if residual else None
    norm = RowNorm(moments=moments_of(x, widths), column_sums=weight.float().sum(1), eps=1e-2, rms=rms)
    y, left = torch.empty(rows, out).half(), torch.full((out // tiling.block_n, 2, rows), torch.nan)
    shape = product(rows, columns, out)
    down, across = tiling.tiles(shape)
    arrived = torch.zeros(down * across, dtype=torch.int32)
    convolution_launch(shape, tiling, x=x, weight=pack_linear(weight.t(), tiling), bias=b, residual=r,
        prologue=Prologue(), out=y, counters=arrived, activation=activation, trigger="none", arithmetic="tf32",
        norm=norm, out_moments=left)()
    normal = normalized(x.float(), None, None, 1e-2, rms, torch.float32)
    expected = finish(normal @ weight.t().float() + b.float(), r, activation)
    torch.testing.assert_close(y.float(), expected, atol=8e-3, rtol=2e-3)
    torch.testing.assert_close(left, moments_of(y, tiling.block_n), atol=1e-5, rtol=1e-5)

def gated(columns, out, tiling, rows=1, **norm):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns).half(), (torch.randn(columns, out) / columns ** 0.5).half()
    if norm:
        norm |= {"moments": moments_of(x, 16), "column_sums": weight.float().sum(0)}
    packed = pack_linear(weight, Tiling.of(tiling))
    args = x, packed, torch.randn(out).half(), None, None, out, "silu", tiling, "none"
    made = prepared(linear, *args, gated=True, **norm)
    made.launch()
    torch.testing.assert_close(made.results, linear(*args, gated=True, **norm), atol=2e-3, rtol=2e-3)

def depthwise(size, channels, tiling, activation="relu", *, kernel=3, stride=1, padding=1, dilation=1, residual=False,
              before="", gate=False, slices=1, parts=1, multiplier=1):
    torch.manual_seed(0)
    two, out = lambda n: (n, n), channels * multiplier
    x = torch.randn(2, *size, channels * slices).half()[..., :channels].permute(0, 3, 1, 2)
    weight, b = torch.randn(out, 1, kernel, kernel).half(), torch.randn(out).half()
    read = prologue(channels, 2, before, gate)
    total = functional.conv2d(read(x.float()), weight.float(), b.float(), stride, padding, dilation, channels)
    r = torch.randn(2, *total.shape[2:], out * 3).half()[..., :out].permute(0, 3, 1, 2) if residual else None
    packed = depthwise_op.pack_depthwise(weight, DepthwiseTiling.of(tiling))
    geometry = (two(number) for number in (kernel, stride, padding, dilation))
    whole = torch.full((2, *total.shape[2:], out * parts), torch.nan).half().permute(0, 3, 1, 2)
    y = whole[:, -out:]
    prepared(depthwise_op.depthwise_into, x, packed, b, r, out, *geometry, activation, tiling, "none",
        scale=read.scale, shift=read.shift, gate=read.gate, before=read.activation, out=y).launch()
    torch.testing.assert_close(y.float(), finish(total, r, activation), atol=8e-3, rtol=1e-3)
    assert whole[:, :-out].isnan().all()
"""

CASES = {  # none in bfloat16: the interpreter multiplies the bits of bfloat16 as integers
    "one tap a step": "check((9, 7), 32, 10, [16, 16, 16, 1, 4, 2], kernel=3, padding=1)",
    "float32": "check((9, 7), 32, 10, [16, 16, 16, 2, 4, 2], kernel=3, padding=1, dtype=torch.float32)",
    "split": "check((9, 7), 32, 10, [16, 16, 16, 3, 4, 2], kernel=3, padding=1, residual=True)",
    "split unevenly": "check((9, 7), 32, 40, [32, 32, 32, 4, 4, 2], 'silu', kernel=3, padding=1, batch=2)",
    "stem": "check((15, 13), 3, 20, [32, 32, 32, 2, 4, 2], 'gelu', kernel=7, stride=2, padding=3)",
    "groups": "check((6, 7), 48, 48, [16, 16, 16, 1, 4, 2], kernel=3, padding=1, groups=3, residual=True)",
    "groups of two tiles, split": "check((9, 5), 64, 64, [16, 16, 32, 3, 4, 2], kernel=3, stride=2, groups=2, batch=2)",
    "groups of pixels": "check((1, 23), 80, 96, [16, 16, 32, 1, 4, 2], 'gelu', groups=2, slices=2, parts=2)",
    "dilation": "check((11, 9), 16, 24, [32, 16, 16, 1, 4, 2], 'gelu_tanh', kernel=3, dilation=2, padding=2)",
    "stride": "check((9, 9), 48, 24, [16, 16, 32, 2, 4, 2], 'hardswish', stride=2)",
    "one axis": "check((1, 23), 16, 20, [16, 16, 16, 2, 4, 2], kernel=(1, 5), stride=(1, 2), padding=(0, 3), batch=2)",
    "leaky": "check((9, 7), 32, 10, [16, 16, 16, 1, 4, 2], 'leaky_relu 0.1', kernel=3, padding=1, residual=True)",
    "odd channels and stride": "check((9, 5), 10, 33, [16, 16, 16, 1, 4, 2], 'relu6', kernel=3, stride=2, padding=1)",
    "product": "check((1, 37), 80, 50, [16, 32, 32, 1, 4, 2], 'none', bias=False)",
    "product of one row again and again": "check((1, 37), 80, 50, [16, 32, 32, 1, 4, 2], slices=0)",
    "product split": "check((1, 5), 200, 50, [16, 32, 32, 3, 4, 2], 'tanh', residual=True)",
    "one row": "check((1, 1), 80, 50, [1, 8, 32, 1, 4, 2], 'silu', residual=True)",
    "one row split": "check((1, 1), 200, 50, [1, 4, 32, 3, 4, 2], 'none', dtype=torch.float32)",
    "one row with a gate": "check((1, 1), 80, 50, [1, 4, 64, 1, 4, 1], 'none', before='silu', gate=True)",
    "one gated row": "gated(80, 50, [1, 8, 32, 1, 4, 2])",
    "gated rows": "gated(80, 50, [16, 16, 32, 1, 4, 2], rows=20)",
    "gated rows of a norm": "gated(96, 64, [16, 32, 32, 1, 4, 2], rows=37, eps=1e-2)",
    "one gated row of an RMS norm": "gated(96, 64, [1, 4, 128, 1, 4, 1], eps=1e-2, rms=True)",
    "one row of an RMS norm": "normed(1, 96, 32, [1, 8, 32, 1, 4, 2], 32, rms=True)",
    "product of a norm": "normed(37, 96, 32, [16, 16, 32, 1, 4, 2], 32, residual=True, activation='gelu')",
    "product of a norm, split": "normed(5, 96, 64, [16, 32, 32, 3, 4, 2], 32, residual=True)",
    "product of an RMS norm": "normed(20, 80, 16, [32, 16, 32, 1, 4, 2], 16, rms=True)",
    "product of an RMS norm, split": "normed(20, 64, 16, [32, 16, 16, 2, 4, 2], 64, rms=True)",
    "slice of channels": "check((6, 7), 16, 20, [16, 16, 16, 1, 4, 2], 'sigmoid', kernel=3, slices=2, padding=1)",
    "into a part": "check((6, 7), 16, 24, [16, 16, 16, 1, 4, 2], kernel=3, padding=1, parts=3, residual=True, batch=2)",
    "into a part, split": "check((6, 7), 16, 24, [16, 16, 16, 3, 4, 2], kernel=3, parts=2, residual=True)",
    "no bias": "check((6, 7), 16, 20, [16, 16, 16, 3, 4, 2], 'hardsigmoid', kernel=3, bias=False)",
    "depthwise": "depthwise((9, 7), 20, [32, 16, 2], 'relu6', residual=True)",
    "depthwise into a part": "depthwise((9, 7), 24, [32, 16, 2], 'relu6', residual=True, parts=3)",
    "depthwise 5x5": "depthwise((9, 8), 32, [32, 32, 2], 'hardswish', kernel=5, stride=2, padding=2)",
    "depthwise 7x7": "depthwise((8, 7), 16, [64, 16, 2], 'none', kernel=7, padding=6, dilation=2)",
    "depthwise 9x9": "depthwise((8, 7), 16, [64, 16, 2], 'none', kernel=9, padding=4)",
    "depthwise multiplier": "depthwise((9, 7), 12, [32, 16, 2], 'silu', before='relu', gate=True, multiplier=3)",
    "depthwise slice of channels": "depthwise((9, 7), 16, [32, 16, 2], before='relu', gate=True, slices=2)",
    "prologue": "check((9, 7), 48, 10, [16, 16, 16, 1, 4, 2], before='relu', gate=True, residual=True)",
    "prologue of several images": "check((5, 7), 40, 10, [16, 16, 32, 2, 4, 2], before='silu', gate=True, batch=2)",
    "gate": "check((5, 7), 32, 10, [16, 16, 32, 1, 4, 2], gate=True, batch=3)",
    "padding after the prologue": "check((5, 7), 32, 10, [16, 16, 16, 3, 4, 2], kernel=3, padding=1, before='sigmoid')",
    "odd channels": "check((5, 7), 10, 20, [16] * 3 + [2, 4, 2], kernel=3, padding=1, before='hardsigmoid', gate=True)",
    "depthwise prologue": "depthwise((9, 7), 20, [32, 16, 2], 'relu6', before='relu', gate=True)",
    "padding beyond the kernel": "check((4, 4), 16, 16, [16, 16, 16, 1, 4, 2], 'none', kernel=1, padding=1)",
}

COMPILE = """
import re
import torch
from dataclasses import replace
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.reference import Prologue
from nimblec.kernels.shapes import Convolution, product
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products.depthwise_op import depthwise
from nimblec.kernels.products.gemm_op import convolution_launch
from nimblec.kernels.products.gemm_reference import RowNorm
from nimblec.kernels.products.gemm_tilings import Tiling

def empty(dtype=torch.float16):
    return torch.empty(1, dtype=dtype, device="meta")

def job(shape, tiling, dtype=torch.float16, arithmetic="tf32", activation="relu", **given):
    named = {name: empty(dtype) for name in ("x", "weight", "out", "bias")}
    launch = convolution_launch(shape, Tiling.of(tiling), **{"residual": empty(dtype), **named, **given},
        counters=empty(torch.int32), activation=activation, trigger="late", arithmetic=arithmetic)
    return launch.job

def ptx_of(job):
    return compile_job(job, architecture=90).asm["ptx"]

shape = Convolution(batch=1, height=14, width=14, channels=256, out_channels=256, kernel=(3, 3), padding=(1, 1))
wide = empty(torch.float32)
whole = Prologue(scale=wide, shift=wide, gate=empty(), activation="relu")
for tiling, before in (
    ([64, 64, 64, 4, 4, 3], Prologue()),
    ([64, 64, 64, 4, 4, 3], whole),
    ([16, 32, 64, 1, 2, 3], Prologue()),
):
    ptx = ptx_of(job(shape, tiling, prologue=before))
    products = []
    for arithmetic in ("tf32", "tf32x3"):
        gate = None if before.gate is None else wide
        single = job(shape, tiling, torch.float32, arithmetic, prologue=replace(before, gate=gate))
        products.append(len(re.findall("mma.*tf32", ptx_of(single))))
    assert 0 < 3 * products[0] <= products[1], products
    found = [word in ptx for word in ("wgmma.mma_async", "mma.sync", "atom.global.gpu.acq_rel")]
    wait = ptx.index("griddepcontrol.wait")
    launch = ptx.index("griddepcontrol.launch_dependents")
    fetch = ptx.index("cp.async.bulk.prefetch.L2")
    reads = min(ptx.find(word, 0) for word in ("cp.async.cg.shared.global", "st.global") if word in ptx)
    print(*found, fetch < wait < launch, wait < reads)
for rms in (None, False, True):
    moments = torch.empty(12, 2, 197, device="meta")
    norm = None if rms is None else RowNorm(moments=moments, column_sums=wide, eps=1e-5, rms=rms)
    ptx = ptx_of(job(product(197, 768, 768), [64, 64, 64, 1, 4, 3], torch.bfloat16, activation="none",
        residual=None, out_moments=wide, norm=norm))
    assert "wgmma.mma_async" in ptx
    assert ptx.index("griddepcontrol.wait") < ptx.index("cp.async.cg.shared.global")
    assert ("rsqrt" in ptx) == (rms is not None)
half = empty(torch.bfloat16)
images = torch.empty(1, 96, 14, 14, dtype=torch.bfloat16, device="meta").contiguous(memory_format=torch.channels_last)
geometry = [3, 3], [1, 1], [1, 1], [1, 1]
launch = launch_of(depthwise, images, half, half, None, 96, *geometry, "relu6", [8, 32, 4], "late")
ptx = ptx_of(launch.job)
print(ptx.index("cp.async.bulk.prefetch.L2") < ptx.index("griddepcontrol.wait") < ptx.index("st.global"))
"""

COMPILE_ALL = """
import torch
from nimblec.kernels.compiling import compile_all
from nimblec.kernels.gpu import SM_90
from nimblec.kernels.products.gemm_op import linear
from nimblec.kernels.launch import launch_of
def job(block_k):
    x, weight = (torch.empty(16, 64, dtype=torch.float16, device="meta") for _ in range(2))
    return launch_of(linear, x, weight, None, None, None, 16, "none", [16, 16, block_k, 1, 4, 3], "late").job
compile_all([job(16), job(32)], gpu=SM_90)
print("compiled")
try:
    compile_all([job(24)], gpu=SM_90)
except Exception as error:
    print(type(error).__name__, "power of 2" in str(error))
"""

POOLING = """
import os
import torch
from nimblec.cuda.capture.cubin_cut import cut
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.gpu import SM_90
from nimblec.kernels.launch import launch_of
from nimblec.kernels.reductions import pool_template as template
from nimblec.kernels.reductions.pool_op import mean2d
x = torch.empty(1, 64, 7, 7, dtype=torch.float16, device="meta")
job = launch_of(mean2d, x, False, "none", [64, 1, 1], "late").job
cubin = compile_job(job, architecture=SM_90.architecture).asm["cubin"]
folder = os.path.dirname(template.__file__).encode()
print(folder in cubin, cubin.hex(), cut(cubin, ["mean"]).hex())
"""


@pytest.mark.timeout(900)  # minutes on a busy machine
def test_values_in_the_interpreter(tmp_path: Path) -> None:
    interpret(INTERPRET, CASES, tmp_path)


@pytest.mark.slow
def test_code_for_hopper(tmp_path: Path) -> None:
    warpgroups, prologue, warps, channels = run(COMPILE, tmp_path).splitlines()
    assert warpgroups == prologue == "True False True True True"
    assert warps == "False True False True True"
    assert channels == "True"


def test_workers_compile_and_say_what_they_cannot(tmp_path: Path) -> None:
    assert run(COMPILE_ALL, tmp_path).splitlines() == ["compiled", "CompileError True"]
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_cut_cubins_are_the_same_with_and_without_line_numbers(tmp_path: Path) -> None:
    """With those, it names a folder of this machine."""
    names_folder, whole, kept = run(POOLING, tmp_path / "whole").split()
    lean = run(POOLING, tmp_path / "lean", TRITON_DISABLE_LINE_INFO="1").split()
    assert (names_folder, lean[0]) == ("True", "False")
    assert kept == lean[2]
    assert len(kept) < len(lean[1]) < len(whole)
