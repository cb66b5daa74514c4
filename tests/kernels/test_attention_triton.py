"""The attention kernel in Triton's interpreter against torch in float32, and compiled for Hopper without a GPU.

Both in processes of their own, as in test_triton.
"""

from pathlib import Path

import pytest
from triton_process import interpret, needs_triton, run

pytestmark = needs_triton

INTERPRET = """
import torch
from triton.runtime import interpreter
from nimblec.kernels.launch import prepared
from nimblec.kernels.reductions.attention_op import attended, attention

# Triton 3.6 reads the bound of a loop from an array of one element, which NumPy no longer does.
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
interpreter._patch_lang_tensor = patched

def check(queries, keys, size, tiling, *, batch=1, heads=2, key_heads=2, value_size=None, mask=None,
          dtype=torch.float16, **how):
    torch.manual_seed(0)
    value_size = value_size or size
    causal = how.get("causal", False)
    query = torch.randn(batch, queries, heads, size, dtype=dtype).transpose(1, 2)
    if how.get("batch_second"):
        query = query.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    joined = torch.randn(batch, keys, key_heads * (size + value_size), dtype=dtype)
    key, value = joined.split([key_heads * size, key_heads * value_size], -1)
    key, value = (part.unflatten(-1, (key_heads, -1)).transpose(1, 2) for part in (key, value))
    if how.get("key_first"):
        key = key.contiguous().mT.contiguous().mT
    made = prepared(attention, query, key, value, mask, causal, 0.2, tiling, "none")
    assert (made.results.stride(0) < made.results.stride(1)) == how.get("batch_second", False)
    made.results.fill_(torch.nan)
    made.launch()
    expected = attended(query, key, value, mask, causal=causal, scale=0.2).transpose(1, 2)
    torch.testing.assert_close(made.results.float(), expected, atol=2e-3, rtol=2e-3)

def hidden(*shape, share=0.5):
    bits = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share
    bits[..., 0, :] = True  # a row without any key
    return bits
"""

CASES = {  # none in bfloat16: the interpreter multiplies the bits of bfloat16 as integers
    "one step": "check(32, 64, 64, [16, 64, 2, 1], batch=2)",
    "ViT": "check(197, 197, 64, [64, 64, 4, 2], heads=1, key_heads=1)",
    "text encoder": "check(77, 77, 80, [32, 128, 4, 1], causal=True)",
    "causal in steps": "check(77, 77, 64, [16, 32, 4, 2], causal=True)",
    "causal, fewer queries": "check(20, 77, 32, [16, 16, 4, 2], causal=True)",
    "causal, fewer keys": "check(77, 20, 32, [16, 32, 4, 2], causal=True)",
    "one query": "check(1, 77, 128, [16, 32, 4, 2], batch=2)",
    "one key": "check(5, 1, 64, [16, 32, 4, 1])",
    "MobileViT": "check(16, 16, 36, [16, 16, 2, 1], heads=4, key_heads=4)",
    "other odd sizes": "check(20, 33, 60, [16, 32, 4, 2], value_size=4)",
    "batch second": "check(20, 33, 64, [16, 32, 4, 2], batch=3, batch_second=True)",
    "cross": "check(50, 77, 40, [32, 32, 4, 2])",
    "keys along memory": "check(33, 40, 64, [16, 32, 4, 2], key_first=True)",
    "shared keys": "check(33, 20, 64, [16, 32, 4, 1], heads=4, key_heads=2)",
    "other values": "check(33, 20, 96, [16, 32, 4, 1], value_size=24)",
    "bias": "check(33, 45, 64, [16, 32, 4, 2], mask=torch.randn(1, 2, 33, 45).half())",
    "bias for all heads": "check(33, 45, 64, [16, 64, 4, 1], batch=2, mask=torch.randn(2, 1, 1, 45))",
    "infinite": "check(33, 45, 64, [16, 16, 4, 2], mask=torch.zeros(33, 45).masked_fill(hidden(33, 45), -torch.inf))",
    "lowest": "check(33, 45, 64, [16, 16, 4, 2], mask=torch.where(hidden(33, 45), torch.finfo().min, 0.0))",
    "float32": "check(33, 45, 64, [16, 16, 4, 2], mask=torch.randn(1, 2, 33, 45), dtype=torch.float32)",
    "bits": "check(33, 45, 64, [16, 16, 4, 2], mask=~hidden(1, 2, 33, 45, share=0.9))",
}

COMPILE = """
import torch
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.launch import launch_of
def code(queries, keys, size, tiling, dtype="float16", mask=None, causal=False):
    def rows(count):
        of_all = torch.empty(1, count, 3, 12, size, dtype=getattr(torch, dtype), device="meta")
        return of_all[:, :, 0].transpose(1, 2)
    hidden = torch.empty(1, 1, queries, keys, dtype=getattr(torch, mask), device="meta") if mask else None
    launch = launch_of(attention, rows(queries), rows(keys), rows(keys), hidden, causal, 0.125, tiling, "late")
    ptx = compile_job(launch.job, architecture=90).asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    first = min(ptx.index(word) for word in ("ld.global", "cp.async.cg") if word in ptx)
    loads = ptx.rindex("cp.async.cg" if "cp.async.cg" in ptx else "ld.global.v4")
    product = min(ptx.index(word) for word in ("wgmma.mma_async", "mma.sync") if word in ptx)
    print(wait < first, wait < ptx.index("griddepcontrol.launch_dependents") < product, "cp.async.cg" in ptx,
        loads < product)
"""
COMPILED = {
    "code(128, 128, 64, [16, 128, 4, 1])": "True True False True",
    "code(128, 128, 64, [64, 128, 4, 1], 'bfloat16')": "True True False True",
    "code(197, 197, 64, [32, 64, 4, 2])": "True True True False",
    "code(197, 197, 64, [32, 64, 4, 2], 'float32')": "True True True False",
    "code(64, 64, 80, [16, 64, 2, 1], causal=True)": "True True False True",
    "code(77, 77, 40, [16, 32, 2, 2], mask='float16')": "True True True False",
    "code(77, 77, 40, [16, 32, 2, 2], mask='bool')": "True True True False",
}
"""In order: the wait before all reads, the next kernel told before all products, reads in the background, all first."""


def test_values_in_the_interpreter(tmp_path: Path) -> None:
    interpret(INTERPRET, CASES, tmp_path)


@pytest.mark.slow
def test_code_for_hopper(tmp_path: Path) -> None:
    found = run(COMPILE + "\n".join(COMPILED), tmp_path).splitlines()
    assert dict(zip(COMPILED, found, strict=True)) == COMPILED
