"""Rules of tensors and of where they lie, shared by those of plans and of launches on the CPU."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeAlias

from nimblert.plan import ITEM_NBYTES, Plan, Pointer, Program, Region

MAX_NBYTES = 1 << 48
"""No region is as large as this: it is the address space of a process."""
MAX_RANK = 64

Sizes: TypeAlias = Mapping[tuple[Region, int], int]
"""Bytes of each region by (region, index)."""


def region_sizes(plan: Plan, program: Program) -> Sizes:
    """The regions that a program may name."""
    return {
        (Region.ARENA, 0): program.arena_nbytes,
        (Region.WEIGHTS, 0): plan.weights_nbytes,
        (Region.STATE, 0): plan.state_nbytes,
        **{(Region.INPUT, i): nbytes for i, nbytes in enumerate(program.input_nbytes)},
        **{(Region.OUTPUT, i): nbytes for i, nbytes in enumerate(program.output_nbytes)},
    }


def under(path: str, sentences: Iterable[str]) -> Iterator[str]:
    """The sentences with the path of the record that they are about."""
    return (f"{path}.{sentence}" for sentence in sentences)


def array_problems(dtype: str, shape: Sequence[int], limit: int) -> Iterator[str]:
    """Rules that let a tensor's size be computed; ``limit`` is the most bytes that it may have.

    An empty tensor obeys the limit in its other dimensions: numpy counts these too.
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
    """Size of a tensor whose elements lie side by side, 0 where `array_problems` objects."""
    return prod(shape) * ITEM_NBYTES.get(dtype, 0) if len(shape) <= MAX_RANK else 0


def extent_problems(path: str, pointer: Pointer, nbytes: int, sizes: Sizes) -> Iterator[str]:
    """``nbytes`` bytes from ``pointer`` lie in its region."""
    region_nbytes = sizes.get((pointer.region, pointer.index))
    if region_nbytes is None:
        yield f"{path}: the program has no region {pointer.region.name}({pointer.index})"
    elif nbytes < 0 or pointer.offset < 0 or pointer.offset + nbytes > region_nbytes:
        yield (
            f"{path}: {nbytes} bytes at {pointer.offset} lie outside"
            f" {pointer.region.name}({pointer.index}) ({region_nbytes} bytes)"
        )
