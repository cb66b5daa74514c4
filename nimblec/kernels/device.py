# ruff: noqa: ANN001, ANN201 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
# ruff: noqa: C901, PLR0911, RET505 - branches are taken while they are compiled
"""Triton functions that the templates share, and how their kernels follow one another.

Under programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch and Synchronization") a
block starts while the kernel before still runs: it fetches weights, which nothing writes, into the L2 cache, then
waits. All blocks wait, so the end of a kernel implies the end of all kernels before it. They let the next kernel start
after the wait: blocks that start earlier would hide more of their launch, but may take room from blocks with work.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(TRIGGER: tl.constexpr):
    """Wait for the kernels before, then let the next one start; do neither where kernels start one after another."""
    if TRIGGER == "late":
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prepare(x, mask, image, channel, scale_ptr, shift_ptr, gate_ptr, CHANNELS: tl.constexpr, BEFORE: tl.constexpr):
    """Apply the prologue to x (rows, columns) in float32; ``image`` is each row's, None where there is only one."""
    exists = channel < CHANNELS
    x = x.to(tl.float32)
    if scale_ptr is not None:
        x *= tl.load(scale_ptr + channel, mask=exists, other=0.0)[None, :]
    if shift_ptr is not None:
        x += tl.load(shift_ptr + channel, mask=exists, other=0.0)[None, :]
    x = activate(x, BEFORE)
    if gate_ptr is not None:
        if image is None:
            x *= tl.load(gate_ptr + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
        else:
            gates = gate_ptr + (image * CHANNELS)[:, None] + channel[None, :]
            x *= tl.load(gates, mask=mask & exists[None, :], other=0.0).to(tl.float32)
    return tl.where(mask, x, 0.0)


@triton.constexpr_function
def slope_of(activation):
    """Return the slope of a leaky ReLU, `nimblec.graph.vocabulary.LEAKY` and a number; None for other activations."""
    name, _, slope = activation.partition(" ")
    return float(slope) if name == "leaky_relu" else None


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply the activation of that name, in float32."""
    SLOPE: tl.constexpr = slope_of(ACTIVATION)
    if SLOPE is not None:
        return tl.where(x > 0, x, x * SLOPE)
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu6":
        return tl.clamp(x, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "hardsigmoid":
        return tl.clamp(x + 3.0, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL) * (1.0 / 6.0)
    elif ACTIVATION == "hardswish":
        return x * tl.clamp(x + 3.0, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL) * (1.0 / 6.0)
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(x)
    elif ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh y) is sigmoid 2 y
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "tanh":
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0
    else:
        tl.static_assert(ACTIVATION == "none")
        return x


@triton.jit
def part_ptrs(total, partials_ptr, tile, SPLIT_K: tl.constexpr):
    """Return where the first part of a tile's sum lies, shaped as ``total``; the others follow it without gaps."""
    within = tl.arange(0, total.shape[0])[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]
    return partials_ptr + tile * (SPLIT_K * total.shape[0] * total.shape[1]) + within


@triton.jit
def leave_part(total, partial_ptrs, part, counter_ptr, SPLIT_K: tl.constexpr):
    """Store this block's part of the sum of a tile; return whether it is the last of the ``SPLIT_K`` parts."""
    tl.store(partial_ptrs + part * (total.shape[0] * total.shape[1]), total, cache_modifier=".cg")
    tl.debug_barrier()  # all threads' stores come before the one thread's release
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1


@triton.jit
def add_parts(partial_ptrs, counter_ptr, SPLIT_K: tl.constexpr):
    """Add the parts of a sum in their fixed order, and leave the counter zero."""
    tl.store(counter_ptr, 0)
    total = tl.load(partial_ptrs, cache_modifier=".cg")
    for other in tl.static_range(1, SPLIT_K):
        total += tl.load(partial_ptrs + other * (total.shape[0] * total.shape[1]), cache_modifier=".cg")
    return total


@triton.jit
def store(out_ptr, result, mask, factor):
    """Store a result in the dtype of out: with a factor, by which it is multiplied, as bytes of e4m3."""
    if factor is not None:
        # The conversion saturates.
        result = (result.to(tl.float32) * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(out_ptr, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def fetch_into_l2(address, nbytes):
    """Begin to fetch ``nbytes`` (a multiple of 16) of global memory into the L2 cache; one thread asks for all.

    PTX ISA, "cp.async.bulk.prefetch".
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
