"""The kernel of recurrent layers compiled for Hopper without a GPU, in a process of its own."""

from pathlib import Path

from triton_process import needs_triton, run

pytestmark = needs_triton

COMPILE = """
import subprocess
from pathlib import Path
import torch
from triton import knobs
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.gpu import SM_90
from nimblec.kernels.launch import launch_of
from nimblec.kernels.products.recurrence_op import gru_layer, lstm_layer, recurrence_shape
from nimblec.kernels.products.recurrence_tilings import recurrence_candidates

def compiled(op, hidden, batch, directions, dtype):
    def empty(*size):
        return torch.empty(size, dtype=dtype, device="meta")
    count = 4 if op is lstm_layer else 3
    gates, weight = empty(8, batch, directions * count * hidden), empty(directions, count * hidden, hidden)
    # The last arguments: the initial states of an LSTM, or the bias and the initial state of a GRU.
    last = [None, None]
    if batch > 1:
        state = empty(directions, batch, hidden)
        last = [state if op is lstm_layer else empty(directions, hidden), state]
    tiling = recurrence_candidates(recurrence_shape(gates, weight), SM_90)[0]
    return compile_job(launch_of(op, gates, weight, *last, tiling.numbers).job, architecture=90)

for case in (
    (lstm_layer, 512, 1, 1, torch.float32),
    (lstm_layer, 200, 3, 2, torch.bfloat16),
    (gru_layer, 256, 16, 1, torch.float16),
    (gru_layer, 64, 4, 2, torch.float32),
    (gru_layer, 1024, 1, 1, torch.float16),
):
    kernel = compiled(*case)
    Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", "kernel.cubin"], capture_output=True, text=True)
    ptx = kernel.asm["ptx"]
    print("STACK:0 " in usage.stdout, *(ptx.count(name) for name in ("bar.sync", "vote.sync", "st.relaxed.gpu")))
"""


def test_weights_stay_in_registers_and_a_step_has_two_barriers(tmp_path: Path) -> None:
    assert run(f"import os\nos.chdir({str(tmp_path)!r})\n{COMPILE}", tmp_path).splitlines() == ["True 2 1 1"] * 5
