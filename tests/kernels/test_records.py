"""Tilings for GPUs that are not there: within the limits of each record, and compiled for it."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_process import BY_ARCHITECTURE, needs_triton, run

import nimblec
from nimblec.kernels.gpu import GPU, KNOWN, SM_80, SM_90, SM_120
from nimblec.kernels.products.depthwise_tilings import depthwise_candidates
from nimblec.kernels.products.gemm_tilings import candidates, shared_budget
from nimblec.kernels.reductions.attention_shapes import attention_shape
from nimblec.kernels.reductions.attention_tilings import attention_candidates, padded
from nimblec.kernels.reductions.norm_tilings import Norm, norm_candidates
from nimblec.kernels.shapes import Convolution

THREADS_PER_BLOCK = 1024
GPUS = st.sampled_from(KNOWN)
SIZES = st.sampled_from([2, 4])
SHAPES = st.builds(
    Convolution,
    batch=st.integers(1, 4),
    height=st.integers(1, 112),
    width=st.integers(1, 112),
    channels=st.integers(1, 2048),
    out_channels=st.integers(1, 2048),
    kernel=st.sampled_from([(1, 1), (3, 3), (7, 7)]),
    padding=st.just((3, 3)),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shape=SHAPES, gpu=GPUS, itemsize=SIZES)
def test_convolutions(shape: Convolution, gpu: GPU, itemsize: int) -> None:
    found = candidates(shape, gpu, itemsize=itemsize)
    assert found
    for tiling in found:
        step = tiling.block_k * (tiling.block_m + tiling.block_n) * itemsize
        assert step <= gpu.shared_per_block
        assert tiling.num_stages == 1 or step * tiling.num_stages <= shared_budget(gpu)
        assert 32 * tiling.num_warps <= THREADS_PER_BLOCK


@settings(max_examples=50, deadline=None, derandomize=True)
@given(shape=SHAPES, gpu=GPUS)
def test_depthwise_convolutions(shape: Convolution, gpu: GPU) -> None:
    assert depthwise_candidates(shape, gpu)
    assert all(32 * tiling.num_warps <= THREADS_PER_BLOCK for tiling in depthwise_candidates(shape, gpu))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=st.integers(1, 5000), columns=st.integers(1, 8192), gpu=GPUS)
def test_norms(rows: int, columns: int, gpu: GPU) -> None:
    shape = Norm(rows=rows, columns=columns)
    assert norm_candidates(shape, gpu)
    for tiling in norm_candidates(shape, gpu):
        assert tiling.block_r * shape.width <= 64 * 32 * tiling.num_warps, "what the registers of threads hold"
        assert 32 * tiling.num_warps <= THREADS_PER_BLOCK


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tokens=st.tuples(st.integers(1, 1500), st.integers(1, 1500)), size=st.integers(1, 32), gpu=GPUS, itemsize=SIZES)
def test_attentions(tokens: tuple[int, int], size: int, gpu: GPU, itemsize: int) -> None:
    query, key = (torch.empty(1, 8, count, 4 * size, device="meta") for count in tokens)
    found = attention_candidates(attention_shape(query, key, key, None, causal=False), gpu, itemsize=itemsize)
    assert found
    for tiling in found:
        keys = 2 * padded(4 * size) * itemsize * tiling.block_n * (1 if tiling.num_stages == 1 else tiling.num_stages)
        assert keys <= gpu.shared_per_block
        assert 32 * tiling.num_warps <= THREADS_PER_BLOCK


def test_smaller_memory_is_respected() -> None:
    shape = Convolution(batch=1, height=1, width=512, channels=4096, out_channels=4096)

    def loaded(gpu: GPU) -> int:
        return max(t.num_stages * t.block_k * (t.block_m + t.block_n) for t in candidates(shape, gpu, limit=99))

    assert loaded(SM_120) < loaded(SM_90)
    assert (SM_80.trigger, SM_90.trigger) == ("none", "late")


def test_nothing_else_names_a_gpu() -> None:
    """No number of multiprocessors and no capability outside the record."""
    root = Path(nimblec.__file__).parent
    named = re.compile(r"\b132\b|HOPPER|\(\s*9\s*,\s*0\s*\)|\bsm_\d+|get_device_capability|multi_processor_count")
    files = [*root.glob("kernels/**/*.py"), *root.glob("optimize/**/*.py"), *root.glob("levels/**/*.py")]
    found = {str(path.relative_to(root)) for path in files if named.search(path.read_text())}
    assert found == {"kernels/gpu.py"}


COMPILE = """
import torch
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.attention_shapes import attention_shape
from nimblec.kernels.reductions.attention_tilings import attention_candidates
from nimblec.kernels.compiling import compile_job
from nimblec.kernels.gpu import KNOWN
from nimblec.kernels.images import convolution_shape
from nimblec.kernels.launch import launch_of
from nimblec.kernels.shapes import product
from nimblec.kernels.products.depthwise_op import depthwise
from nimblec.kernels.products.depthwise_tilings import depthwise_candidates
from nimblec.kernels.products.gemm_op import linear
from nimblec.kernels.products.gemm_tilings import candidates
from nimblec.kernels.reductions.norm_op import layer_norm, norm_shape
from nimblec.kernels.reductions.norm_tilings import norm_candidates

