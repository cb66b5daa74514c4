"""The kernel of a decoder's attention in Triton's interpreter against torch, and compiled for Hopper without a GPU.

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
from nimblec.kernels.reductions.cached_op import cached_attention, cached_tiling

# Triton 3.6 reads the bound of a loop from an array of one element, which NumPy no longer does.
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
interpreter._patch_lang_tensor = patched

def check(length, size, positions, *, heads=4, key_heads=2, value_size=None, mask="bits", is_rotated=True,
          dtype=torch.float16, tiling=None):
    torch.manual_seed(0)
    batch, value_size, position = len(positions), value_size or size, torch.tensor(positions)
    widths = heads * size, key_heads * size, key_heads * value_size
    joined = torch.randn(batch, 1, sum(widths)).to(dtype).split(widths, -1)
    parts = zip(joined, (heads, key_heads, key_heads), strict=True)
    query, key, value = (part.unflatten(-1, (count, -1)).transpose(1, 2) for part, count in parts)
    caches = [torch.randn(batch, key_heads, length, width).to(dtype) for width in (size, value_size)]
    seen = {
        "bits": (torch.arange(length) <= position[:, None])[:, None, None],
        "bias": torch.randn(heads, 1, length).to(dtype),
        "none": None,
    }[mask]
    angles = torch.randn(1, size)
    turns = (angles.cos().to(dtype), angles.sin().to(dtype)) if is_rotated else (None, None)
    how = tiling or cached_tiling(length, size, value_size, dtype.itemsize)
    kept = [cache.clone() for cache in caches]
    args = key, value, position, seen, *turns, 0.2, how, "none"
    expected = cached_attention(query, *kept, *args)
    made = prepared(cached_attention, query, *caches, *args)
    made.launch()
    atol = 2e-2 if dtype is torch.bfloat16 else 2e-3
    torch.testing.assert_close([made.results, *caches], [expected, *kept], atol=atol, rtol=atol)
"""

CASES = {
    "one step": "check(256, 64, [7])",
    "last position": "check(256, 64, [255], tiling=[64, 4, 2])",
    "odd length": "check(100, 64, [99], dtype=torch.float32)",
    "not rotated": "check(100, 48, [30], is_rotated=False, mask='none')",
    "two sequences": "check(33, 48, [3, 32], value_size=20)",
    "bias": "check(128, 128, [3], mask='bias', dtype=torch.bfloat16)",
    "a head for each": "check(40, 16, [3], key_heads=4)",
}

COMPILE = """
import torch
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.launch import launch_of
from nimblec.kernels.reductions.cached_op import cached_attention, cached_tiling
def code(length, size):
    def rows(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")
    caches, new = [rows(1, 8, length, size)] * 2, [rows(1, 8, 1, size)] * 2
    position, mask = rows(1, dtype=torch.int64), rows(1, length, dtype=torch.bool)
    turns, tiling = [rows(1, size)] * 2, cached_tiling(length, size, size, 2)
    args = rows(1, 32, 1, size), *caches, *new, position, mask, *turns, 0.125, tiling, "late"
    ptx = compile_job(launch_of(cached_attention, *args).job, architecture=90).asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    print(ptx[:wait].count("ld.global.v4"), ptx[wait:].count("ld.global.v4"), ptx.count("cp.async.cg"))
"""
COMPILED = {"code(256, 64)": "16 7 0", "code(2048, 64)": "0 7 32"}
"""In order: wide reads before the wait, of the cache, and after it, of rows; reads in the background."""


def test_values_in_the_interpreter(tmp_path: Path) -> None:
    interpret(INTERPRET, CASES, tmp_path)


@pytest.mark.slow
def test_code_for_hopper(tmp_path: Path) -> None:
    found = run(COMPILE + "\n".join(COMPILED), tmp_path).splitlines()
    assert dict(zip(COMPILED, found, strict=True)) == COMPILED
