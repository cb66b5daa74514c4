"""How an attention is divided into blocks, and the candidates for a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from nimblec.kernels.gpu import GPU
from nimblec.kernels.reductions.attention_shapes import Attention
from nimblec.kernels.shapes import ceil_div, next_power_of_2
from nimblec.kernels.tilings import TwoAxisTiling, most_promising

_FETCHED_REGISTERS = 128
"""The registers of a thread, of 255, that may hold keys and values where one step reads all."""
_LOADED_PART = 200 / 227
"""The part of a block's shared memory that may hold queries, keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiling(TwoAxisTiling):
    """A block computes ``block_m`` queries of a head and reads ``block_n`` keys in each step."""

    num_warps: int = 4
    num_stages: int = 2

    def blocks(self, shape: Attention) -> int:
        """Return how many blocks are launched."""
        return shape.batch * shape.heads * ceil_div(shape.queries, self.block_m)

    def steps(self, shape: Attention) -> int:
        """Return how many steps over the keys the longest block takes."""
        return ceil_div(shape.read_keys, self.block_n)


def padded(size: int) -> int:
    """Return the width of a tile that holds a head."""
    return max(16, next_power_of_2(size))


def attention_candidates(shape: Attention, gpu: GPU, *, limit: int = 6, itemsize: int = 2) -> list[AttentionTiling]:
    """Return at most ``limit`` tilings, the best first, at most two that differ only in warps and stages.

    ``itemsize``: bytes of an element.
    """
    return most_promising(_all(shape, gpu, itemsize), partial(estimate, shape, gpu=gpu), limit=limit, alike=2)


def estimate(shape: Attention, tiling: AttentionTiling, *, gpu: GPU) -> float:
    """Estimate microseconds: latency and products of each step, for each wave of blocks."""
    turns = ceil_div(tiling.blocks(shape), gpu.multiprocessors)
    steps = tiling.steps(shape)
    width = (padded(shape.size) + padded(shape.value_size)) * tiling.block_n
    flops = 2 * tiling.block_m * width * steps
    nbytes = 2 * width * steps
    latency = 0.5 + 0.25 * (steps - 1) / min(tiling.num_stages, 2)
    # Softmax and conversions go through registers, by the thread.
    elements = tiling.block_m * tiling.block_n * steps / (32 * tiling.num_warps)
    busy = flops / 3e6 + nbytes / 120e3
    return latency + ceil_div(turns, 2) * elements * 0.004 + turns * busy


def _all(shape: Attention, gpu: GPU, itemsize: int) -> Iterator[AttentionTiling]:
    longest = max(32, next_power_of_2(shape.read_keys))
    for block_m in (16, 32, 64, 128):
        if block_m > 16 and block_m >= 2 * shape.queries:
            continue
        for block_n in (32, 64, 128, 256):
            if block_n > longest:
                continue
            for num_warps in (1, 2, 4, 8):
                # Numbers that one thread holds.
                scores = block_m * block_n // (32 * num_warps)
                if 8 <= scores <= 96 and num_warps * 4 <= block_m:
                    cut = AttentionTiling(block_m=block_m, block_n=block_n, num_warps=num_warps)
                    yield from _staged(shape, cut, gpu, itemsize)


def _staged(shape: Attention, cut: AttentionTiling, gpu: GPU, itemsize: int) -> Iterator[AttentionTiling]:
    """Yield the tiling with its numbers of stages: one step loads through registers, several through shared memory."""
    width = padded(shape.size) + padded(shape.value_size)
    steps = cut.steps(shape)
    if steps == 1:
        registers = cut.block_n * width * itemsize // (4 * 32 * cut.num_warps)
        nbytes = itemsize * width * max(cut.block_n, cut.block_m)  # the products read them there
        if registers <= _FETCHED_REGISTERS and nbytes <= gpu.shared_per_block:
            yield replace(cut, num_stages=1)
        return
    for num_stages in (2, 3):
        nbytes = itemsize * width * (num_stages * cut.block_n + cut.block_m)
        if nbytes <= gpu.shared_per_block * _LOADED_PART and num_stages <= steps:
            yield replace(cut, num_stages=num_stages)
