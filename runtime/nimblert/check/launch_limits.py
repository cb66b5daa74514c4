"""The rules of launches on the CUDA target: the limits of the driver.

Source: CUDA C++ Programming Guide, "Compute Capabilities", technical specifications; the values of compute capability
9.0, which no capability up to 12.x exceeds.
"""

from collections.abc import Iterator
from math import prod

from nimblert.plan import Kernel, Launch

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_BLOCK_THREADS = 1024
MAX_PORTABLE_CLUSTER_BLOCKS = 8
MAX_CLUSTER_BLOCKS = 16
MAX_DYNAMIC_SMEM_NBYTES = 232448
MAX_PARAMS_NBYTES = 32764


def problems(launch: Launch, kernel: Kernel) -> Iterator[str]:
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
    """Whether each of the three is from 1 to its limit."""
    return 0 < size[0] <= limit[0] and 0 < size[1] <= limit[1] and 0 < size[2] <= limit[2]
