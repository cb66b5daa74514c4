"""Which tilings are worth a try for a shape: the best few by a rough model of the time they take."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol, TypeVar

from nimblec.kernels.shapes import Convolution, Tiling, ceil_div


class _Blocks(Protocol):
    """A tiling of two axes."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def numbers(self) -> list[int]: ...


Cut = TypeVar("Cut", bound=_Blocks)

MULTIPROCESSORS = 132
"""Of an H100 or H200."""

BLOCKS_M = (16, 32, 64, 128)
BLOCKS_N = (16, 32, 64, 128)
BLOCKS_K = (32, 64, 128)
SPLITS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18)
WIDE = 64
"""Rows from which Hopper multiplies with its instructions for groups of four warps."""
SHARED_NBYTES = 110 * 1024
"""What one block may take of a multiprocessor's 227 KiB, so that the next kernel's blocks fit beside it."""

# Fitted to 590 times of 50 shapes on an H200 (ResNet-50, MobileNetV2, BERT; batch 1, weights not in the L2 cache).
# The fastest of a shape's 12 or so is the third by this estimate on average, and among the 10 candidates always.
_L2_BYTES_PER_US = 3.6e6
_BLOCK_BYTES_PER_US = 78.6e3
_BLOCK_BYTES_STORED_PER_US = 24e3
_FLOPS_PER_US = 2.5e6  # of one multiprocessor
_STEP_US = 0.0167
_STEP_US_PER_64 = 0.0439  # of block_k
_LOAD_US = 0.06  # of a step that waits for its loads, shared by the stages
_BEHIND = 0.384  # what a second block on a multiprocessor adds, the first one's waits being filled
_NARROW = 2.37  # less than 64 rows: no instructions for groups of four warps
_SPLIT_US = 1.3
_SHARPNESS = 3  # of the maximum of what goes on side by side; the lesser parts count a little too


def candidates(shape: Convolution, *, limit: int = 8, itemsize: int = 2) -> list[Tiling]:
    """At most ``limit`` tilings, the most promising first, of no cut of the result more than five.

    ``itemsize``: bytes of an element.
    """
    return most_promising(_all(shape, itemsize), partial(estimate, shape, itemsize=itemsize), limit=limit, alike=5)


def most_promising(tilings: Iterable[Cut], estimate: Callable[[Cut], float], *, limit: int, alike: int) -> list[Cut]:
    """The ``limit`` quickest by an estimate, no more than ``alike`` of the same block_m and block_n."""
    chosen: list[Cut] = []
    seen: Counter[tuple[int, int]] = Counter()
    for tiling in sorted(tilings, key=lambda tiling: (estimate(tiling), tiling.numbers)):
        cut = tiling.block_m, tiling.block_n
        if seen[cut] < alike:
            seen[cut] += 1
            chosen.append(tiling)
    return chosen[:limit]


def estimate(shape: Convolution, tiling: Tiling, *, itemsize: int = 2) -> float:
    """Microseconds, roughly: what the busiest multiprocessor reads, computes and writes, and what meeting costs.

    Without the launch itself. Tensor cores take elements of twice the size half as fast. In three
    products a float32 takes longer than this says, by 1.3 to 2 times; the order serves as well.
    """
    size_factor = itemsize / 2
    steps = ceil_div(tiling.steps(shape), tiling.split_k)
    blocks = tiling.blocks(shape)
    turns = ceil_div(blocks, MULTIPROCESSORS)
    size = tiling.block_m * tiling.block_n
    nbytes = steps * tiling.block_k * (tiling.block_m + tiling.block_n) * itemsize
    flops = 2 * steps * tiling.block_k * size
    narrow = _NARROW if tiling.block_m < WIDE else 1
    computing = turns * flops * size_factor / _FLOPS_PER_US * narrow
    busiest = max(turns * nbytes / _BLOCK_BYTES_PER_US, computing)
    everything = blocks * nbytes / _L2_BYTES_PER_US
    step = (_STEP_US + _STEP_US_PER_64 * tiling.block_k / 64 * size_factor) * narrow + _LOAD_US / tiling.num_stages
    own = steps * step * (1 + (turns - 1) * _BEHIND)
    meeting = 0.0
    if tiling.split_k > 1:
        meeting = _SPLIT_US + (tiling.split_k + 1) * size * 4 / _BLOCK_BYTES_PER_US
    together = (busiest**_SHARPNESS + everything**_SHARPNESS + own**_SHARPNESS) ** (1 / _SHARPNESS)
    return together + meeting + turns * size * itemsize / _BLOCK_BYTES_STORED_PER_US


def _all(shape: Convolution, itemsize: int) -> Iterator[Tiling]:
    for block_m in BLOCKS_M:
        if block_m > 16 and block_m >= 2 * shape.rows:
            continue
        for block_n in BLOCKS_N:
            if block_n > 16 and block_n >= 2 * shape.out_channels:
                continue
            for block_k in BLOCKS_K:
                yield from _splits(shape, block_m, block_n, block_k, itemsize)


def _splits(shape: Convolution, block_m: int, block_n: int, block_k: int, itemsize: int) -> Iterator[Tiling]:
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
            num_stages=_stages(block_k * (block_m + block_n) * itemsize, part),
        )


def _warps(block_m: int, block_n: int) -> int:
    if block_m * block_n >= 128 * 128:
        return 8
    return 4 if block_m * block_n >= 1024 else 2


def _stages(step_nbytes: int, part: int) -> int:
    """As many loads on their way as fit, no more than there are steps."""
    return max(1, min(SHARED_NBYTES // step_nbytes, part, 5))