def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")

def most(tilings):
    # the one that asks for most shared memory
    return max(tilings, key=lambda t: t.num_stages * t.block_n * getattr(t, "block_k", 1)).numbers

def launches_of(dtype, gpu):
    x, weight = empty(512, 2048, dtype=dtype), empty(16, dtype=dtype)
    counters = empty(1, dtype=torch.int32)
    images = empty(1, 96, 28, 28, dtype=dtype).contiguous(memory_format=torch.channels_last)
    heads = empty(1, 1024, 8, 128, dtype=dtype).transpose(1, 2)
    geometry = (96, [3, 3], [1, 1], [1, 1], [1, 1])
    product_tiling = most(candidates(product(512, 2048, 2048), gpu, limit=50, itemsize=dtype.itemsize))
    scores = attention_shape(heads, heads, heads, None, causal=False)
    (channelwise, *_) = depthwise_candidates(convolution_shape(images, *geometry), gpu)
    (rows, *_) = norm_candidates(norm_shape(x, rms=False), gpu)
    yield linear, x, weight, None, None, counters, 2048, "gelu", product_tiling, gpu.trigger
    attention_tiling = most(attention_candidates(scores, gpu, limit=50, itemsize=dtype.itemsize))
    yield attention, heads, heads, heads, None, False, 0.1, attention_tiling, gpu.trigger
    yield depthwise, images, weight, None, None, *geometry, "relu", channelwise.numbers, gpu.trigger
    yield layer_norm, x, None, None, 1e-5, False, dtype, rows.numbers, gpu.trigger

for number, gpu in enumerate(KNOWN):
    if gpu.architecture not in architectures:
        continue
    for dtype_number, dtype in enumerate((torch.float16, torch.float32)):
        for place, (op, *args) in enumerate(launches_of(dtype, gpu)):
            if place >= 2 and (number + place) % 2 != dtype_number:
                continue  # without tensor cores each dtype is compiled for every other GPU
            launch = launch_of(op, *args)
            kernel = compile_job(launch.job, architecture=gpu.architecture)
            told = kernel.metadata
            print(gpu.architecture, launch.template, told.shared <= gpu.shared_per_block,
                getattr(told, "tmem_size", 0) <= 512,
                ("griddepcontrol" in kernel.asm["ptx"]) == gpu.has_programmatic_launch)
"""


@needs_triton
@pytest.mark.timeout(900)  # minutes on a busy machine
@pytest.mark.parametrize("architectures", BY_ARCHITECTURE)
def test_the_most_demanding_tilings_compile(architectures: tuple[int, ...], tmp_path: Path) -> None:
    lines = run(f"architectures = {architectures}\n{COMPILE}", tmp_path).splitlines()
    assert Counter(int(line.split()[0]) for line in lines) == dict.fromkeys(architectures, 6)
    assert all(line.split()[2:] == ["True"] * 3 for line in lines), lines
