"""The bounds of regions, tensors and launches, and of what a whole plan may ask of a machine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeAlias

from nimblert.plan import ITEM_NBYTES, Kernel, Launch, Plan, Pointer, Program, Region, Target, Wait
from nimblert.plan.records import MAX_RANK, Limits

MAX_NBYTES = 1 << 48
"""Every region is smaller than this: the address space of a process."""

Sizes: TypeAlias = Mapping[tuple[Region, int], int]
"""Bytes of each region by (region, index)."""


def region_sizes(plan: Plan, program: Program) -> Sizes:
    """Return the bytes of each region that a program may name."""
    return {
        (Region.ARENA, 0): program.arena_nbytes,
        (Region.WEIGHTS, 0): plan.weights_nbytes,
        (Region.STATE, 0): plan.state_nbytes,
        **{(Region.INPUT, i): nbytes for i, nbytes in enumerate(program.input_nbytes)},
        **{(Region.OUTPUT, i): nbytes for i, nbytes in enumerate(program.output_nbytes)},
    }


def under(path: str, sentences: Iterable[str]) -> Iterator[str]:
    """Return the sentences, each preceded by the path of the record that it is about."""
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


def limit_problems(plan: Plan, limits: Limits) -> Iterator[str]:
    """Yield a sentence for each limit that ``plan`` exceeds; `verify` checks single tensors."""
    for name in ("modules", "kernels", "programs", "refits", "bodies"):
        yield from _beyond(name, len(getattr(plan, name)), getattr(limits, name))
    if plan.target == Target.CPU:
        for i, module in enumerate(plan.modules):
            yield from _beyond(f"modules[{i}].code", module.code.nbytes, limits.model_nbytes, " bytes")
    passed = sum(sum(program.input_nbytes) + sum(program.output_nbytes) for program in plan.programs)
    yield from _beyond("memory", plan.state_nbytes + plan.arena_nbytes + passed, limits.memory_nbytes, " bytes")
    for path, programs in (("programs", plan.programs), ("bodies", plan.bodies), ("refits", plan.refits)):
        for i, program in enumerate(programs):
            for sentence in _program_problems(program, limits):
                yield f"{path}[{i}].{sentence}"
    for i, refit in enumerate(plan.refits):
        yield from _beyond(
            f"refits[{i}].memory", refit.arena_nbytes + sum(refit.input_nbytes), limits.memory_nbytes, " bytes"
        )


def _program_problems(program: Program, limits: Limits) -> Iterator[str]:
    yield from _beyond("stream_count", program.stream_count, limits.streams)
    yield from _beyond("event_count", program.event_count, limits.events)
    yield from _beyond("commands", len(program.commands), limits.commands)
    waits = sum(isinstance(command, Wait) for command in program.commands)
    yield from _beyond("commands", waits * program.stream_count, limits.clocks, " waits times streams")


def _beyond(what: str, found: int, limit: int, unit: str = "") -> Iterator[str]:
    if found > limit:
        yield f"{what}: {found}{unit}, the limit is {limit}: raise it (nimblert.Limits) if you trust the plan"


# Of the driver: CUDA C++ Programming Guide, "Compute Capabilities", technical specifications. The values are those of
# compute capability 9.0, which no capability up to 12.x exceeds.
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_BLOCK_THREADS = 1024
MAX_PORTABLE_CLUSTER_BLOCKS = 8
MAX_CLUSTER_BLOCKS = 16
MAX_DYNAMIC_SMEM_NBYTES = 232448
MAX_PARAMS_NBYTES = 32764


def launch_problems(launch: Launch, kernel: Kernel) -> Iterator[str]:
    """Yield a sentence for each limit that ``launch`` breaks."""
    if not _within(launch.grid, MAX_GRID):
        yield f"grid: {launch.grid}, expected 1 to {MAX_GRID}"
    if not _within(launch.block, MAX_BLOCK) or prod(launch.block) > MAX_BLOCK_THREADS:
        yield f"block: {launch.block}, expected 1 to {MAX_BLOCK}, at most {MAX_BLOCK_THREADS} threads"
    if launch.cluster != (0, 0, 0):
        yield from _cluster_problems(launch, kernel)
    if launch.dynamic_smem_nbytes > min(kernel.max_dynamic_smem_nbytes, MAX_DYNAMIC_SMEM_NBYTES):
        yield (
            f"dynamic_smem_nbytes: {launch.dynamic_smem_nbytes}, the kernel takes"
            f" {kernel.max_dynamic_smem_nbytes}, the device {MAX_DYNAMIC_SMEM_NBYTES}"
        )


def _cluster_problems(launch: Launch, kernel: Kernel) -> Iterator[str]:
    """Yield the rules of cuLaunchKernelEx for CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION that are broken."""
    limit = MAX_CLUSTER_BLOCKS if kernel.non_portable_cluster else MAX_PORTABLE_CLUSTER_BLOCKS
    if not all(launch.cluster) or prod(launch.cluster) > limit:
        yield f"cluster: {launch.cluster}, expected 1 to {limit} blocks"
    elif any(blocks % size for blocks, size in zip(launch.grid, launch.cluster, strict=True)):
        yield f"cluster: {launch.cluster} does not divide the grid {launch.grid}"


def _within(size: tuple[int, int, int], limit: tuple[int, int, int]) -> bool:
    """Return whether each of the three is from 1 to its limit."""
    return 0 < size[0] <= limit[0] and 0 < size[1] <= limit[1] and 0 < size[2] <= limit[2]
