"""Weights in the order in which the kernels read them: one tile after the other, each in one piece of memory.

A block's part of the weights is then contiguous: one instruction fetches it into the L2 cache.
"""

import torch
from torch import Tensor

from nimblec.kernels.shapes import Tiling, ceil_div


def pack_convolution(weight: Tensor, tiling: Tiling) -> Tensor:
    """Tiles of the weights (out channels, in channels, height, width) of a convolution; see `pack_rows`."""
    return pack_rows(weight.permute(0, 2, 3, 1).flatten(1), tiling)


def pack_linear(weight: Tensor, tiling: Tiling) -> Tensor:
    """Tiles of the right matrix (depth, columns) of a product; see `pack_rows`."""
    return pack_rows(weight.t(), tiling)


def pack_rows(weight: Tensor, tiling: Tiling) -> Tensor:
    """(columns, depth) cut into tiles: (tiles across, tiles deep, block_n, block_k), zeros past the edges."""
    columns, depth = weight.shape
    across, deep = ceil_div(columns, tiling.block_n), ceil_div(depth, tiling.block_k)
    padded = weight.new_zeros(across * tiling.block_n, deep * tiling.block_k)
    padded[:columns, :depth] = weight
    return padded.reshape(across, tiling.block_n, deep, tiling.block_k).transpose(1, 2).contiguous()


def unpack_rows(packed: Tensor, columns: int, depth: int) -> Tensor:
    """The inverse of `pack_rows`."""
    across, deep, block_n, block_k = packed.shape
    return packed.transpose(1, 2).reshape(across * block_n, deep * block_k)[:columns, :depth]


def counters(tiles: int, device: torch.device) -> Tensor:
    """How many blocks of each tile have arrived: zeros before and after each launch."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)
