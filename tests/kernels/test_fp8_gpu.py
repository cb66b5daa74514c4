"""Kernels of e4m3 on a GPU against their emulation in torch, and a network from its module to its plan."""

import re

import pytest
import torch
from torch import nn

import nimblec
import nimblert
from nimblec.kernels.gpu import GPU
from nimblec.kernels.products.fp8 import factors_of, to_bytes
from nimblec.kernels.products.gemm_op import linear
from nimblec.kernels.products.gemm_reference import moments_of
from nimblec.kernels.products.gemm_tilings import candidates
from nimblec.kernels.products.packing import pack_fp8
from nimblec.kernels.shapes import product

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper"), pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("rows", "columns", "out"), [(128, 768, 2304), (128, 3072, 768), (197, 768, 3072), (7, 70, 50)]
)
@pytest.mark.parametrize(("normed", "rounded"), [(False, False), (True, False), (False, True)])
def test_every_candidate_agrees_with_the_emulation(
    rows: int, columns: int, out: int, normed: bool, rounded: bool
) -> None:
    torch.manual_seed(0)
    shape = product(rows, columns, out)
    x, weight = torch.randn(rows, columns).half(), (torch.randn(columns, out) / columns**0.5).half()
    bias, residual = torch.randn(out).half(), torch.randn(rows, out).half()
    # Some numbers are beyond the range that calibration found.
    given = {"factors": factors_of(weight, float(x.abs().max()) / 2)}
    if normed:
        given |= {"moments": moments_of(x, 10 if columns == 70 else 64), "column_sums": weight.float().sum(0)}
    if rounded:
        x = to_bytes(x, given["factors"][0])
    on_gpu = {name: tensor.cuda() for name, tensor in given.items()}
    for tiling in candidates(shape, GPU.current(), itemsize=1):
        packed, end = pack_fp8(weight, tiling), (out, "gelu", tiling.numbers, "late")
        expected = linear(x, packed, bias, residual, None, *end, **given)
        arrived = torch.zeros(tiling.blocks(shape), dtype=torch.int32, device="cuda")
        for _ in range(3):
            read = (tensor.cuda() for tensor in (x, packed, bias, residual))
            found = linear(*read, arrived, *end, **on_gpu).cpu()
            # Tensor cores cut off bits of the sum of each step.
            torch.testing.assert_close(found, expected, atol=4e-3, rtol=4e-3, msg=lambda m, t=tiling: f"{t}: {m}")
        assert not arrived.any()


def test_a_plan_is_near_its_module_and_tells_the_error() -> None:
    torch.manual_seed(0)
    layers = nn.LayerNorm(768), nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)
    module, x = nn.Sequential(*layers, *layers).eval(), torch.randn(128, 768)
    made = nimblec.compile(module, (x,), target="cuda", level=2, precision="fp8", plan_cache=None)
    with nimblert.load(made) as executable:
        (found,) = executable.run({made.programs[0].inputs[0].name: x.numpy()}).values()
    error = (torch.from_numpy(found) - module(x)).norm() / module(x).norm()
    # Products that the library computes faster are of float16.
    assert error < 0.1


def test_the_note_has_the_errors_of_fp8_and_fp16(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Linear(768, 3072).eval()
    nimblec.compile(module, (torch.randn(128, 768),), target="cuda", level=2, precision="fp8", plan_cache=None)
    assert re.search(r"of its largest magnitude \(fp16: [0-9.e-]+, [0-9.e-]+\)", caplog.text)
