"""The norm kernel in Triton's interpreter against torch in float32, and compiled for Hopper without a GPU.

Both in processes of their own, as in test_kernels_triton.
"""

from pathlib import Path

from triton_process import interpret, needs_triton, run

pytestmark = needs_triton

INTERPRET = """
import torch
from nimblec.kernels.launch import prepared
from nimblec.kernels.reductions.norm_op import add_layer_norm, layer_norm, normalized

def check(rows, columns, tiling, *, rms=False, weight=True, bias=True, residual=False, shift=0.0, **dtypes):
    torch.manual_seed(0)
    dtype, out_dtype = dtypes.get("dtype", torch.float16), dtypes.get("out_dtype", torch.float16)
    x = (torch.randn(rows, columns) + shift).to(dtype)
    w = torch.randn(columns, dtype=dtypes.get("weights", torch.float16)) if weight else None
    b = torch.randn(columns).half() if bias else None
    other = torch.randn(rows, columns).to(dtype) if residual else None
    op, read = (add_layer_norm, (x, other)) if residual else (layer_norm, (x,))
    made = prepared(op, *read, w, b, 1e-5, rms, out_dtype, tiling, "none")
    out, total = made.results if residual else (made.results, None)
    out.fill_(torch.nan)
    if residual:
        total.fill_(torch.nan)
    made.launch()
    if residual:
        x = x + other
        torch.testing.assert_close(total, x, atol=0, rtol=0)
    torch.testing.assert_close(out, normalized(x, w, b, 1e-5, rms, out_dtype), atol=4e-3, rtol=2e-3)
"""

CASES = {  # the interpreter rounds bfloat16 towards zero: see test_kernels_norm_gpu
    "layer norm": "check(7, 96, [1, 1])",
    "rows past the end": "check(7, 96, [4, 4])",
    "no columns left": "check(4, 64, [2, 1])",
    "far from zero": "check(5, 100, [1, 2], shift=30.0)",
    "rms": "check(5, 100, [2, 2], rms=True, bias=False)",
    "rms far from zero": "check(5, 100, [2, 2], rms=True, shift=5.0)",
    "without weights": "check(3, 40, [1, 1], weight=False, bias=False)",
    "residual": "check(7, 96, [2, 1], residual=True)",
    "rms of a sum": "check(7, 96, [2, 1], residual=True, rms=True, bias=False)",
    "one column": "check(3, 1, [1, 1])",
    "from float32": "check(7, 96, [1, 1], dtype=torch.float32, weights=torch.float32)",
}

COMPILE = """
import torch
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.launch import launch_of
from nimblec.kernels.reductions.norm_op import add_layer_norm, layer_norm
for columns, tiling, residual in ((768, [1, 4], True), (1000, [2, 1], False)):
    x, weight = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((128, columns), (columns,)))
    op, read = (add_layer_norm, (x, x)) if residual else (layer_norm, (x,))
    launch = launch_of(op, *read, weight, weight, 1e-5, False, torch.float16, tiling, "late")
    ptx = compile_job(launch.job, architecture=90).asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait")
    early, _ = after.split("griddepcontrol.launch_dependents")
    loads, stores = "ld.global.v4", "st.global"
    print(loads in before, stores in before, loads in after, stores in early)
"""


def test_values_in_the_interpreter(tmp_path: Path) -> None:
    interpret(INTERPRET, CASES, tmp_path)


def test_weights_are_read_before_the_wait_and_nothing_is_written(tmp_path: Path) -> None:
    assert run(COMPILE, tmp_path).splitlines() == ["True False True False"] * 2
