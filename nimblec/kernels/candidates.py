"""Which tilings are worth a try for a shape: the best few by a rough model of the time they take."""

from collections.abc import Iterator

from nimblec.kernels.shapes import Convolution, Tiling, ceil_div

MULTIPROCESSORS = 132
"""Of an H100 or H200."""

BLOCKS_M = (16, 32, 64, 128)
BLOCKS_N = (16, 32, 64, 128)
BLOCKS_K = (32, 64, 128)
SPLITS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18)
SHARED_NBYTES = 110 * 1024
"""What one block may take of a multiprocessor's 227 KiB, so that the next kernel's blocks fit beside it."""

_L2_BYTES_PER_US = 4.5e6
_BLOCK_BYTES_PER_US = 80e3
_STEP_US = 0.05
_STEP_US_PER_64 = 0.05  # of block_k
_FLOPS_PER_US = 4e6  # of one multiprocessor, small tiles
_SPLIT_US = 1.2


def candidates(shape: Convolution, *, limit: int = 10) -> list[Tiling]:
    """At most ``limit`` tilings, the most promising first, no two alike but for their split more than thrice."""
    chosen: list[Tiling] = []
    cuts: dict[tuple[int, int], int] = {}
    for tiling in sorted(_all(shape), key=lambda tiling: (estimate(shape, tiling), tiling.numbers)):
        cut = tiling.block_m, tiling.block_n
        if cuts.get(cut, 0) < 3:
            cuts[cut] = cuts.get(cut, 0) + 1
            chosen.append(tiling)
    return chosen[:limit]


def estimate(shape: Convolution, tiling: Tiling) -> float:
    """Microseconds, roughly: what the busiest multiprocessor reads and computes, and what meeting costs."""
    steps = ceil_div(tiling.steps(shape), tiling.split_k)
    blocks = tiling.blocks(shape)
    turns = ceil_div(blocks, MULTIPROCESSORS)
    nbytes = steps * tiling.block_k * (tiling.block_m + tiling.block_n) * 2
    flops = 2 * steps * tiling.block_k * max(tiling.block_m, 16) * max(tiling.block_n, 16)
    busiest = turns * max(nbytes / _BLOCK_BYTES_PER_US, flops / _FLOPS_PER_US)
    everything = blocks * nbytes / _L2_BYTES_PER_US
    step = _STEP_US + _STEP_US_PER_64 * tiling.block_k / 64
    own = steps * step * ceil_div(turns, 2)  # two blocks at a time hide each other's waits
    meeting = 0.0
    if tiling.split_k > 1:
        meeting = _SPLIT_US + (tiling.split_k + 1) * tiling.block_m * tiling.block_n * 4 / _BLOCK_BYTES_PER_US
    return max(busiest, everything, own) + meeting


def _all(shape: Convolution) -> Iterator[Tiling]:
    for block_m in BLOCKS_M:
        if block_m > 16 and block_m >= 2 * shape.rows:
            continue
        for block_n in BLOCKS_N:
            if block_n > 16 and block_n >= 2 * shape.out_channels:
                continue
            for block_k in BLOCKS_K:
                yield from _splits(shape, block_m, block_n, block_k)


def _splits(shape: Convolution, block_m: int, block_n: int, block_k: int) -> Iterator[Tiling]:
    taps = shape.kernel[0] * shape.kernel[1]
    if taps > 1 and shape.channels % block_k and block_k > 32:
        return  # all offsets are computed for each product: keep the tile narrow
    steps = ceil_div(shape.depth, block_k)
    if block_k > 32 and block_k >= 2 * shape.depth:
        return
    for split in SPLITS:
        part = ceil_div(steps, split)
        if split > 1 and (part * (split - 1) >= steps or split * part > steps * 1.15):
            continue
        yield Tiling(
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            split_k=split,
            num_warps=_warps(block_m, block_n),
            num_stages=_stages(block_m, block_n, block_k, part),
        )


def _warps(block_m: int, block_n: int) -> int:
    if block_m * block_n >= 128 * 128:
        return 8
    return 4 if block_m * block_n >= 1024 else 2


def _stages(block_m: int, block_n: int, block_k: int, part: int) -> int:
    """As many loads on their way as fit, no more than there are steps."""
    fitting = SHARED_NBYTES // (2 * block_k * (block_m + block_n))
    return max(1, min(fitting, part, 5))
