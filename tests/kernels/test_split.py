"""Products of float32 as parts in bfloat16: their error beside float32's own, and the kernel that writes the parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from arithmetic import arithmetic
from rewriting import record
from torch import Tensor, fx
from triton_process import interpret, needs_triton, run

from nimblec.kernels.gpu import GPU, SM_86, SM_90
from nimblec.kernels.products.split_op import split
from nimblec.optimize.passes import float_products
from nimblec.optimize.passes.float_products import is_fast, split_products

aten = torch.ops.aten


def products(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the products of a linear layer's step, whose factors lie in all orders, and a small one."""
    return [torch.addmm(bias, x, weight.t()), grad @ weight, grad.t() @ x, x[:100] @ weight.t()]


def drawn(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((600, 768), (512, 768), (512,), (600, 512))
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def assert_as_exact(found: list[Tensor], given: list[Tensor]) -> None:
    exact = products(*(tensor.double() for tensor in given))
    for result, plain, expected in zip(found, products(*given), exact, strict=True):
        assert result.stride() == expected.stride()
        assert (result - expected).abs().max() < 1.2 * (plain - expected).abs().max() + 1e-7


class _OnCPU(fx.Interpreter):
    """Multiplies halves to float32, which the CPU cannot."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.mm.dtype:
            return args[0].float() @ args[1].float()
        return super().call_function(target, args, kwargs)


def test_large_products_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_products, "is_fast", lambda _: True)
    given = drawn("cpu")
    module = record(products, *given)
    with arithmetic("tf32"):
        split_products(module)
    assert not [node for node in module.graph.nodes if node.target is split]
    with arithmetic("fp32"):
        split_products(module)
    assert len([node for node in module.graph.nodes if node.target is split]) == 6
    assert_as_exact(_OnCPU(module).run(*given), given)


def test_only_gpus_with_wide_tensor_cores_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, gains in ((SM_86, False), (SM_90, True)):
        monkeypatch.setattr(GPU, "current", lambda gpu=gpu: gpu)
        assert [is_fast(torch.device(name)) for name in ("cuda", "cpu")] == [gains, False]


INTERPRET = """
import torch
from nimblec.kernels.launch import prepared
from nimblec.kernels.products.split_op import split
x = torch.randn(37, 70) * torch.logspace(-20, 20, 70)
x[0, :2] = torch.tensor([0.0, torch.finfo().max])
def check(*how):
    made = prepared(split, x, *how, "none")
    made.results.fill_(torch.nan)
    made.launch()
    assert torch.equal(made.results, split(x, *how, "none"))
    first, second, middle, *_ = made.results.double().unflatten(how[1], (6, -1)).unbind(how[1])
    assert torch.equal(first + second + middle, x.double())
"""
CASES = {f"side {side}, axis {axis}": f"check({side}, {axis})" for side in (0, 1) for axis in (0, 1)}

COMPILE = """
import torch
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products.split_op import split
launch = launch_of(split, torch.empty(600, 768, device="meta"), 0, 1, "late")
ptx = compile_job(launch.job, architecture=90).asm["ptx"]
assert "ld.global.v4" in ptx
assert "st.global.v4" in ptx
"""


@needs_triton
def test_the_parts_add_up_to_the_number(tmp_path: Path) -> None:
    interpret(INTERPRET, CASES, tmp_path)


@needs_triton
def test_it_reads_and_writes_sixteen_bytes_at_once(tmp_path: Path) -> None:
    run(COMPILE, tmp_path)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_products_on_a_gpu_are_as_exact_and_the_same_each_time() -> None:
    given = drawn("cuda")
    module = record(products, *given)
    split_products(module)
    results = [module(*given) for _ in range(20)]
    assert_as_exact(results[0], given)
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))
