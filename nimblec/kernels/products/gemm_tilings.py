"""How a convolution or product is divided into blocks, and the candidates for a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from nimblec.kernels.gpu import GPU, KIB
from nimblec.kernels.shapes import Convolution, Pair, ceil_div
from nimblec.kernels.tilings import TwoAxisTiling, most_promising

BLOCKS_M = (16, 32, 64, 128)
BLOCKS_N = (16, 32, 64, 128)
BLOCKS_K = (32, 64, 128)
SPLITS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18)
WIDE = 64
"""Rows of a tile from which instructions of warp groups can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling(TwoAxisTiling):
    """A block computes ``block_m`` rows by ``block_n`` columns of a part of the sum.

    ``split_k`` blocks share the sum of one tile; each walks its part ``block_k`` products at a time. Tensor cores
    multiply at least 16 rows; with a ``block_m`` of 1 they are not used.
    """

    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def tiles(self, shape: Convolution) -> Pair:
        """Return the number of tiles of the result: down, across."""
        return ceil_div(shape.rows, self.block_m), ceil_div(shape.out_channels, self.block_n)

    def steps(self, shape: Convolution) -> int:
        """Return how many steps of ``block_k`` the whole sum has."""
        return ceil_div(shape.depth, self.block_k)

    def blocks(self, shape: Convolution) -> int:
        """Return how many blocks are launched."""
        down, across = self.tiles(shape)
        return down * across * self.split_k


class Fp8Tiling(Tiling):
    """A tiling of a product of e4m3."""

    name_prefix = "fp8 "


def shared_budget(gpu: GPU) -> int:
    """Return the bytes of shared memory for the loads of one block that leave room for a block of the next kernel."""
    return (gpu.shared_per_block + KIB) // 2 - 4 * KIB


def candidates(
    shape: Convolution,
    gpu: GPU,
    *,
    limit: int = 8,
    itemsize: int = 2,
    splits: Sequence[int] = SPLITS,
    alike: int = 5,
) -> list[Tiling]:
    """Return at most ``limit`` tilings, the most promising first, at most ``alike`` with the same tiles of the result.

    ``itemsize``: bytes of an element and of a weight; ``splits``: the numbers of blocks that may share a sum.
    """
    cost = partial(estimate, shape, gpu=gpu, itemsize=itemsize)
    return most_promising(_all(shape, gpu, itemsize, splits), cost, limit=limit, alike=alike)


def row_candidates(shape: Convolution) -> list[Tiling]:
    """Return tilings of a product of one row, the most promising first.

    Such a product takes as long as its weights take to arrive. So a block has few columns and long pieces of them, and
    there are several blocks for each multiprocessor. Fitted to the five products of a Llama of 1.1 billion weights.
    """
    block_n = 4 if shape.out_channels <= 4096 else 8 if shape.out_channels <= 16384 else 16
    made = [
        Tiling(block_m=1, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
        for n in (block_n, 2 * block_n)
        for k, warps, stages in ((8192 // n, 8, 1), (512, 4, 5), (512, 2, 4), (512, 8, 1), (128, 4, 5))
    ]
    return [each for each in made if each.steps(shape) * each.block_k <= max(shape.depth * 1.15, 128)]


def estimate(shape: Convolution, tiling: Tiling, *, gpu: GPU, itemsize: int = 2) -> float:
    """Estimate microseconds: what the busiest multiprocessor reads, computes and writes, and merging split sums.

    The launch itself is not included. Tensor cores multiply elements of twice the size at half the rate. Float32 in
    three products takes 1.3 to 2 times as long as estimated; the order is still useful.
    """
    speed, size_factor = gpu.speed, itemsize / 2
    steps = ceil_div(tiling.steps(shape), tiling.split_k)
    blocks = tiling.blocks(shape)
    turns = ceil_div(blocks, gpu.multiprocessors)
    size = tiling.block_m * tiling.block_n
    nbytes = steps * _step_nbytes(itemsize, tiling.block_m, tiling.block_n, tiling.block_k)
    flops = 2 * steps * tiling.block_k * size
    narrow = speed.narrow if tiling.block_m < WIDE else 1
    computing = turns * flops * size_factor / speed.flops * narrow
    busiest = max(turns * nbytes / speed.block_bytes, computing)
    everything = blocks * nbytes / speed.l2_bytes
    step = (speed.step + speed.step_per_64 * tiling.block_k / 64 * size_factor) * narrow
    step += speed.load / tiling.num_stages
    own = steps * step * (1 + (turns - 1) * speed.behind)
    meeting = 0.0
    if tiling.split_k > 1:
        meeting = speed.split + (tiling.split_k + 1) * size * 4 / speed.block_bytes
    sharp = speed.sharpness
    together: float = (busiest**sharp + everything**sharp + own**sharp) ** (1 / sharp)
    return together + meeting + turns * size * itemsize / speed.block_bytes_stored


def _step_nbytes(itemsize: int, block_m: int, block_n: int, block_k: int) -> int:
    return block_k * (block_m + block_n) * itemsize


def _all(shape: Convolution, gpu: GPU, itemsize: int, splits: Sequence[int]) -> Iterator[Tiling]:
    for block_m in BLOCKS_M:
        if block_m > 16 and block_m >= 2 * shape.rows:
            continue
        for block_n in BLOCKS_N:
            of_group = shape.out_channels // shape.groups
            if (block_n > 16 and block_n >= 2 * of_group) or (shape.groups > 1 and of_group % block_n):
                continue
            for block_k in BLOCKS_K:
                yield from _splits(shape, gpu, (block_m, block_n, block_k), itemsize, splits)


def _splits(
    shape: Convolution, gpu: GPU, blocks: tuple[int, int, int], itemsize: int, splits: Sequence[int]
) -> Iterator[Tiling]:
    block_m, block_n, block_k = blocks
    step_nbytes = _step_nbytes(itemsize, *blocks)
    if step_nbytes > gpu.shared_per_block:
        return
    taps = shape.kernel[0] * shape.kernel[1]
    if taps > 1 and shape.channels % block_k and block_k > 32:
        return  # offsets are computed for each element: keep the tile narrow
    steps = ceil_div(shape.depth, block_k)
    if block_k > 32 and block_k >= 2 * shape.depth:
        return
    for split in splits:
        part = ceil_div(steps, split)
        if split > 1 and (part * (split - 1) >= steps or split * part > steps * 1.15):
            continue
        yield Tiling(
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            split_k=split,
            num_warps=_warps(block_m, block_n),
            num_stages=max(1, min(shared_budget(gpu) // step_nbytes, part, 5)),
        )


def _warps(block_m: int, block_n: int) -> int:
    if block_m * block_n >= 128 * 128:
        return 8
    return 4 if block_m * block_n >= 1024 else 2
