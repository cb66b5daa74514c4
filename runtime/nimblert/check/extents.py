"""The extents of regions and tensors, and the rules that bound them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeAlias

from nimblert.plan import ITEM_NBYTES, Plan, Pointer, Program, Region

MAX_NBYTES = 1 << 48
"""Every region is smaller than this: the address space of a process."""
MAX_RANK = 64

Sizes: TypeAlias = Mapping[tuple[Region, int], int]
"""Bytes of each region by (region, index)."""


def region_sizes(plan: Plan, program: Program) -> Sizes:
    """The bytes of each region that a program may name."""
    return {
        (Region.ARENA, 0): program.arena_nbytes,
        (Region.WEIGHTS, 0): plan.weights_nbytes,
        (Region.STATE, 0): plan.state_nbytes,
        **{(Region.INPUT, i): nbytes for i, nbytes in enumerate(program.input_nbytes)},
        **{(Region.OUTPUT, i): nbytes for i, nbytes in enumerate(program.output_nbytes)},
    }


def under(path: str, sentences: Iterable[str]) -> Iterator[str]:
    """The sentences, each preceded by the path of the record that it is about."""
    return (f"{path}.{sentence}" for sentence in sentences)


def array_problems(dtype: str, shape: Sequence[int], limit: int) -> Iterator[str]:
    """Yield a sentence for each rule that dtype and shape break; the tensor may have ``limit`` bytes.

    The limit holds for the other dimensions of an empty tensor too, as it does in numpy.
    """
    if dtype not in ITEM_NBYTES:
        yield f"dtype: {dtype!r} is not one that a plan may name"
    elif len(shape) > MAX_RANK:
        yield f"shape: {len(shape)} dimensions, expected at most {MAX_RANK}"
    elif min(shape, default=0) < 0:
        yield f"shape: {shape} has a negative dimension"
    elif (nbytes := prod(filter(None, shape)) * ITEM_NBYTES[dtype]) > limit:
        yield f"shape: {shape} is {nbytes} bytes, the limit is {limit}"


def dense_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor; 0 for an unknown dtype or too many dimensions."""
    return prod(shape) * ITEM_NBYTES.get(dtype, 0) if len(shape) <= MAX_RANK else 0


def extent_problems(path: str, pointer: Pointer, nbytes: int, sizes: Sizes) -> Iterator[str]:
    """Yield a sentence unless ``nbytes`` bytes from ``pointer`` lie in its region."""
    region_nbytes = sizes.get((pointer.region, pointer.index))
    if region_nbytes is None:
        yield f"{path}: the program has no region {pointer.region.name}({pointer.index})"
    elif nbytes < 0 or pointer.offset < 0 or pointer.offset + nbytes > region_nbytes:
        yield (
            f"{path}: {nbytes} bytes at {pointer.offset} lie outside"
            f" {pointer.region.name}({pointer.index}) ({region_nbytes} bytes)"
        )
