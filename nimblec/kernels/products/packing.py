"""Weights in the order in which the kernels read them: tile after tile, each contiguous.

A block's part of the weights is then contiguous: one instruction fetches it into the L2 cache.
"""

from math import log, prod

import torch
from torch import Tensor
from torch.nn import functional

from nimblec.kernels.call import Made, zero_counters
from nimblec.kernels.products.fp8 import as_fp8, column_factors
from nimblec.kernels.products.gemm_tilings import BLOCKS_N, Tiling
from nimblec.kernels.products.trained_tilings import DepthwiseSum
from nimblec.kernels.shapes import Convolution, ceil_div

_GROUP = 32
"""A kernel's groups have a multiple of so many channels, the products of its shortest step."""


def kernel_groups(weight: Tensor, groups: int) -> int:
    """Return the most groups of a convolution, dividing ``groups``, that tiles fit; see `join_groups`."""
    made, read = weight.shape[0] // groups, weight.shape[1]
    fit = (n for n in range(1, groups) if groups % n == 0 and read * n % _GROUP == made * n % BLOCKS_N[0] == 0)
    return groups // next(fit, groups)


def join_groups(weight: Tensor, shape: Convolution) -> Tensor:
    """Return the weights (out channels, channels of a group, height, width) of ``shape``, whose groups may be fewer.

    Several are joined with zeros between them: an infinite number of one becomes NaN in the others.
    """
    count = shape.channels // weight.shape[1]
    if count == 1:
        return weight
    blocks = weight.unflatten(0, (shape.groups, count, -1))
    joined = weight.new_zeros(*blocks.shape[:3], count, *blocks.shape[3:])
    joined.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
    return joined.flatten(0, 2).flatten(1, 2)


def pack_convolution(weight: Tensor, tiling: Tiling) -> Tensor:
    """Cut the weights (out channels, in channels, height, width) of a convolution into tiles; see `pack_rows`."""
    return pack_rows(weight.permute(0, 2, 3, 1).flatten(1), tiling)


def pack_linear(weight: Tensor, tiling: Tiling) -> Tensor:
    """Cut the right matrix (depth, columns) of a product into tiles; see `pack_rows`."""
    return pack_rows(weight.t(), tiling)


def pack_fp8(weight: Tensor, tiling: Tiling) -> Tensor:
    """Cut the right matrix (depth, columns) of a product into tiles of bytes of e4m3, multiples of `column_factors`."""
    return as_fp8(pack_linear(weight.float() / column_factors(weight), tiling)).view(torch.uint8)


def pack_rows(weight: Tensor, tiling: Tiling) -> Tensor:
    """Cut (columns, depth) into tiles: (tiles across, tiles deep, block_n, block_k), zeros past the edges."""
    columns, depth = weight.shape
    across, deep = ceil_div(columns, tiling.block_n), ceil_div(depth, tiling.block_k)
    padded = functional.pad(weight, (0, deep * tiling.block_k - depth, 0, across * tiling.block_n - columns))
    return padded.reshape(across, tiling.block_n, deep, tiling.block_k).transpose(1, 2).contiguous()


CUT_OFF = 2**-11 / (2 * log(2))
"""The average relative loss of TF32: half of its last bit, with leading digits distributed by Benford's law."""


def for_tensor_cores(weight: Tensor) -> Tensor:
    """Prepare float32 weights for tensor cores, which multiply them as TF32.

    They cut off the last 13 bits of both factors, so that each layer's result comes out smaller by the
    same factor, and a deep network's by percents. So weights are rounded here, and scaled up by what
    the other factor loses on average.
    """
    bits = (weight.double() / (1 - CUT_OFF)).float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def unpack_rows(packed: Tensor, columns: int, depth: int) -> Tensor:
    """Return the inverse of `pack_rows`."""
    across, deep, block_n, block_k = packed.shape
    return packed.transpose(1, 2).reshape(across * block_n, deep * block_k)[:columns, :depth]


def counters_of(tiling: Tiling | DepthwiseSum, shape: Convolution, device: torch.device) -> Made | None:
    """Return a counter per tile of the blocks that have arrived, for one call; None where a tile has one block."""
    return None if tiling.split_k == 1 else zero_counters(prod(tiling.tiles(shape)), device)
